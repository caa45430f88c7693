"""Values of subgraphs of constants."""

from __future__ import annotations

import numpy as np
import pytest
from graph_text import graph
from tensorflow.core.framework import graph_pb2

from graph_passes.ir.view import view_body
from graph_passes.rewriter.constant_evaluation import evaluated
from graph_passes.rewriter.matcher import Matcher


def value_of(graph_def: graph_pb2.GraphDef, tensor: str) -> np.ndarray:
    return evaluated(Matcher(view_body(graph_def)), tensor)


@pytest.mark.parametrize(
    ("line", "shape"),
    [
        ("y = Squeeze(x, squeeze_dims=[0])", (1, 3, 1)),
        ("y = Squeeze(x, squeeze_dims=[-1])", (1, 1, 3)),
        ("y = Squeeze(x)", (3,)),
        ("axis = Const(0)\ny = ExpandDims(x, axis)", (1, 1, 1, 3, 1)),
        ("sizes = Const([3, -1])\ny = Reshape(x, sizes)", (3, 1)),
        ("z = Identity(x)\ny = Mul(z, x)", (1, 1, 3, 1)),
        ("y = Pack(x, x, axis=1)", (1, 2, 1, 3, 1)),
    ],
)
def test_shapes_are_those_that_the_attributes_say(line: str, shape: tuple[int, ...]) -> None:
    assert value_of(graph(f"x = Const(0.5, [1, 1, 3, 1])\n{line}\n"), "y").shape == shape


def test_the_inverse_deviation_is_that_of_float32() -> None:
    found = value_of(graph("v = Const(3.0)\ne = Const(1.0)\ns = AddV2(v, e)\ny = Rsqrt(s)\n"), "y")
    assert found == 0.5
    assert found.dtype == np.float32


def test_sizes_that_are_put_together() -> None:
    line = "n = Const(2.5)\nm = Cast(n, SrcT=float32, DstT=int32)\none = Const(1)\n"
    found = value_of(graph(f"{line}y = Pack(one, m, one)\n"), "y")
    assert found.tolist() == [1, 2, 1]
    assert found.dtype == np.int32


def chain(length: int, second: str) -> graph_pb2.GraphDef:
    """Sums of each sum before with another tensor."""
    graph_def = graph("x0 = Const(1.0)\nzero = Const(0.0)\n")
    for number in range(length):
        node = graph_def.node.add(op="AddV2", name=f"x{number + 1}")
        node.input.extend([f"x{number}", second.format(number)])
        node.attr["T"].type = 1
    return graph_def


def test_a_deep_chain_is_followed_to_its_end() -> None:
    assert value_of(chain(5000, "zero"), "x5000") == 1.0


def test_what_is_shared_is_evaluated_once() -> None:
    """Twice the node before, 100 times over: 2^100 ways lead to the first."""
    assert value_of(chain(100, "x{}"), "x100") == 2.0**100


@pytest.mark.parametrize(
    "line",
    [
        "y = Exp(x)",
        "p = Placeholder(dtype=float32)\ny = Mul(x, p)",
        "y = Squeeze(x, squeeze_dims=[2])",
    ],
)
def test_what_has_no_value(line: str) -> None:
    assert value_of(graph(f"x = Const(0.5, [1, 1, 3, 1])\n{line}\n"), "y") is None
