"""New nodes: what is filled in for them, and under which names."""

from __future__ import annotations

import numpy as np
import pytest
from graph_text import graph
from tensorflow.core.framework import graph_pb2, types_pb2

from graph_passes.ir.view import view_body
from graph_passes.rewriter.editor import GraphEdits
from graph_passes.rewriter.matcher import NoMatchError
from graph_passes.rewriter.replacement import Replacement

TEXT = """
x = Const(0.5, [4, 8])
w = Const(0.5, [8, 2])
y = MatMul(x, w) @ "/device:CPU:0"
out = Identity(y)
"""
SHAPES = {"x": (4, 8), "w": (8, 2), "y": (4, 2), "out": (4, 2)}


def replacement(graph_def: graph_pb2.GraphDef, name: str = "y") -> Replacement:
    view = view_body(graph_def, lambda node: (SHAPES.get(node),))
    return Replacement(GraphEdits(view), view.index[name])


def test_attributes_device_and_shape_follow_from_the_surroundings() -> None:
    before = graph(TEXT)
    before.node[2].attr["_class"].list.s.append(b"loc:@x")
    new = replacement(before)
    made = new.op.MatMul("w", "x", name="other", transpose_a=True, transpose_b=True)
    node = new.makers[made]
    assert (node.name, node.device) == ("y/other", "/device:CPU:0")
    assert node.attr["T"].type == types_pb2.DT_FLOAT
    assert (node.attr["transpose_a"].b, node.attr["grad_a"].b) == (True, False)
    assert list(node.attr["_class"].list.s) == [b"loc:@x"]
    assert new.fact(made).shape == (2, 4)


@pytest.mark.parametrize("count", [1, 3])
def test_names_are_free(count: int) -> None:
    new = replacement(graph(TEXT + "taken = Neg(x)\n"), "taken")
    new.stem = "out"
    made = [new.op.Neg("x", name="") for _ in range(count)]
    assert made == [f"out_{number}" for number in range(1, count + 1)]


def test_several_outputs_and_many_inputs() -> None:
    new = replacement(graph(TEXT))
    total = new.op.AddN("x", "x", "x")
    assert new.makers[total].attr["N"].i == 3
    scale = new.constant(np.ones(2), name="scale", beside="y")
    made = new.op.FusedBatchNormV3(new.reshape("y", (1, 4, 1, 2), name="images"), *[scale] * 4)
    assert made == ("y/FusedBatchNormV3", *(f"y/FusedBatchNormV3:{port}" for port in range(1, 6)))
    assert [new.fact(tensor).shape for tensor in made[:2]] == [(1, 4, 1, 2), (2,)]


def test_a_reshape_leaves_one_size_open_at_most() -> None:
    new = replacement(graph(TEXT))
    assert new.reshape("y", (None, 4), name="one") == "y/one"
    with pytest.raises(NoMatchError, match="more than one size"):
        new.reshape("y", (None, 4, None), name="two")
    with pytest.raises(NoMatchError, match="more than one size"):
        new.reshape("y", (None, 0), name="none")  # whatever it is, there are no elements


def test_tensors_of_a_function_are_named_by_arguments() -> None:
    function = graph("def f(x: float32):\n    y = Neg(x)\n    return y").library.function[0]
    view = view_body(function)
    new = Replacement(GraphEdits(view), view.index["y"])
    assert new.op.Relu("x") == "y/Relu:activations:0"
    assert new.op.Split(new.constant(0, name="axis", beside="x"), "x", num_split=2) == (
        "y/Split:output:0",
        "y/Split:output:1",
    )


def test_constants_stay_in_the_frame_of_their_reader() -> None:
    new = replacement(graph(TEXT + 'e = Enter(x, frame_name="loop")\n'))
    assert list(new.makers[new.constant(1.0, name="one", beside="e")].input) == ["^e"]


@pytest.mark.parametrize(
    ("op", "why"), [("NoSuchOp", "knows no op 'NoSuchOp'"), ("Split", "needs the attribute")]
)
def test_what_cannot_be_written_says_so(op: str, why: str) -> None:
    new = replacement(graph(TEXT))
    with pytest.raises(ValueError, match=why):
        new.add(op, "x", "y")
