"""Patterns on training steps of Keras networks: what is found, and that float32 stays float32."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from training_steps import Step, residual_cnn, token_mlp, trace

from graph_passes import PrecisionConfig, rewrite_graph_def
from graph_passes.ir.view import view_body
from graph_passes.policy.config import RULES
from graph_passes.units.fusion import UNIT_PASSES, Fusion, find_units, passes_in_force
from graph_passes.units.unit_pass import UnitPass

CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU")
GPU = PrecisionConfig(target_dtype="float16", device="GPU")
BUILDERS = {"cnn": residual_cnn, "mlp": token_mlp}


@pytest.fixture(scope="module", params=[("cnn", 8), ("cnn", None), ("mlp", 8), ("mlp", None)])
def named_step(request: pytest.FixtureRequest) -> tuple[str, Step]:
    name, batch = request.param
    return name, trace(BUILDERS[name], batch)


def units_of(step: Step, config: PrecisionConfig, preserve: frozenset[str] = frozenset()) -> Fusion:
    view = view_body(step.graph_def, step.shapes)
    return find_units(step.graph_def, view, config, step.preserve | preserve)


def node_types(fusion: Fusion) -> Counter[str]:
    return Counter(unit.partition(":")[0] for unit in fusion.units)


def test_every_unit_is_found_with_and_without_a_known_batch(named_step):
    name, step = named_step
    expected = {
        ("cnn", "CPU"): {"batch-norm": 3},
        ("cnn", "GPU"): {"batch-norm": 3, "bias-gradient": 0},
        ("mlp", "CPU"): {"weight-gradient": 2},
        ("mlp", "GPU"): {"weight-gradient": 2},
    }
    for config in (CPU, GPU):
        found = node_types(units_of(step, config))
        for kind, count in expected[name, config.device].items():
            assert count == 0 or found[kind] == count, (config.device, found)


def test_a_look_at_the_graph_behind_each_pass_changes_nothing(named_step):
    _, step = named_step
    for config in (CPU, GPU):
        seen = {}
        view = view_body(step.graph_def, step.shapes)
        fusion = find_units(step.graph_def, view, config, step.preserve, seen.__setitem__)
        assert fusion.proto == units_of(step, config).proto == [*seen.values()][-1]
        assert list(seen) == [each.rule for each in passes_in_force(config) if each.rule in seen]
        norms = Counter(node.op for node in seen["batch-norm"].node)["FusedBatchNormV3"]
        assert norms == node_types(fusion)["batch-norm"]


def test_units_compute_what_the_primitives_compute(named_step):
    _, step = named_step
    before, weights = step.train(step.graph_def, 5)
    for config in (CPU, GPU):
        fusion = units_of(step, config)
        assert fusion.units
        after, changed = step.train(fusion.proto, 5)
        np.testing.assert_allclose(after, before, rtol=2e-4)
        for old, new in zip(weights, changed, strict=True):
            # Biases before a batch normalization have a gradient of 0 and hold rounding noise.
            np.testing.assert_allclose(new, old, rtol=2e-2, atol=2e-4)


def test_no_float32_island_is_left_between_convolutions():
    step = trace(residual_cnn, 8)
    result = rewrite_graph_def(step.graph_def, CPU, preserve=step.preserve, shapes=step.shapes)
    assert result.failure is None
    nodes = {node.name: node for node in result.graph_def.node}
    fused = [node for node in nodes.values() if node.op == "FusedBatchNormV3"]
    assert len(fused) == 3
    for node in fused:
        assert node.attr["T"].type != node.attr["U"].type
        maker = nodes[node.input[0].partition(":")[0]]
        assert maker.op != "Cast", "the unit takes the target dtype as it is"
    assert not any(node.op == "SquaredDifference" for node in nodes.values())


def test_moving_statistics_are_those_of_float32():
    step = trace(residual_cnn, None)
    _, expected = step.train(step.graph_def, 20)
    result = rewrite_graph_def(step.graph_def, CPU, preserve=step.preserve, shapes=step.shapes)
    _, found = step.train(result.graph_def, 20)
    moving = [
        (new, old)
        for variable, new, old in zip(step.variables, found, expected, strict=True)
        if "moving" in getattr(variable, "name", "")
    ]
    assert len(moving) == 6
    for new, old in moving:
        np.testing.assert_allclose(new, old, rtol=0.05, atol=0.02)


def test_a_preserved_node_inside_is_a_near_miss():
    step = trace(residual_cnn, 8)
    inside = next(node.name for node in step.graph_def.node if node.op == "SquaredDifference")
    fusion = units_of(step, CPU, frozenset((inside,)))
    assert node_types(fusion)["batch-norm"] == 2
    assert any("preserved" in miss.why for miss in fusion.misses)


def test_a_reader_outside_is_a_near_miss():
    step = trace(residual_cnn, 8)
    graph_def = type(step.graph_def).FromString(step.graph_def.SerializeToString())
    inside = next(node.name for node in graph_def.node if node.op == "SquaredDifference")
    spy = graph_def.node.add(name="spy", op="Neg", input=[inside])
    spy.attr["T"].type = 1
    view = view_body(graph_def, step.shapes)
    fusion = find_units(graph_def, view, CPU, step.preserve | {"spy"})
    assert node_types(fusion)["batch-norm"] == 2
    assert any("outside the unit" in miss.why for miss in fusion.misses)


@pytest.mark.parametrize("rule", ["batch-norm", "weight-gradient"])
def test_each_pattern_can_be_switched_off(rule):
    step = trace(residual_cnn if rule == "batch-norm" else token_mlp, 8)
    off = PrecisionConfig(target_dtype="bfloat16", device="CPU", disabled_rules=frozenset((rule,)))
    assert node_types(units_of(step, CPU))[rule]
    assert not node_types(units_of(step, off))[rule]
    assert not units_of(step, PrecisionConfig(parity=True)).units


def test_a_network_without_matrix_products_is_left_alone():
    step = trace(residual_cnn, 8)
    graph_def = type(step.graph_def)()
    graph_def.node.extend(n for n in step.graph_def.node if n.op in ("Const", "VarHandleOp"))
    assert find_units(graph_def, view_body(graph_def), CPU, ()).proto is graph_def


def test_passes_come_behind_what_they_rely_on():
    ensured: dict[str, list[int]] = {}
    for position, each in enumerate(UNIT_PASSES):
        for fact in each.ensures:
            ensured.setdefault(fact, []).append(position)
    for position, each in enumerate(UNIT_PASSES):
        for fact in each.requires:
            assert max(ensured[fact]) < position, (each.rule, fact)


def test_each_pass_is_a_rule_that_says_what_it_does():
    rules = [each.rule for each in UNIT_PASSES]
    assert len(set(rules)) == len(rules)
    assert set(rules) <= RULES.keys()


@pytest.mark.parametrize("rule", [each.rule for each in UNIT_PASSES if not each.in_float32])
def test_a_fault_of_one_pass_costs_no_other(
    rule: str, monkeypatch: pytest.MonkeyPatch, failed_searches: list[str]
) -> None:
    """But for those that rely on it."""

    def fail(_: object) -> None:
        raise IndexError("no such port")

    def passes(config: PrecisionConfig) -> list[UnitPass]:
        in_force = passes_in_force(config)
        return [
            dataclasses.replace(each, run=fail, ops=()) if each.rule == rule else each
            for each in in_force
        ]

    step = trace(residual_cnn, 8)
    wanted = node_types(units_of(step, GPU))
    failing = next(each for each in UNIT_PASSES if each.rule == rule)
    relying = {each.rule for each in UNIT_PASSES if {*each.requires} & {*failing.ensures}}
    monkeypatch.setattr("graph_passes.units.fusion.passes_in_force", passes)
    fusion = units_of(step, GPU)
    found = node_types(fusion)
    for kind in wanted.keys() - {rule, *relying}:
        assert found[kind] == wanted[kind]
    assert not found.keys() & relying
    assert any(miss.why.startswith(f"by the rule {rule!r}") for miss in fusion.misses)
    assert f"by the rule {rule!r} failed" in failed_searches.pop()
