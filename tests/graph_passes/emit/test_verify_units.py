"""Replacements that lose something the caller gave: each must be found."""

from __future__ import annotations

import re

import numpy as np
import pytest
from graph_text import graph

from graph_passes.emit.verify_units import VerificationError, verify_units
from graph_passes.ir.view import view_body
from graph_passes.ops.node_types import NodeTypeTable

GIVEN = """
v = VarHandleOp(dtype=float32, shape=[])
one = Const(1.0, [])
add = AssignAddVariableOp(v, one)
x = Placeholder(dtype=float32)
a = Exp(x, after=[add])
b = Neg(a, after=[add])
c = Tanh(b)
d = Relu(c, after=[x])
"""


def verify(changes: dict[str, str], preserve: tuple[str, ...] = ("d",), given: str = GIVEN) -> None:
    """Verifies the text after each line that begins with a key was replaced."""
    lines = []
    for line in given.strip().splitlines():
        name = line.partition(" ")[0]
        lines.extend(changes[name].splitlines() if name in changes else [line])
    node_types = NodeTypeTable(lambda _: None)
    before, after = (view_body(graph(text), None, node_types) for text in (given, "\n".join(lines)))
    verify_units(before, after, preserve)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"b": "", "c": "", "a": "", "d": "new = Tanh(x, after=[add])\nd = Relu(new, after=[x])"},
        {"c": "new = Sigmoid(b)", "d": "d = Relu(new, after=[x])"},
        # Only what nobody waits for any more is lost.
        {"a": "", "b": "b = Neg(x, after=[add])"},
    ],
)
def test_what_may_change(changes: dict[str, str]) -> None:
    verify(changes)


@pytest.mark.parametrize(
    ("changes", "preserve", "message"),
    [
        ({"add": "", "a": "a = Exp(x)", "b": "b = Neg(a)"}, (), "'add', which has an effect"),
        ({"c": "", "d": "d = Relu(b, after=[x])"}, ("c",), "the preserved node 'c' is gone"),
        ({"c": "", "d": "d = Relu(b, after=[x])"}, ("c:0",), "the preserved node 'c' is gone"),
        ({"d": "d = Relu(c)"}, (), "node 'd' has lost a control input"),
        ({"a": "", "b": "b = Neg(x)"}, (), "node 'b' has lost a control input"),
        ({"d": "d = Relu(c, after=[x, gone])"}, (), "waits for 'gone', which is not there"),
        ({"c": "c = Tanh(b) @ '/device:CPU:1'"}, (), "node 'c' has another device"),
        (
            {"a": "", "b": "", "c": "c = Tanh(x)"},
            ("d",),
            "what is fetched no longer needs",
        ),
        (
            {"one": "one = Const(1.0, [])\nhalf = Cast(one, DstT=float16)", "d": "d = Relu(half)"},
            ("d",),
            "the preserved node 'd' was retyped",
        ),
    ],
)
def test_what_may_not(changes: dict[str, str], preserve: tuple[str, ...], message: str) -> None:
    with pytest.raises(VerificationError, match=re.escape(message)):
        verify(changes, preserve)


@pytest.mark.parametrize("preserve", [("d",), ("d", "other")])
def test_who_asks_for_an_effect_may_go_where_nothing_fetched_needs_it(
    preserve: tuple[str, ...],
) -> None:
    given = f"{GIVEN}other = AssignAddVariableOp(v, one)\nz = Exp(x, after=[other])\n"
    verify({"z": ""}, preserve, given)


@pytest.mark.parametrize(("waits", "is_needed"), [("new", True), ("add", False)])
def test_what_stands_for_an_effect_waits_for_what_was_added_in_its_place(
    waits: str, is_needed: bool
) -> None:
    chain = "r = ReadVariableOp(v, dtype=float32)\nw = AssignAddVariableOp(v, r)\n"
    given = f"{GIVEN}{chain}other = AssignAddVariableOp(v, one)\nz = Exp(x, after=[other])\n"
    changes = {
        "z": "",
        "r": "new = AssignSubVariableOp(v, one)\nr = NoOp(after=[new])",
        "w": f"w = NoOp(after=[{waits}])",
    }
    if is_needed:
        verify(changes, ("w",), given)
    else:
        with pytest.raises(VerificationError, match="no longer needs 'r'"):
            verify(changes, ("w",), given)


def test_a_location_names_no_node_that_is_gone() -> None:
    node_types = NodeTypeTable(lambda _: None)
    before, after = (graph(GIVEN), graph(GIVEN.replace("c = Tanh(b)\n", "").replace("(c,", "(b,")))
    for graph_def in (before, after):
        graph_def.node[-1].attr["_class"].list.s.append(b"loc:@c")
    views = [view_body(graph_def, None, node_types) for graph_def in (before, after)]
    with pytest.raises(VerificationError, match="'d' is to stand beside 'c', now gone"):
        verify_units(*views)
    for graph_def in (before, after):
        graph_def.node[-1].attr["_class"].list.s[:] = [b"loc:@elsewhere"]
    verify_units(*(view_body(graph_def, None, node_types) for graph_def in (before, after)))


@pytest.mark.parametrize("length", [1, 400])
@pytest.mark.parametrize("by_control", [False, True])
def test_a_circle_is_found_behind_any_number_of_nodes(length: int, by_control: bool) -> None:
    chain = [f"n{number} = Neg(n{number - 1})" for number in range(1, length + 1)]
    text = "\n".join(["x = Const(0.5, [2])", "n0 = Neg(x)", *chain, "out = Exp(x)"])
    node_types = NodeTypeTable(lambda _: None)
    before = view_body(graph(text), None, node_types)
    after = graph(f"{text}\nnew = Tanh(n{length})")
    view = view_body(after, None, node_types)
    verify_units(before, view)
    after.node[1].input[:] = ["x", "^new"] if by_control else ["new"]
    numbers = np.arange(len(view.nodes), dtype=np.int32)
    with pytest.raises(VerificationError, match="in a circle"):
        verify_units(before, view.edited(view.nodes, numbers, [1], {}))
