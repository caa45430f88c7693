"""Tensors that come from elsewhere, and what goes because of it."""

from __future__ import annotations

import pytest
from graph_text import graph
from tensorflow.core.framework import graph_pb2, node_def_pb2

from graph_passes.ir.copying import copy_graph
from graph_passes.ir.view import view_body
from graph_passes.rewriter.surgery import Edits, Unread, leave_out_unread, make_edits

TEXT = """
x = Const(0.5, [4])
a = Square(x)
b = Sqrt(a)
c = Tanh(b)
out = Identity(c)
"""


def edited(
    graph_def: graph_pb2.GraphDef,
    redirect: dict[str, str],
    new_nodes: tuple[node_def_pb2.NodeDef, ...] = (),
    inputs: dict[str, list[str]] | None = None,
    preserve: tuple[str, ...] = ("out",),
    controls: dict[str, list[str]] | None = None,
) -> graph_pb2.GraphDef:
    before = view_body(graph_def)
    kept = [before.index[name] for name in preserve if name in before.index]
    edits = Edits(redirect, inputs or {}, controls or {}, new_nodes=list(new_nodes))
    view = make_edits(before, edits, Unread(before, kept))
    view.require_matching_dtypes()
    return copy_graph(graph_def, view)


def reads(graph_def: graph_pb2.GraphDef) -> dict[str, list[str]]:
    return {node.name: list(node.input) for node in graph_def.node}


def relu(name: str, tensor: str) -> node_def_pb2.NodeDef:
    return graph(f"{tensor} = Const(0.5, [4])\n{name} = Relu({tensor})").node[1]


def test_what_nobody_reads_any_more_is_gone() -> None:
    before = graph(TEXT)
    original = before.SerializeToString(deterministic=True)
    after = edited(before, {"b": "new"}, (relu("new", "x"),))
    assert reads(after) == {"x": [], "c": ["new"], "out": ["c"], "new": ["x"]}
    assert before.SerializeToString(deterministic=True) == original
    assert after.versions == before.versions


@pytest.mark.parametrize(
    ("line", "preserve"),
    [
        ("other = Tanh(a)", ("out", "other")),
        ("other = Tanh(x, after=[b])", ("out", "other")),
        ("", ("out", "b")),
    ],
    ids=["another reader", "a control input", "preserved"],
)
def test_what_somebody_needs_stays(line: str, preserve: tuple[str, ...]) -> None:
    after = edited(graph(TEXT + line), {"b": "new"}, (relu("new", "x"),), preserve=preserve)
    assert "a" in reads(after)
    assert reads(after)["c"] == ["new"]


def test_what_a_new_node_reads_stays() -> None:
    after = edited(graph(TEXT), {"c": "new"}, (relu("new", "b"),))
    assert set(reads(after)) == {"x", "a", "b", "new", "out"}


def test_stateful_ops_stay() -> None:
    text = "n = Const([4])\nr = RandomUniform(n, dtype=float32)\na = Tanh(r)\nout = Identity(a)"
    new = graph("zero = Const(0.0, [4])").node[0]
    after = edited(graph(text), {"a": "zero"}, (new,))
    assert set(reads(after)) == {"n", "r", "zero", "out"}


def test_ops_that_are_not_known_stay_and_nothing_goes_for_them() -> None:
    before = graph(TEXT)
    before.node[1].op = "NoSuchOp"  # a, of which only b is made
    last = before.node.add()
    last.CopyFrom(before.node[3])
    del before.node[3]
    after = edited(before, {"b": "new"}, (relu("new", "x"),))
    assert set(reads(after)) == {"x", "a", "c", "new", "out"}


def test_inputs_of_a_sum() -> None:
    text = "x = Const(0.5, [4])\ny = Tanh(x)\nz = Sqrt(x)\ns = AddN(x, y, z)\nout = Identity(s)"
    after = edited(graph(text), {}, inputs={"s": ["x", "y"]})
    assert reads(after) == {"x": [], "y": ["x"], "s": ["x", "y"], "out": ["s"]}
    assert {node.name: node.attr["N"].i for node in after.node if node.op == "AddN"} == {"s": 2}


def test_results_of_a_function_follow() -> None:
    function = graph(
        """
        def f(x: float32):
            a = Square(x)
            b = Sqrt(a)
            return b, x
        """
    ).library.function[0]
    function.attr["custom"].i = 7
    new = relu("new", "x")
    before = view_body(function)
    edits = Edits({"b:y:0": "new:activations:0"}, new_nodes=[new])
    view = make_edits(before, edits, Unread(before, ()))
    after = copy_graph(function, view)
    assert [node.name for node in after.node_def] == ["new"]
    results = [after.ret[arg.name] for arg in after.signature.output_arg]
    assert results == ["new:activations:0", "x"]
    assert (after.signature, after.attr["custom"].i) == (function.signature, 7)
    assert [node.op for node in view.nodes] == ["_Arg", "Relu", "_Retval", "_Retval"]


def test_what_nobody_reads_is_left_out_with_what_only_it_reads() -> None:
    text = f"{TEXT}dead = Tanh(b)\nmore = Exp(a)\nlast = Neg(more)\nwaits = Neg(x, after=[more])"
    before = graph(text)
    before.node[4].attr["_class"].list.s.extend((b"loc:@dead", b"loc:@a"))
    view = view_body(before)
    kept = [view.index[name] for name in ("out", "waits")]
    after = copy_graph(before, leave_out_unread(view, Unread(view, kept)))
    assert set(reads(after)) == {"x", "a", "b", "c", "out", "more", "waits"}
    (out,) = (node for node in after.node if node.name == "out")
    assert list(out.attr["_class"].list.s) == [b"loc:@a"]
    assert leave_out_unread(view_body(after), Unread(view_body(after), [4, 6])).is_edited is False
