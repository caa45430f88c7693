"""Nodes with effects become one node where no order of the graph tells the difference."""

from __future__ import annotations

import pytest
from graph_text import graph, inferred_shapes
from tensorflow.core.framework import graph_pb2

from graph_passes import PrecisionConfig, rewrite_graph_def

CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU")
VARIABLES = """
w = VarHandleOp(dtype=float32, shape=[4], shared_name="w")
a = VarHandleOp(dtype=float32, shape=[4], shared_name="a")
g = Placeholder(dtype=float32, shape=[4])
lr = Const(0.5)
rate = Const(0.875)
"""
UPDATE = """
old = ReadVariableOp(a, dtype=float32)
kept = Mul(old, rate)
scaled = Mul(g, lr)
value = Sub(kept, scaled)
write = AssignVariableOp(a, value, after=[old])
new = ReadVariableOp(a, dtype=float32, after=[write])
last = AssignAddVariableOp(w, new)
"""


def rewritten(text: str, fetched: tuple[str, ...] = ("end",)) -> tuple[graph_pb2.GraphDef, str]:
    """The rewritten graph, and why no update was made in it, "" where one was."""
    graph_def = graph(VARIABLES + text)
    result = rewrite_graph_def(graph_def, CPU, preserve=fetched, shapes=inferred_shapes(graph_def))
    assert result.failure is None
    misses = [miss.why for miss in result.report.near_misses]
    assert bool(misses) is not bool(result.report.fused["fused-update"])
    return result.graph_def, misses[0] if misses else ""


def test_names_stay_and_wait_for_the_new_op() -> None:
    text = UPDATE + "end = NoOp(after=[last, write, old, new])"
    after, why = rewritten(text)
    assert not why
    nodes = {node.name: node for node in after.node}
    new = nodes["last/ResourceApplyKerasMomentum"]
    assert list(new.input) == ["w", "a", "last/lr", "g", "last/momentum"]
    for name in ("old", "write", "new", "last"):
        assert nodes[name].op == "NoOp"
        assert f"^{new.name}" in nodes[name].input
    assert nodes["end"].input == ["^last", "^write", "^old", "^new"]
    assert nodes.keys().isdisjoint({"kept", "scaled", "value", "rate"})


NODES = ("old", "kept", "scaled", "value", "write", "new", "last", "rate")


@pytest.mark.parametrize("waiting", NODES)
def test_what_one_node_waited_for_the_new_op_waits_for(waiting: str) -> None:
    counter = 'c = VarHandleOp(dtype=float32, shape=[4], shared_name="c")\n'
    before = graph(f"{VARIABLES}{counter}add = AssignAddVariableOp(c, g)\n{UPDATE}")
    next(node for node in before.node if node.name == waiting).input.append("^add")
    shapes = inferred_shapes(before)
    after = rewrite_graph_def(before, CPU, shapes=shapes)
    assert after.report.fused["fused-update"]
    (new,) = (node for node in after.graph_def.node if node.name.startswith("last/Resource"))
    assert "^add" in new.input


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (UPDATE + "end = Neg(old)", "'end' outside the update reads 'old'"),
        (UPDATE + "end = Neg(kept)", "'end' outside the update reads 'kept'"),
        (UPDATE + "end = Neg(new)", "'end' outside the update reads 'new'"),
        (UPDATE + "end = NoOp(after=[last, value])", "something waits for 'value'"),
        (
            UPDATE.replace("after=[old]", "after=[old, value]")
            + "end = NoOp(after=[last])",
            "something waits for 'value'",
        ),
        (
            UPDATE.replace("after=[write]", "after=[write, x]").replace(
                "new =", "x = NoOp(after=[write])\nnew ="
            )
            + "end = NoOp(after=[last])",
            "something runs between",
        ),
        (
            UPDATE.replace("(w, new)", "(w, new, after=[x])")
            + 'x = AssignVariableOp(a, g, after=[new])\nend = NoOp(after=[last])',
            "something runs between",
        ),
        (
            UPDATE.replace("(w, new)", "(w2, new)")
            + "end = NoOp(after=[last])",
            "by two names",
        ),
        (
            UPDATE.replace("AddVariableOp(w, new)", 'AddVariableOp(w, new) @ "/device:CPU:1"')
            + "end = NoOp(after=[last])",
            "several devices",
        ),
        (
            UPDATE.replace("(w, new)", "(w, sum)").replace(
                "last =",
                "late = ReadVariableOp(a, dtype=float32)\nnone = Sub(late, late)\n"
                "sum = AddV2(new, none)\nlast ="
            )
            + "end = NoOp(after=[last])",
            "'write' does not wait for 'late'",
        ),
    ],
)  # fmt: skip
def test_what_is_left(text: str, why: str) -> None:
    names = 'w2 = VarHandleOp(dtype=float32, shape=[4], shared_name="a")\n'
    after, said = rewritten(names + text)
    assert why in said
    assert not any(node.op.startswith("ResourceApply") for node in after.node)


