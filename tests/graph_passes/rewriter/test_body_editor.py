"""Graphs and functions that are changed in place."""

from __future__ import annotations

import pytest
from graph_text import graph
from tensorflow.core.framework import function_pb2, graph_pb2, types_pb2

from graph_passes.ir.view import view_body
from graph_passes.rewriter.body_editor import BodyEditor

BODY = """
    a = Relu(x)
    parts = Split(n, a, num_split=2)
    b = AddV2(parts[1], a, after=[a])
"""
GRAPH = "n = Const(0)\nx = Const(0.5, [4])" + BODY.replace("\n    ", "\n") + "out = Neg(b)"
FUNCTION = f"def f(n: int32, x: float32):{BODY}    return b, a"


def graph_body() -> graph_pb2.GraphDef:
    return graph(GRAPH)


def function_body() -> function_pb2.FunctionDef:
    return graph(FUNCTION).library.function[0]


@pytest.mark.parametrize(
    ("proto", "outputs"),
    [(graph_body(), ["parts", "parts:1"]), (function_body(), ["parts:output:0", "parts:output:1"])],
    ids=["graph", "function"],
)
def test_outputs_go_by_the_names_that_readers_use(
    proto: graph_pb2.GraphDef | function_pb2.FunctionDef, outputs: list[str]
) -> None:
    editor = BodyEditor(proto)
    assert [editor.output("parts", port) for port in (0, 1)] == outputs
    assert editor.node("b").input[0] == outputs[1]
    assert editor.fact(outputs[1]).dtype == types_pb2.DT_FLOAT
    assert editor.fact("n").dtype == types_pb2.DT_INT32


def test_a_node_that_is_not_there_is_not_found() -> None:
    editor = BodyEditor(graph_body())
    assert editor.find("missing") is None
    with pytest.raises(KeyError, match="missing"):
        editor.node("missing")


def test_new_nodes_have_free_names_dtypes_and_the_device() -> None:
    proto = function_body()
    proto.signature.output_arg[0].name = "a/Neg"
    editor = BodyEditor(proto)
    emit = editor.emitter("a", "/device:CPU:0")
    made = [emit.op.Neg(editor.output("a")) for _ in range(2)]
    assert made == ["a/Neg_1:y:0", "a/Neg_2:y:0"]
    node = editor.node("a/Neg_2")
    assert (node.device, node.attr["T"].type) == ("/device:CPU:0", types_pb2.DT_FLOAT)
    assert editor.fact(made[1]).dtype == types_pb2.DT_FLOAT


def test_redirected_tensors_are_read_elsewhere_but_by_new_nodes() -> None:
    editor = BodyEditor(function_body())
    new = editor.emitter("new").op.Neg(editor.output("a"))
    editor.redirect({editor.output("a"): new})
    reads = {node.name: list(node.input) for node in editor.nodes}
    assert reads["parts"] == ["n", new]
    assert reads["b"] == ["parts:output:1", new, "^a"]
    assert reads["new/Neg"] == ["a:activations:0"]
    assert function_results(editor) == ["b:z:0", new]


def test_a_graph_may_name_the_first_output_either_way() -> None:
    proto = graph_body()
    proto.node[-1].input[0] = "b:0"
    editor = BodyEditor(proto)
    editor.redirect({"b": "x"})
    assert list(editor.node("out").input) == ["x"]


@pytest.mark.parametrize("proto", [graph_body(), function_body()], ids=["graph", "function"])
def test_nodes_and_results_go_by_the_numbers_of_a_view(
    proto: graph_pb2.GraphDef | function_pb2.FunctionDef,
) -> None:
    editor, view = BodyEditor(proto), view_body(proto)
    editor.rewire(view.index["b"], 1, "x")
    assert editor.node("b").input[1] == "x"
    if editor.is_function:
        editor.rewire(len(view.nodes) - 1, 0, "x")
        assert function_results(editor) == ["b:z:0", "x"]


def test_what_waited_for_a_removed_node_waits_no_more() -> None:
    editor = BodyEditor(graph_body())
    editor.node("out").attr["_class"].list.s.extend((b"loc:@a", b"loc:@x"))
    editor.redirect({"a": "x"})
    editor.remove({"a"})
    assert [node.name for node in editor.nodes] == ["n", "x", "parts", "b", "out"]
    assert list(editor.node("b").input) == ["parts:1", "x"]
    assert list(editor.node("out").attr["_class"].list.s) == [b"loc:@x"]


def function_results(editor: BodyEditor) -> list[str]:
    proto = editor.proto
    assert isinstance(proto, function_pb2.FunctionDef)
    return [proto.ret[arg.name] for arg in proto.signature.output_arg]
