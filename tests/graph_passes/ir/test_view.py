from __future__ import annotations

import random

import numpy as np
import pytest
from graph_text import graph
from tensorflow.core.framework import graph_pb2

from graph_passes import PrecisionConfig, rewrite_graph_def
from graph_passes.ir.graph_view import FLOAT
from graph_passes.ir.indexing import InvalidGraphError
from graph_passes.ir.vertices import OPAQUE
from graph_passes.ir.view import view_body


def names(view, vertices) -> list[str]:
    return [f"{view.node_of(v).name}.{view.slot_of(v)}" for v in vertices]


def test_readers_and_producers() -> None:
    view = view_body(
        graph("x = Const(0.5, [4, 4])\ny = MatMul(x, x)\nz = Cast(y, DstT=int32, after=[x])")
    )
    x, y, z = (view.base[view.index[name]] for name in "xyz")
    assert names(view, view.readers(x)) == ["y.T", "y.T"]
    assert names(view, view.readers(y)) == ["z.SrcT"]
    assert names(view, view.producers(view.index["y"])) == ["x.dtype", "x.dtype"]
    assert view.readers(z + 1) == []
    assert [view.is_float[v] for v in (x, y, z, z + 1)] == [True, True, True, False]


def test_tensors_have_numbers() -> None:
    # Read before it is made, at other ports than the first, and twice.
    view = view_body(
        graph("y = AddN(s[1], s, s[1], T=float32)\nn = Const(0)\nx = Const(0.5, [4, 4])\n"
              "s = Split(n, x, num_split=2)")
    )  # fmt: skip
    n, x, s = (view.index[name] for name in "nxs")
    assert list(view.tensors) == [s + len(view.nodes), s, s + len(view.nodes), n, x]


def test_reach_follows_edges_of_one_dtype() -> None:
    view = view_body(
        graph(
            "x = Const(0.5, [4])\na = Relu(x)\nb = Relu(a)\nn = Cast(b, DstT=int32)\n"
            "f = Cast(n, DstT=float32)\nc = Relu(f)"
        )
    )
    edges = view.adjacency(FLOAT)
    start = view.base[view.index["a"]]
    forward = edges.reach([start], np.ones(len(view.dtypes), bool), forward=True)
    both = edges.reach([start], np.ones(len(view.dtypes), bool), forward=True, backward=True)
    assert names(view, [v for v, r in enumerate(forward) if r]) == ["a.T", "b.T", "n.SrcT"]
    assert names(view, [v for v, r in enumerate(both) if r]) == [
        "x.dtype", "a.T", "b.T", "n.SrcT",
    ]  # fmt: skip


def test_body_of_a_function() -> None:
    function = graph(
        """
        def f(x: float32, n: int32):
            parts = Split(n, x, num_split=2)
            y = MatMul(parts[1], parts[0])
            return y, x
        """
    ).library.function[0]
    view = view_body(function)
    assert view.is_function
    assert [node.op for node in view.nodes] == ["_Arg", "_Arg", "Split", "MatMul"] + ["_Retval"] * 2
    assert view.split("parts:output:1") == ("parts", 1)
    assert names(view, view.producers(view.index["y"])) == ["parts.T", "parts.T"]
    x = view.base[view.index["x"]]
    assert [view.node_of(v).op for v in view.readers(x)] == ["Split", "_Retval"]


def test_unknown_op_is_opaque() -> None:
    graph_def = graph("x = Const(0.5, [4, 4])\ny = Relu(x)")
    graph_def.node.add(name="custom", op="OpOfSomeLibrary", input=["y"])
    graph_def.node.add(name="z", op="Relu", input=["custom:3"]).attr["T"].type = FLOAT
    view = view_body(graph_def)
    assert view.readers(view.base[1]) == [OPAQUE]
    assert view.producers(3) == [OPAQUE]
    assert view.op_of(OPAQUE) == ""


def broken(change: str) -> graph_pb2.GraphDef:
    graph_def = graph("x = Const(0.5, [4, 4])\ny = MatMul(x, x)")
    if change == "twice":
        graph_def.node.add().CopyFrom(graph_def.node[0])
    elif change == "short":
        del graph_def.node[1].input[1]
    else:
        graph_def.node[1].input[0] = change
    return graph_def


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("twice", "two nodes have the same name"),
        ("short", r"'y' \(MatMul\) has 1 inputs, not 2"),
        ("nobody", "no node makes the tensor 'nobody'"),
        ("x:5", "'x' has no output '5'"),
    ],
)
def test_graph_that_cannot_run(change: str, message: str) -> None:
    with pytest.raises(InvalidGraphError, match=message):
        view_body(broken(change))


def test_nodes_that_read_an_output() -> None:
    graph_def = graph(
        "x = Const(0.5, [4])\ny = AddV2(x, x)\nz = Relu(x)\nw = Tanh(z, after=[x])\nu = Tanh(w)"
    )
    graph_def.node.add(name="v", op="OpOfAnotherLibrary", input=["x:0", "u"])
    view = view_body(graph_def)
    read_by = {name: view.reading_nodes(view.index[name]) for name in ("x", "z", "u", "v")}
    names = {name: [view.nodes[n].name for n in readers] for name, readers in read_by.items()}
    assert names == {"x": ["y", "z", "v"], "z": ["w"], "u": ["v"], "v": []}


CIRCLES = [
    "x = Const(0.5, [4, 4])\nr = Reshape(r, [4, 4], T=float32)\nz = MatMul(x, r)",
    "a = Identity(b, T=float32)\nb = Relu(a)\nx = MatMul(a, b)\ny = Exp(x)",
    "x = Const(0.5, [4])\na = AddV2(x, c, T=float32)\nb = Relu(a)\nc = Tanh(b)",
]


@pytest.mark.parametrize("text", CIRCLES)
def test_a_circle_is_no_graph(text: str) -> None:
    with pytest.raises(InvalidGraphError, match="reads what is made of its own output"):
        view_body(graph(text))


def test_a_rewrite_of_a_circle_comes_to_an_end() -> None:
    """A Reshape that reads itself feeds the offset of a batch normalization."""
    text = """
    x = Placeholder(dtype=float32)
    m = Mean(x, [0, 1, 2], keep_dims=True)
    d = SquaredDifference(x, m)
    v = Mean(d, [0, 1, 2], keep_dims=True)
    e = AddV2(v, 0.001)
    r = Rsqrt(e)
    scaled = Mul(x, r)
    shift = Mul(m, r)
    beta = Reshape(beta, [1, 1, 1, 4], T=float32)
    offset = Sub(beta, shift)
    y = AddV2(scaled, offset)
    w = Placeholder(dtype=float32)
    out = Conv2D(y, w, strides=[1, 1, 1, 1], padding="SAME")
    """
    before = graph(text)
    result = rewrite_graph_def(before, PrecisionConfig())
    assert result.proto is before
    assert "'beta' reads what is made of its own output" in result.failure


@pytest.mark.parametrize("seed", range(3))
def test_nodes_in_any_order_make_no_circle(seed: int) -> None:
    before = graph("x = Const(0.5, [4, 4])\na = Relu(x)\nb = MatMul(a, a)\nc = AddV2(b, a)")
    nodes = list(before.node)
    random.Random(seed).shuffle(nodes)
    shuffled = graph_pb2.GraphDef(node=nodes)
    assert len(view_body(shuffled).nodes) == 4