@pytest.mark.parametrize("kept", NODES)
def test_what_is_fed_or_fetched_is_left(kept: str) -> None:
    _, why = rewritten(UPDATE + "end = NoOp(after=[last])", ("end", kept))
    assert why == f"{kept!r} is to be preserved"


@pytest.mark.parametrize(
    ("old", "new"),
    [("(w, new)", "(w, new, after=[write])"), ("(a, value, after=[old])", "(a, value)")],
)
def test_nodes_may_be_in_order_by_one_way_or_two(old: str, new: str) -> None:
    text = UPDATE.replace(old, new)
    after, why = rewritten(text + "end = NoOp(after=[last])")
    assert not why
    (new,) = (node for node in after.node if node.name.startswith("last/Resource"))
    assert not [name for name in new.input if name[0] == "^"]


def second(text: str) -> str:
    """The same update of other variables."""
    names = ("w", "a", "old", "kept", "scaled", "value", "write", "new", "last")
    for name in names:
        for left, right in (("\n", " ="), ("(", ","), ("[", "]"), (" ", ","), (" ", ")")):
            text = text.replace(f"{left}{name}{right}", f"{left}{name}_2{right}")
    handles = "\n".join(
        f'{name}_2 = VarHandleOp(dtype=float32, shape=[4], shared_name="{name}_2")' for name in "wa"
    )
    return handles + text


def test_two_that_wait_for_each_other_stay_apart() -> None:
    """Each alone might become one node; both at once would wait for each other."""
    one = UPDATE.replace("(w, new)", "(w, new, after=[write_2])")
    two = second(UPDATE).replace("(w_2, new_2)", "(w_2, new_2, after=[write])")
    for text in (UPDATE + two, one + second(UPDATE)):
        after, why = rewritten(text + "\nend = NoOp(after=[last, last_2])")
        assert not why
        assert sum(node.op == "ResourceApplyKerasMomentum" for node in after.node) == 2
    _, why = rewritten(one + two + "\nend = NoOp(after=[last, last_2])")
    assert "something runs between" in why


@pytest.mark.parametrize(("first", "then"), [("old", "last_2"), ("old_2", "last")])
def test_what_keeps_one_apart_keeps_no_other_before_or_behind_it(first: str, then: str) -> None:
    apart = UPDATE.replace("after=[write]", "after=[write, x]").replace(
        "new =", "x = NoOp(after=[write])\nnew ="
    )
    graph_def = graph(VARIABLES + apart + second(UPDATE))
    for node in graph_def.node:
        if node.name == first:
            node.input.append(f"^{then}")
    result = rewrite_graph_def(graph_def, CPU, shapes=inferred_shapes(graph_def))
    assert result.failure is None
    assert result.report.fused["fused-update"] == 1
    assert [miss.why for miss in result.report.near_misses] == [
        "something runs between the parts of the update"
    ]


def test_an_update_of_which_a_part_may_be_dead_is_left() -> None:
    branch = "p = Placeholder(dtype=bool, shape=[])\ns = Switch(p, p)\ntaken = Identity(s)\n"
    text = UPDATE.replace("after=[write]", "after=[write, taken]")
    graph_def = graph(VARIABLES + branch + text)
    result = rewrite_graph_def(graph_def, CPU, shapes=inferred_shapes(graph_def))
    assert result.failure is None
    assert not result.report.fused["fused-update"]
