"""Casts of what a loop does not change leave the loop, where that is certain to be right."""

from __future__ import annotations

import call_graphs
import pytest
from call_graphs import BFLOAT16, FLOAT, build, casts_of_weights, loops, nodes_named
from tensorflow.core.framework import graph_pb2

from graph_passes import PrecisionConfig, rewrite_graph_def

CONFIG = PrecisionConfig(target_dtype="bfloat16", device="CPU")
ALONE = PrecisionConfig(
    target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("function-signatures",))
)
OFF = PrecisionConfig(
    target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("loop-hoisting",))
)
KEPT = ("x", "out", "gradient", "init")


def rewrite(graph_def: graph_pb2.GraphDef, config: PrecisionConfig) -> graph_pb2.GraphDef:
    result = rewrite_graph_def(graph_def, config, preserve=KEPT)
    assert result.failure is None
    assert result.changed
    return result.graph_def


@pytest.mark.parametrize("config", [CONFIG, ALONE], ids=["with signatures", "bodies alone"])
def test_weight_is_cast_once_outside(config: PrecisionConfig) -> None:
    graph = build(call_graphs.loop, gradient=False)
    new = rewrite(graph.graph_def, config)
    ((loop, body),) = loops(new)
    assert casts_of_weights(body) == []
    reads = {node.name for node in nodes_named(new.node, "ReadVariableOp")}
    outside = [n for n in nodes_named(new.node, "Cast") if n.input[0] in reads]
    assert [node.name in loop.input for node in outside] == [True]
    assert loop.attr["T"].list.type[-1] == BFLOAT16
    assert len(loop.attr["output_shapes"].list.shape) == len(loop.attr["T"].list.type)


def test_rule_can_be_switched_off() -> None:
    new = rewrite(build(call_graphs.loop, gradient=False).graph_def, OFF)
    ((_, body),) = loops(new)
    assert len(casts_of_weights(body)) == 1


def test_weight_leaves_nested_loops() -> None:
    new = rewrite(build(call_graphs.nested_loop, gradient=False).graph_def, CONFIG)
    ((_, outer),) = loops(new)
    assert casts_of_weights(outer) == []
    assert nodes_named(outer.node_def, "Cast") == []
    (inner,) = nodes_named(outer.node_def, "While") + nodes_named(outer.node_def, "StatelessWhile")
    assert inner.attr["T"].list.type[-1] == BFLOAT16


@pytest.mark.parametrize(
    "shape", [call_graphs.assigning_loop, call_graphs.indirectly_assigning_loop]
)
def test_weight_that_the_loop_writes_is_read_in_every_round(shape: object) -> None:
    graph = build(shape, gradient=False)  # type: ignore[arg-type]
    new = rewrite(graph.graph_def, CONFIG)
    ((_, body),) = loops(new)
    assert len(casts_of_weights(body)) == 1
    (wanted,), (got,) = graph.run(), graph.run(new)
    assert abs(wanted - got).max() < 0.02


def test_float32_argument_enters_twice_where_both_dtypes_are_read() -> None:
    new = rewrite(build(call_graphs.mixed_loop, gradient=False).graph_def, ALONE)
    ((loop, body),) = loops(new)
    arguments = {a.name: a.type for a in body.signature.input_arg}
    cast = [n for n in nodes_named(body.node_def, "Cast") if n.input[0] in arguments]
    constant = {
        arg.name
        for arg, out in zip(body.signature.input_arg, body.signature.output_arg, strict=True)
        if body.ret[out.name] == arg.name
    }
    assert not [node.name for node in cast if node.input[0] in constant]
    assert loop.attr["T"].list.type[-1] == BFLOAT16
    assert FLOAT in arguments.values()


def test_read_waits_for_what_the_loop_waits_for() -> None:
    def shape(x: object, weight: object) -> object:
        with call_graphs.tf.control_dependencies([weight.assign_add(weight * 0.0)]):  # type: ignore[attr-defined]
            return call_graphs.loop(x, weight)  # type: ignore[arg-type]

    new = rewrite(build(shape, gradient=False).graph_def, CONFIG)  # type: ignore[arg-type]
    ((loop, _),) = loops(new)
    makers = {node.name: node for node in new.node}
    cast = makers[list(loop.input)[len(loop.attr["T"].list.type) - 1]]
    behind, pending = set(), [cast.input[0]]
    while pending:
        name = pending.pop().lstrip("^").partition(":")[0]
        if name not in behind:
            behind.add(name)
            pending.extend(makers[name].input)
    assert "AssignAddVariableOp" in {makers[name].op for name in behind}


def test_hoisting_is_off_in_parity_mode() -> None:
    config = PrecisionConfig(target_dtype="bfloat16", device="CPU", parity=True)
    graph_def = build(call_graphs.loop, gradient=False).graph_def
    result = rewrite_graph_def(graph_def, config, preserve=KEPT)
    names = {function.signature.name for function in result.graph_def.library.function}
    assert names == {function.signature.name for function in graph_def.library.function}
