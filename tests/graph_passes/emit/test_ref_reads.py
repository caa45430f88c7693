"""Casts of ref variables that are set and read again."""

from __future__ import annotations

import pytest
from graph_diff import added
from graph_text import graph

from graph_passes import PrecisionConfig, rewrite_graph_def

SET_AND_READ = """
x = Placeholder(dtype=float32, shape=[8, 8])
w = VariableV2(dtype=float32, shape=[8, 8])
first = Identity(w)
old = MatMul(x, first)
high = Exp(old)
change = Assign(w, high)
done = NoOp(after=[change])
read = Identity(w)
later = Identity(w, after=[done])
long = ExpandDims(read, 0)
squeezed = Squeeze(long, squeeze_dims=[0])
copied = Transpose(read, [1, 0])
behind = Relu(x, after=[done])
other = VariableV2(dtype=float32, shape=[8, 8])
product = MatMul({operands})
out = Exp(product)
"""


@pytest.mark.parametrize(
    ("operands", "waits"),
    [
        ("x, read", []),
        ("x, read, after=[done]", ["^done", "^x"]),
        ("behind, read", ["^behind"]),
        ("x, later", ["^done", "^x"]),
        ("x, squeezed, after=[done]", ["^done", "^x"]),
        # A copy of its own has the value that was there when it was made.
        ("x, copied, after=[done]", []),
        ("x, w, after=[done]", ["^done", "^x"]),
        ("x, change", ["^high", "^x"]),
        ("x, other, after=[done]", ["^done"]),
        # What is no variable has one value at any time.
        ("behind, x, after=[done]", []),
    ],
)
def test_a_ref_variable_is_cast_behind_what_sets_it(operands: str, waits: list[str]) -> None:
    before = graph(SET_AND_READ.format(operands=operands))
    after = rewrite_graph_def(before, PrecisionConfig(), preserve=("x", "high", "out")).proto
    nodes = {node.name: list(node.input) for node in after.node}
    cast = nodes["product"][1]
    while "CastToFp16" not in cast:
        cast = nodes[cast][0]
    assert nodes[cast][1:] == waits


def test_a_turned_variable_is_cast_behind_what_its_copy_waits_for() -> None:
    before = graph(
        SET_AND_READ.format(operands="x, turned").replace(
            "product =", "perm = Const([1, 0])\nturned = Transpose(later, perm)\nproduct ="
        )
    )
    after = rewrite_graph_def(before, PrecisionConfig(), preserve=("x", "high", "out")).proto
    casts = [list(node.input) for node in added(before, after) if node.input[0] == "later"]
    assert casts == [["later", "^done", "^perm"]]


def test_a_branch_that_sets_a_variable_reads_it_then() -> None:
    before = graph("""
        x = Placeholder(dtype=float32, shape=[8, 8])
        test = Placeholder(dtype=bool, shape=[])
        w = VariableV2(dtype=float32, shape=[8, 8])
        read = Identity(w)
        old = MatMul(x, read)
        high = Exp(old)
        taken = RefSwitch(w, test)
        new = Switch(high, test)
        change = Assign(taken[1], new[1])
        given = Switch(read, test)
        product = MatMul(new[1], given[1], after=[change])
        out = Exp(product)
    """)
    after = rewrite_graph_def(before, PrecisionConfig(), preserve=("x", "high", "out")).proto
    casts = [list(node.input) for node in added(before, after) if node.input[0] == "given:1"]
    assert casts == [["given:1", "^change", "^new"]]


@pytest.mark.parametrize(
    "shared", ['RefEnter(w, frame_name="loop")', 'Enter(first, frame_name="loop")']
)
def test_a_loop_that_sets_a_variable_reads_it_in_every_round_when_it_did(shared: str) -> None:
    """Behind the write of the round before, which no node can wait for."""
    before = graph(f"""
        x = Placeholder(dtype=float32, shape=[8, 8])
        w = VariableV2(dtype=float32, shape=[8, 8])
        start = Enter(x, frame_name="loop")
        first = Identity(w, after=[x])
        written = RefEnter(w, frame_name="loop")
        shared = {shared}
        merged = Merge(start, next)
        go = Const(True, after=[merged])
        test = LoopCond(go)
        switched = Switch(merged, test)
        product = MatMul(switched[1], shared)
        high = Exp(product)
        new = Exp(switched[1])
        change = Assign(written, new, after=[high])
        next = NextIteration(high, after=[change])
        out = Exit(switched[0])
    """)
    after = rewrite_graph_def(before, PrecisionConfig(), preserve=("x", "high", "out")).proto
    casts = [list(node.input) for node in added(before, after) if node.input[0] == "shared"]
    assert casts == [["shared", "^switched"]]


def test_readers_of_a_ref_variable_at_two_times_have_two_casts() -> None:
    before = graph("""
        x = Placeholder(dtype=float32, shape=[8, 8])
        w = VariableV2(dtype=float32, shape=[8, 8])
        read = Identity(w)
        old = MatMul(x, read)
        again = MatMul(read, x)
        high = Exp(old)
        change = AssignAdd(w, high)
        new = MatMul(x, read, after=[change])
        both = AddV2(high, new)
        out = AddV2(both, again)
    """)
    after = rewrite_graph_def(before, PrecisionConfig(), preserve=("x", "out")).proto
    casts = [
        (node.name, list(node.input)) for node in added(before, after) if node.input[0] == "read"
    ]
    assert casts == [
        ("read-0-CastToFp16-0-AutoMixedPrecision", ["read"]),
        ("read-0-CastToFp16-1-AutoMixedPrecision", ["read", "^change", "^x"]),
    ]
