"""What holds for every rewrite in default mode, on random graphs."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from decisions import decisions_of
from graph_checks import check
from graph_diff import added, all_nodes, retyped
from graph_text import graph
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_graphs import RandomGraph, random_graphs, shuffled, smooth_graphs
from tensorflow.core.framework import graph_pb2, node_def_pb2

from graph_passes import RULES, PrecisionConfig, RewriteResult, rewrite_graph_def

CONFIGS = [
    PrecisionConfig(target_dtype="float16", device="GPU"),
    PrecisionConfig(target_dtype="bfloat16", device="CPU"),
    PrecisionConfig(target_dtype="bfloat16", device="GPU"),
    PrecisionConfig(target_dtype="float16", device="CPU"),
]
LEVELS = ["", "TENSOR_CORES_ONLY", "TREAT_INFER_AS_DENY"]


def on_graphs(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )


def rewrite(example: RandomGraph, config: PrecisionConfig) -> RewriteResult:
    """The rewrite of a random graph; a failure of its own post-conditions is an error here."""
    result = rewrite_graph_def(example.graph_def, config, preserve=example.preserve)
    assert result.failure is None
    return result


def by_name(graph_def: graph_pb2.GraphDef) -> dict[tuple[str, str], node_def_pb2.NodeDef]:
    return all_nodes(graph_def)


@on_graphs(200)
@given(random_graphs(), st.sampled_from(CONFIGS), st.sampled_from(LEVELS))
def test_post_conditions(example: RandomGraph, config: PrecisionConfig, level: str) -> None:
    config = PrecisionConfig(target_dtype=config.target_dtype, device=config.device, level=level)
    before = example.graph_def
    untouched = before.SerializeToString(deterministic=True)
    result = rewrite(example, config)
    check(before, result.proto, device=config.device, preserve=example.preserve)
    assert before.SerializeToString(deterministic=True) == untouched, "the input was changed"


@on_graphs(80)
@given(random_graphs())
def test_post_conditions_when_everything_is_forced(example: RandomGraph) -> None:
    config = PrecisionConfig(level="UNSAFE_FORCE_ALL")
    result = rewrite(example, config)
    check(example.graph_def, result.proto, device="GPU", preserve=example.preserve)


@on_graphs(60)
@given(random_graphs(), st.sampled_from(CONFIGS))
def test_report_counts_what_was_done(example: RandomGraph, config: PrecisionConfig) -> None:
    result = rewrite(example, config)
    slots = retyped(example.graph_def, result.proto)
    casts = added(example.graph_def, result.proto)
    report = result.report
    assert report.casts_to_low + report.casts_to_float32 == len(casts)
    assert report.converted_nodes == len({slot.node for slot in slots})
    assert {(d.node, d.attr) for d in decisions_of(report) if d.converted} == {
        (slot.node, slot.attr) for slot in slots
    }
    assert result.changed == bool(slots)


@on_graphs(60)
@given(random_graphs(), st.sampled_from(CONFIGS))
def test_second_rewrite_changes_nothing(example: RandomGraph, config: PrecisionConfig) -> None:
    once = rewrite(example, config)
    again = rewrite_graph_def(once.proto, config, preserve=example.preserve)
    assert again.failure is None
    assert not added(once.proto, again.proto)
    assert not retyped(once.proto, again.proto)


@on_graphs(80)
@given(random_graphs(), st.sampled_from(CONFIGS), st.integers(0, 1000))
def test_order_of_the_nodes_does_not_count(
    example: RandomGraph, config: PrecisionConfig, seed: int
) -> None:
    straight = rewrite(example, config)
    mixed = rewrite_graph_def(shuffled(example.graph_def, seed), config, preserve=example.preserve)
    assert mixed.failure is None
    assert by_name(mixed.proto) == by_name(straight.proto)


@pytest.mark.parametrize("seed", range(8))
def test_chain_of_infer_ops_goes_low_in_any_order(seed: int) -> None:
    """One sweep in node order, as TensorFlow's pass makes, would stop anywhere in the chain."""
    steps = [f"t{number} = Tanh({f't{number - 1}' if number else 'a'})" for number in range(6)]
    text = "\n".join(["x = Const(0.5, [8, 8])", "a = MatMul(x, x)", *steps, "out = Exp(t5)"])
    before = shuffled(graph(text), seed)
    result = rewrite_graph_def(before, CONFIGS[0], preserve=("out", "x"))
    assert {slot.node for slot in retyped(before, result.proto)} == {
        "a", *(f"t{number}" for number in range(6))
    }  # fmt: skip


