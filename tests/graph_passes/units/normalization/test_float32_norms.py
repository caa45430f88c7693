"""Normalizations as units that are float32 inside and take and give the target dtype."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from norm_networks import NORMS, RULES, token_network
from programs import trace as trace_program
from rewrite_checks import rewrite_graph
from tensorflow.core.framework import types_pb2
from traced_graphs import trace as trace_function
from training_steps import Step, trace

from graph_passes import PrecisionConfig, rewrite_graph_def
from graph_passes.ir.view import view_body
from graph_passes.policy.op_lists import FLOAT32
from graph_passes.units.fusion import Fusion, find_units

UNFUSED = frozenset(("fused-layer-norm", "fused-update"))
CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU", disabled_rules=UNFUSED)
GPU = PrecisionConfig(target_dtype="float16", device="GPU", disabled_rules=UNFUSED)
DENIED = frozenset(("Mean", "Rsqrt", "RsqrtGrad", "Square", "SquaredDifference", "Pow"))


@pytest.fixture(scope="module", params=[(name, batch) for name in NORMS for batch in (8, None)])
def named_step(request: pytest.FixtureRequest) -> tuple[str, Step]:
    name, batch = request.param
    return name, trace(token_network(name), batch)


def units_of(step: Step, config: PrecisionConfig) -> Fusion:
    return find_units(step.graph_def, view_body(step.graph_def, step.shapes), config, step.preserve)


def test_every_norm_is_a_unit_and_no_near_miss(named_step: tuple[str, Step]) -> None:
    name, step = named_step
    for config in (CPU, GPU):
        fusion = units_of(step, config)
        found = [unit for unit in fusion.units if unit.startswith(RULES[name])]
        assert len(found) == 3
        assert not fusion.misses


def test_denied_ops_are_inside_and_stay_float32(named_step: tuple[str, Step]) -> None:
    _, step = named_step
    statistics = {
        node.name for node in step.graph_def.node if node.op in DENIED and "pool" not in node.name
    }
    inside = {n for n, place in units_of(step, CPU).node_lists.items() if place == FLOAT32}
    assert statistics <= inside
    result = rewrite_graph_def(step.graph_def, CPU, preserve=step.preserve, shapes=step.shapes)
    assert result.failure is None
    nodes = {node.name: node for node in result.graph_def.node}
    assert {nodes[n].attr["T"].type for n in inside if n in nodes} == {types_pb2.DT_FLOAT}


@pytest.mark.parametrize(("config", "tolerance"), [(CPU, 0.05), (GPU, 0.005)])
def test_gradients_agree_with_float32(
    named_step: tuple[str, Step], config: PrecisionConfig, tolerance: float
) -> None:
    """The loss to 1 %, every gradient to a part of the largest one."""
    _, step = named_step
    result = rewrite_graph_def(step.graph_def, config, preserve=step.preserve, shapes=step.shapes)
    (expected,), wanted = step.train(step.graph_def, 1)
    (found,), changed = step.train(result.graph_def, 1)
    assert found == pytest.approx(expected, rel=0.01)
    largest = max(np.max(np.abs(new)) for new in step.updates(wanted))
    for new, old in zip(step.updates(changed), step.updates(wanted), strict=True):
        np.testing.assert_allclose(new / largest, old / largest, atol=tolerance)


def test_a_second_rewrite_changes_nothing(named_step: tuple[str, Step]) -> None:
    _, step = named_step
    once = rewrite_graph_def(step.graph_def, CPU, preserve=step.preserve, shapes=step.shapes)
    twice = rewrite_graph_def(once.graph_def, CPU, preserve=step.preserve)
    assert twice.graph_def == once.graph_def


def test_the_residual_sum_behind_a_norm_is_low() -> None:
    """As it is where nothing denied is near; without the unit it stays float32."""
    step = trace(token_network("rms"), 8)
    converted = {}
    for rules in ((), ("rms-norm",)):
        config = PrecisionConfig(
            target_dtype="float16", device="GPU", disabled_rules=UNFUSED | {"cast-cut", *rules}
        )
        result = rewrite_graph_def(
            step.graph_def, config, preserve=step.preserve, shapes=step.shapes
        )
        nodes = result.graph_def.node
        sums = [node.attr["T"].type for node in nodes if node.op == "AddV2"]
        converted[rules] = sums.count(types_pb2.DT_HALF)
    assert converted[()] > converted["rms-norm",]


@pytest.mark.parametrize("name", ["layer", "rms"])
def test_each_rule_can_be_switched_off(name: str) -> None:
    step = trace(token_network(name), 8)
    off = PrecisionConfig(
        target_dtype="bfloat16", device="CPU", disabled_rules=UNFUSED | {RULES[name]}
    )
    assert not any(unit.startswith(RULES[name]) for unit in units_of(step, off).units)
    assert FLOAT32 not in units_of(step, off).node_lists.values()


def test_a_gradient_of_which_nothing_comes_hinders_no_unit() -> None:
    step = trace(token_network("layer"), 8)
    graph_def = type(step.graph_def).FromString(step.graph_def.SerializeToString())
    twin = graph_def.node.add()
    twin.CopyFrom(next(node for node in graph_def.node if node.op == "RsqrtGrad"))
    twin.name = "twin"
    fusion = find_units(graph_def, view_body(graph_def, step.shapes), CPU, step.preserve)
    assert sum(unit.startswith("layer-norm") for unit in fusion.units) == 3
    assert not fusion.misses


def test_a_near_miss_is_reported_and_left_alone() -> None:
    step = trace(token_network("layer"), 8)
    graph_def = type(step.graph_def).FromString(step.graph_def.SerializeToString())
    squares = next(node for node in graph_def.node if node.op == "SquaredDifference")
    variance = next(node for node in graph_def.node if squares.name in node.input[:1])
    axes = next(node for node in graph_def.node if node.name == variance.input[1])
    other = graph_def.node.add()
    other.CopyFrom(axes)
    other.name = variance.input[1] = "other_axes"
    other.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([1], tf.int32))
    assert variance.op == "Mean"
    fusion = find_units(graph_def, view_body(graph_def, step.shapes), CPU, step.preserve)
    assert sum(unit.startswith("layer-norm") for unit in fusion.units) == 2
    assert {miss.why for miss in fusion.misses} == {"mean and variance are over different axes"}
    once = rewrite_graph_def(graph_def, GPU, preserve=step.preserve, shapes=step.shapes)
    twice = rewrite_graph_def(once.graph_def, GPU, preserve=step.preserve)
    assert twice.graph_def == once.graph_def


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize("axes", [[0], [0, 1]])
def test_what_is_scaled_over_the_batch_keeps_its_mean(
    axes: list[int], keepdims: bool, known: bool, config: PrecisionConfig
) -> None:
    """It is no batch normalization, nor are the sums in its gradient those of a bias."""
    eye = np.eye(16, dtype=np.float32)
    sizes = (6,) * (len(axes) - 1) + (16,)

    def step(x: tf.Tensor, dy: tf.Tensor, gamma: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch((x, gamma))
            made = tf.matmul(x, eye)
            square = tf.reduce_mean(tf.square(made), axes, keepdims=keepdims)
            y = tf.tanh(tf.matmul(made * tf.math.rsqrt(square + 1e-5) * gamma, eye))
        return [y, *tape.gradient(y, [x, gamma], output_gradients=dy)]

    x = tf.TensorSpec((64 if known else None, *sizes))
    graph = trace_function(step, x, x, tf.TensorSpec((16,)))
    rng = np.random.default_rng(0)
    given = [
        rng.normal(1.0, 0.5, (64, *sizes)).astype(np.float32),
        rng.integers(-3, 4, (64, *sizes)).astype(np.float32),
        np.full(16, 0.5, np.float32),
    ]
    fusion = graph.find(config)
    wanted, found = (graph.run(g, *given) for g in (graph.graph_def, fusion.proto))
    for new, old in zip(found, wanted, strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=1e-5 * np.abs(old).max())
    assert [unit for unit in fusion.units if "norm" in unit] == ["rms-norm: mul_1"]
    sums = {n.name for n in graph.graph_def.node if n.op == "Sum" and "/mul/" in n.name}
    kept = {name for name, place in fusion.node_lists.items() if place == FLOAT32}
    assert sums <= kept


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_behind_a_norm_is_no_part_of_it(number: float) -> None:
    weight = tf.Variable(np.eye(8, dtype=np.float32))

    def normalized(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        y = tf.matmul(x, weight)
        mean, variance = tf.nn.moments(y, [-1], keepdims=True)
        z = (y - mean) * tf.math.rsqrt(variance + 1e-3)
        return z, z + tf.constant(number, tf.float32)

    program = trace_program(normalized, np.ones((2, 8), np.float32))
    units = rewrite_graph(program, CPU).units  # which allows for no warning
    assert any(unit.startswith("layer-norm: ") for unit in units)
