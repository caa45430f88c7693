"""A call tree as one graph, and apart again."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import tensorflow as tf
from call_graphs import SHAPES, build
from graph_text import graph
from tensorflow.core.framework import types_pb2
from view_checks import assert_same

from graph_passes.emit.apply import Applied
from graph_passes.functions.call_tree import CallTrees, Region, node_types_with
from graph_passes.functions.inlining import Inlined, outline
from graph_passes.ir.graph_view import GraphView
from graph_passes.ir.indexing import NodeIndex
from graph_passes.ir.view import view_body

SPEC = tf.TensorSpec([4, 8], tf.float32)


def tree_of(shape: str, is_function: bool) -> tuple[Region, dict]:
    """A call tree and its library."""
    main = graph_def = build(SHAPES[shape]).graph_def
    if is_function:
        weight = tf.Variable(tf.ones((8, 8)))
        step = tf.function(lambda x: SHAPES[shape](x, weight), autograph=False)
        concrete = step.get_concrete_function(SPEC)
        main, graph_def = concrete.function_def, concrete.graph.as_graph_def()
    library = {function.signature.name: function for function in graph_def.library.function}
    tree = CallTrees(library.get, lambda op: op in ("MatMul", "BatchMatMulV2"), main).build(main)
    assert tree.calls
    return tree, library


def with_all_shapes(test: object) -> object:
    """Runs a test for graphs and functions."""
    both = pytest.mark.parametrize("is_function", [False, True])
    return both(pytest.mark.parametrize("shape", sorted(SHAPES))(test))


@with_all_shapes
def test_taking_apart_undoes_inlining(shape: str, is_function: bool) -> None:
    tree, _ = tree_of(shape, is_function)
    inlined = Inlined(tree)
    for touched in ((), range(len(inlined.proto.node))):
        again = outline(tree, inlined, Applied(inlined.proto, frozenset(touched), {}))
        for old, new in zip(tree.walk(), again.walk(), strict=True):
            assert new.proto == old.proto


@with_all_shapes
def test_the_view_of_an_inlined_graph_is_made_of_those_of_its_bodies(
    shape: str, is_function: bool
) -> None:
    """As if all of its nodes were read; the bodies that have no view are."""
    tree, library = tree_of(shape, is_function)
    inlined, node_types = Inlined(tree), node_types_with(library.get)
    views = {region: view_body(region.proto, node_types=node_types) for region in tree.walk()}

    def assert_view_of(known: Collection[Region]) -> None:
        shapes = dict.fromkeys(tree.walk())
        found = inlined.view({region: views[region] for region in known}, shapes)
        nodes = list(inlined.proto.node)
        index = NodeIndex(node_types, named_outputs=True)
        index.extend(nodes)
        assert_same(found, GraphView(nodes, index, is_function=False, aliases=inlined.aliases))

    assert_view_of(views)
    assert_view_of([tree])
    assert_view_of(list(views)[::2])


TEXT = """
def test(a: float32, w: float32):
    go = Const(True)
    return go

def layer(a: float32, w: float32):
    b = MatMul(a, w)
    return b, w

def other(a: float32, w: float32):
    b = MatMul(w, a)
    return b, a

