"""Stages on one graph: what units say of single nodes reaches the colours."""

from __future__ import annotations

import pytest
from graph_text import graph

from graph_passes import PrecisionConfig, Reason
from graph_passes.op_lists import FLOAT32
from graph_passes.stages import paint
from graph_passes.view import view_graph

TEXT = """
w = Const(0.5, [8, 8])
a = MatMul(w, w)
b = Exp(a)
c = Reshape(b, [64])
d = Reshape(c, [8, 8])
e = AddV2(d, a)
f = MatMul(e, w)
"""


def reasons(listed: dict[str, str]) -> dict[str, Reason | None]:
    """The reason of each float32 node, None for a converted one."""
    view = view_graph(graph(TEXT))
    canvas = paint(view, PrecisionConfig(device="GPU"), (), listed)
    floats = [vertex for vertex in range(1, len(view.dtypes)) if view.is_float[vertex]]
    return {
        view.node_of(v).name: None if canvas.low[v] else Reason(canvas.why[v] or Reason.UNLISTED)
        for v in floats
        if view.op_of(v) != "Const"
    }


def test_a_denied_op_denies_what_follows() -> None:
    found = reasons({})
    assert found["b"] is Reason.DENY_LIST
    assert [found[node] for node in "cde"] == [Reason.BEHIND_DENY] * 2 + [found["e"]]
    assert found["e"] is not None


def test_a_denied_op_inside_a_unit_denies_nothing_outside() -> None:
    found = reasons({"b": FLOAT32})
    assert found.pop("b") is Reason.INSIDE_UNIT
    assert set(found.values()) == {None}


@pytest.mark.parametrize("list_name", ["infer", "clear"])
def test_a_node_may_have_another_list_than_its_op(list_name: str) -> None:
    assert set(reasons({"b": list_name}).values()) == {None}


def test_a_relisted_node_may_be_denied() -> None:
    assert reasons({"b": "clear", "e": "deny"})["e"] is Reason.DENY_LIST
