"""What is read from a graph of which nobody tells the static shapes, and single numbers."""

from __future__ import annotations

import pytest
from graph_text import graph

from graph_passes.ir.view import view_body
from graph_passes.rewriter.matcher import Matcher

TEXT = """
weight = Const(0.5, [4, 8])
same = Identity(weight)
low = Cast(same, DstT=half)
variable = VarHandleOp(dtype=float32, shape=[4, -1])
value = ReadVariableOp(variable, dtype=float32)
held = Identity(value)
free = VarHandleOp(dtype=float32, shape=None)
any = ReadVariableOp(free, dtype=float32)
given = Placeholder(dtype=resource, shape=[])
read = ReadVariableOp(given, dtype=float32)
x = Placeholder(dtype=float32, shape=[2, 3])
square = Square(x)
sizes = Const([-1, 6])
rows = Reshape(square, sizes)
one = Const(1.0)
two = Const(2, [1])
yes = Const(True)
"""


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    return Matcher(view_body(graph(TEXT)))


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("weight", (4, 8)),
        ("low", (4, 8)),
        ("held", (4, None)),
        ("any", None),
        ("read", None),  # a handle that is fed tells nothing of what it holds
        ("x", (2, 3)),
        ("square", None),
        ("rows", (None, 6)),
    ],
)
def test_shapes_are_those_of_what_is_stored(matcher, tensor, shape):
    assert matcher.stored_shape(tensor) == shape


@pytest.mark.parametrize(
    ("tensor", "value"), [("one", 1.0), ("two", 2.0), ("yes", None), ("weight", None), ("x", None)]
)
def test_a_scalar_is_one_number(matcher, tensor, value):
    assert matcher.scalar(tensor) == value