go = Const(True)
x = Const(0.5, [8, 8])
{call}
out = MatMul(y, y[1], after=[y])
"""
LOOP = "y = While(x, x, cond=test, body=layer, after=[go])"
BRANCHES = "y = If(go, x, x, Tout=[float32, float32], then_branch=layer, else_branch=other)"


def inlined_text(call: str) -> tuple[Region, Inlined]:
    graph_def = graph(TEXT.format(call=call))
    library = {function.signature.name: function for function in graph_def.library.function}
    tree = CallTrees(library.get, lambda op: op == "MatMul", graph_def).build(graph_def)
    return tree, Inlined(tree)


@pytest.mark.parametrize(
    ("call", "op", "read"),
    [
        # What a condition gives is no output of the loop.
        (LOOP, "While+1", ["x", "x", "layer@2/b:product:0", "layer@2/w", "^go"]),
        (
            BRANCHES,
            "If+2",
            [
                *("go", "x", "x"),
                *("layer@1/b:product:0", "layer@1/w"),
                *("other@2/b:product:0", "other@2/a"),
            ],
        ),
    ],
)
def test_a_calling_node_reads_what_its_bodies_give(call: str, op: str, read: list[str]) -> None:
    _, inlined = inlined_text(call)
    (node,) = [node for node in inlined.proto.node if node.name == "y"]
    assert (node.op, list(node.input)) == (op, read)


@pytest.mark.parametrize(("call", "leading"), [(LOOP, 0), (BRANCHES, 1)])
def test_an_argument_is_another_name_for_what_the_calling_node_takes(
    call: str, leading: int
) -> None:
    tree, inlined = inlined_text(call)
    nodes = inlined.proto.node
    found = {nodes[n].name: (nodes[c].name, p) for n, (c, p) in inlined.aliases.items()}
    assert found == {
        inlined.prefixes[callee] + name: ("y", leading + port)
        for callee in tree.calls[0].callees
        for port, name in enumerate("aw")
    }


def test_what_a_function_takes_and_gives_is_its_boundary() -> None:
    tree, _ = tree_of("branch", is_function=True)
    signature = tree.proto.signature
    taken = [arg.name for arg in signature.input_arg]
    assert Inlined(tree).boundary == [*taken, *(f"{arg.name}@" for arg in signature.output_arg)]
    tree, _ = tree_of("branch", is_function=False)
    tree.proto.node.add(name="argument", op="_Arg").attr["T"].type = types_pb2.DT_FLOAT
    assert Inlined(tree).boundary == []


@pytest.mark.parametrize("is_function", [False, True])
@pytest.mark.parametrize(
    ("shape", "rounds"), [("loop", {1, 32}), ("nested_loop", {1, 32, 32**2}), ("branch", {1})]
)
def test_nodes_of_loops_run_in_every_round(shape: str, rounds: set[int], is_function: bool) -> None:
    tree, _ = tree_of(shape, is_function)
    inlined = Inlined(tree)
    of_node = dict(zip((node.name for node in inlined.proto.node), inlined.rounds, strict=True))
    assert {*of_node.values()} == rounds

    def check(region: Region, times: int) -> None:
        ends = [] if region.is_main else region.proto.signature.input_arg  # type: ignore[union-attr]
        for part in (*region.nodes, *ends):
            assert of_node[inlined.prefixes[region] + part.name] == times
        for call in region.calls:
            for callee in call.callees:
                check(callee, times * (32 if call.kind.is_loop else 1))

    check(tree, 1)


def test_shapes_are_those_of_the_regions() -> None:
    tree, inlined = inlined_text(LOOP)
    test, layer = tree.calls[0].callees
    shapes = inlined.shapes({tree: lambda node: (node,), test: None, layer: lambda node: (node, 8)})
    assert [shapes(node) for node in ("x", "a/b", "test@1/go")] == [("x",), ("a/b",), ()]
    assert [shapes(f"layer@2/{node}") for node in ("b", "c/d")] == [("b", 8), ("c/d", 8)]


def test_results_of_a_main_function_have_its_shapes() -> None:
    tree, _ = tree_of("branch", is_function=True)
    inlined = Inlined(tree)
    shapes = inlined.shapes(dict.fromkeys(tree.walk()) | {tree: lambda node: (node,)})
    assert [shapes(name) for name in inlined.boundary] == [(name,) for name in inlined.boundary]


def test_what_changed_in_the_inlined_graph_changes_in_the_bodies() -> None:
    """The loop's first variable goes low; the second is cast for the product."""
    tree, inlined = inlined_text(LOOP)
    nodes = {node.name: node for node in inlined.proto.node}
    numbers = {name: number for number, name in enumerate(nodes)}
    half = types_pb2.DT_HALF
    for name in ("layer@2/b", "out"):
        nodes[name].attr["T"].type = half
    nodes["y"].attr["T"].list.type[0] = half
    casts = {}
    for name, source in (("x_low", "x"), ("y_low", "y:1"), ("layer@2/w_low", "layer@2/w")):
        cast = inlined.proto.node.add(name=name, op="Cast", input=[source])
        cast.attr["DstT"].type = half
        casts[name] = 0
    nodes["y"].input[0] = "x_low"
    nodes["out"].input[1] = "y_low"
    nodes["layer@2/b"].input[1] = "layer@2/w_low"
    count = len(nodes)
    proto = type(inlined.proto)()
    proto.CopyFrom(inlined.proto)
    del inlined.proto.node[count:]
    retyped = tuple(numbers[name] for name in ("layer@2/b", "y", "out"))
    new = outline(tree, inlined, Applied(proto, frozenset(retyped), casts))
    assert [node.name for node in new.nodes] == [n.name for n in tree.nodes] + ["x_low", "y_low"]
    after = {node.name: node for node in new.nodes}
    assert list(after["y"].input) == ["x_low", "x", "^go"]
    assert list(after["out"].input) == ["y", "y_low", "^y"]
    test, layer = new.calls[0].callees
    for function in (test.proto, layer.proto):
        assert [arg.type for arg in function.signature.input_arg] == [half, types_pb2.DT_FLOAT]
    assert [arg.type for arg in test.proto.signature.output_arg] == [types_pb2.DT_BOOL]
    assert [arg.type for arg in layer.proto.signature.output_arg] == [half, types_pb2.DT_FLOAT]
    product, cast = layer.nodes
    assert (cast.name, list(cast.input)) == ("w_low", ["w"])
    assert list(product.input) == ["a", "w_low:y:0"]
    assert dict(layer.proto.ret) == {"result_0": "b:product:0", "result_1": "w"}
