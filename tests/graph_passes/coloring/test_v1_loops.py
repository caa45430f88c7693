from __future__ import annotations

import pytest
from graph_text import graph
from parity import converted
from tensorflow.core.framework import types_pb2

from graph_passes import PrecisionConfig, rewrite_graph_def

LOOP = """
x = Const(0.5, [8, 8])
deny1 = Exp(x)
enter1 = Enter({start}, frame_name="loop")
merge1 = Merge(enter1, next1)
more = Const(False, after=[merge1])
go = LoopCond(more)
switch1 = Switch(merge1, go)
infer1 = Tanh(switch1[1])
allow1 = MatMul(infer1, infer1)
turn = {turn}
next1 = NextIteration(turn)
exit1 = Exit(switch1[0])
{behind}
out = Identity(exit1)
"""


def low(text: str, *preserve: str) -> set[str]:
    before = graph(text)
    result = rewrite_graph_def(before, PrecisionConfig(), preserve=("out", *preserve))
    assert result.failure is None
    return converted(before, result.proto)


@pytest.mark.parametrize(
    ("start", "turn", "is_low"),
    [
        ("x", "Relu(allow1)", True),
        ("x", "Exp(allow1)", False),
        ("deny1", "Relu(allow1)", False),
        ("x", "AddV2(allow1, switch1[1])", False),
        ("x", "AddV2(allow1, enter1)", True),
    ],
)
def test_loop_variable_has_one_dtype(start: str, turn: str, is_low: bool) -> None:
    """A deny op keeps it float32, from before the loop or the turn before, as adding to it does."""
    names = {"merge1", "next1"}
    assert low(LOOP.format(start=start, turn=turn, behind="")) & names == (
        names if is_low else set()
    )


def test_all_merges_of_a_back_edge_agree() -> None:
    text = LOOP.format(start="x", turn="Relu(allow1)", behind="merge2 = Merge(enter1, next1)")
    assert low(text, "merge2").isdisjoint({"merge1", "merge2", "next1"})


@pytest.mark.parametrize("reader", ["Relu(next1)", "Switch(next1, go)"])
def test_others_than_a_merge_may_read_a_next_iteration(reader: str) -> None:
    """A loop that never runs loses its Merge to TensorFlow's loop optimizer."""
    text = LOOP.format(start="x", turn="Relu(allow1)", behind=f"other = {reader}")
    assert {"merge1", "next1"} <= low(text)


def test_an_unknown_op_reads_a_next_iteration_in_float32() -> None:
    before = graph(LOOP.format(start="x", turn="Relu(allow1)", behind=""))
    before.node.add(name="other", op="OpOfSomeLibrary", input=["next1"])
    result = rewrite_graph_def(before, PrecisionConfig(), preserve=("out",))
    assert result.failure is None
    nodes = {node.name: node for node in result.proto.node}
    read = nodes[nodes["other"].input[0]]
    assert types_pb2.DT_FLOAT in (read.attr["T"].type, read.attr["DstT"].type)
    assert nodes["allow1"].attr["T"].type == types_pb2.DT_HALF


def test_a_preserved_back_edge_keeps_the_loop_variable_float32() -> None:
    text = LOOP.format(start="x", turn="Relu(allow1)", behind="")
    assert low(text, "next1").isdisjoint({"merge1", "next1"})


def test_a_back_edge_of_integers_is_not_painted() -> None:
    text = LOOP.format(start="x", turn="Relu(allow1)", behind="n = Const(1)\nm = NextIteration(n)")
    names = low(text)
    assert "next1" in names
    assert "m" not in names


def test_what_is_computed_of_a_variable_may_enter_a_loop_low() -> None:
    names = low(
        """
        source = VariableV2(dtype=float32, shape=[8, 8])
        read = Identity(source)
        other = Relu(read)
        entered = Enter(other, frame_name="loop", is_constant=True)
        allow1 = MatMul(entered, entered)
        out = Exit(allow1)
        """
    )
    assert {"other", "entered", "allow1"} <= names


@pytest.mark.parametrize(
    ("source", "is_low"),
    [("VariableV2(dtype=float32, shape=[8, 8])", False), ("Const(0.5, [8, 8])", True)],
)
def test_read_of_a_variable_by_reference_stays(source: str, is_low: bool) -> None:
    names = low(
        f"""
        source = {source}
        read = Identity(source)
        entered = Enter(read, frame_name="loop", is_constant=True)
        allow1 = MatMul(entered, entered)
        again = Reshape(entered, [8, 8])
        allow2 = MatMul(again, again)
        exit1 = Exit(allow1)
        exit2 = Exit(allow2)
        out = AddV2(exit1, exit2)
        """
    )
    assert {"allow1", "allow2"} <= names
    assert [name in names for name in ("read", "entered", "again")] == [is_low] * 3
