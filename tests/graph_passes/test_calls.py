"""Which functions a graph calls."""

from __future__ import annotations

import pytest
from graph_text import graph

from graph_passes.calls import reachable_functions

TEXT = """
def inner(a: float32):
    b = Relu(a)
    return b

def outer(a: float32):
    b = inner(a)
    return b

def other(a: float32):
    b = Tanh(a)
    return b

x = Const(0.5, [4])
"""


@pytest.mark.parametrize(
    ("op", "attrs", "reachable"),
    [
        ("Relu", {}, set()),
        ("inner", {}, {"inner"}),
        ("outer", {}, {"inner", "outer"}),
        ("PartitionedCall", {"f": "other"}, {"other"}),
        ("OpOfAnotherLibrary", {"run": "outer"}, {"inner", "outer"}),
    ],
)
def test_functions_that_a_graph_may_call(
    op: str, attrs: dict[str, str], reachable: set[str]
) -> None:
    graph_def = graph(TEXT)
    node = graph_def.node.add(name="y", op=op, input=["x"])
    for attr, function in attrs.items():
        node.attr[attr].func.name = function
    assert reachable_functions(graph_def) == reachable