@on_graphs(40)
@given(random_graphs(node_types=("allow", "infer", "clear", "deny", "source", "list")))
def test_graph_without_cycles_stays_one(example: RandomGraph) -> None:
    result = rewrite(example, CONFIGS[0])
    waiting = {
        node.name: {name.lstrip("^").partition(":")[0] for name in node.input}
        for node in result.proto.node
    }
    while ready := [name for name, inputs in waiting.items() if not inputs & waiting.keys()]:
        for name in ready:
            del waiting[name]
    assert not waiting, "a cycle"


@on_graphs(60)
@given(random_graphs(), st.sets(st.sampled_from(sorted(RULES))))
def test_every_set_of_disabled_rules(example: RandomGraph, disabled: set[str]) -> None:
    config = PrecisionConfig(disabled_rules=frozenset(disabled))
    result = rewrite(example, config)
    check(example.graph_def, result.proto, device="GPU", preserve=example.preserve)


@on_graphs(40)
@given(random_graphs(node_types=("infer", "clear", "deny", "unlisted", "variable")))
def test_preserving_every_node_gives_the_graph_back(example: RandomGraph) -> None:
    graph_def = example.graph_def
    names = [node.name for node in graph_def.node]
    result = rewrite_graph_def(graph_def, CONFIGS[0], preserve=names)
    assert result.proto is graph_def
    assert not result.changed


@on_graphs(60)
@given(random_graphs(node_types=("allow", "infer", "clear", "variable")))
def test_what_is_assigned_is_computed_in_float32(example: RandomGraph) -> None:
    """Each assigned value comes from a float32 node or from a Cast of an op of the network."""
    for config in CONFIGS[:2]:
        result = rewrite(example, config)
        low = {slot.node for slot in retyped(example.graph_def, result.proto)}
        nodes = {node.name: node for node in example.graph_def.node}
        for node in nodes.values():
            if node.op == "AssignVariableOp":
                made_by = nodes[node.input[1].partition(":")[0]]
                if made_by.op in ("Sub", "Mul", "AddV2", "AddN", "Identity"):
                    assert made_by.name not in low, f"{made_by.name} is assigned"


@on_graphs(40)
@given(smooth_graphs())
def test_values_agree_with_float32(example: RandomGraph) -> None:
    """On a CPU, where bfloat16 kernels exist for every op used here."""
    result = rewrite(example, PrecisionConfig(target_dtype="bfloat16", device="CPU"))
    expected, got = run(example.graph_def), run(result.proto)
    assert got.dtype == expected.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=0.02 * (1 + np.abs(expected).max()), rtol=0.05)


def run(graph_def: graph_pb2.GraphDef) -> np.ndarray:
    """The value of the node `out`, with TensorFlow's own rewriting off."""
    options = tf.compat.v1.ConfigProto()
    options.graph_options.rewrite_options.disable_meta_optimizer = True
    options.graph_options.optimizer_options.opt_level = -1
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
        with tf.compat.v1.Session(graph=graph, config=options) as session:
            return session.run("out:0")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_empty_graph(config: PrecisionConfig) -> None:
    graph_def = graph_pb2.GraphDef()
    result = rewrite_graph_def(graph_def, config)
    assert (result.proto, result.changed, result.failure) == (graph_def, False, None)
