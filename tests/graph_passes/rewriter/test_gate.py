"""What replacements must not do, and what they inherit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from graph_text import graph, inferred_shapes
from tensorflow.core.framework import graph_pb2

from graph_passes.ir.copying import copy_graph
from graph_passes.ir.view import view_body
from graph_passes.rewriter.editor import GraphEdits
from graph_passes.rewriter.replacement import Replacement

TEXT = """
x = Const(0.5, [4, 8])
n = Const([4, 8])
other = Square(x)
axes = Const([0])
a = Exp(x)
b = Sqrt(a)
c = Tanh(b)
out = Identity(c)
"""
HELD = "v = VarHandleOp(dtype=float32, shape=[4, 8])"


def to_relu(new: Replacement) -> None:
    new.replace(new.view.index["b"], new.op.Relu("x"))


def proposed(
    graph_def: graph_pb2.GraphDef,
    write: Callable[[Replacement], None] = to_relu,
    preserve: tuple[str, ...] = ("out",),
) -> GraphEdits:
    edits = GraphEdits(view_body(graph_def, inferred_shapes(graph_def)), preserve)
    edits.propose("rule", edits.view.index["b"], write)
    return edits


def why(edits: GraphEdits) -> str:
    (miss,) = edits.misses
    assert not edits.units
    assert edits.apply() is edits.view
    return miss.why


def test_what_passes_is_made() -> None:
    before = graph(TEXT)
    edits = proposed(before)
    assert (edits.units, edits.misses) == (["rule: b"], [])
    after = {node.name: list(node.input) for node in copy_graph(before, edits.apply()).node}
    assert after["c"] == ["b/Relu"]
    assert after["b/Relu"] == ["x"]
    assert "a" not in after


def test_a_fault_of_one_unit_is_a_near_miss_and_is_said(failed_searches: list[str]) -> None:
    def write(new: Replacement) -> None:
        to_relu(new)
        raise IndexError("no such port")

    assert why(proposed(graph(TEXT), write)) == "the search failed: IndexError: no such port"
    message = failed_searches.pop()
    assert "'b' failed" in message
    assert "fault of tf_amp" in message


def test_of_faults_in_one_graph_one_is_said(failed_searches: list[str]) -> None:
    def write(new: Replacement) -> None:
        raise IndexError("no such port")

    before = graph(TEXT)
    edits = proposed(before, write)
    edits.propose("rule", edits.view.index["c"], write)
    assert len(edits.misses) == 2
    failed_searches.pop()


def test_lists_go_with_what_fails() -> None:
    def write(new: Replacement) -> None:
        new.node_lists["c"] = "infer"
        to_relu(new)

    assert proposed(graph(TEXT), write).node_lists == {"c": "infer"}
    assert proposed(graph(TEXT), write, ("out", "a")).node_lists == {}


@pytest.mark.parametrize("name", ["a", "b"])
def test_nothing_fed_or_fetched_is_inside(name: str) -> None:
    assert f"'{name}' is to be preserved" in why(proposed(graph(TEXT), preserve=("out", name)))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("a = Exp(x)", "r = RandomUniform(n, dtype=float32)\na = Mul(x, r)", "has a state"),
        ("a = Exp(x)", 'e = Enter(other, frame_name="f")\na = Mul(x, e)', "has a state"),
        ("out = Identity(c)", "out = AddV2(c, a)", "'out' outside the unit reads 'a'"),
        ("= Identity(c)", "= Identity(c)\ns = Neg(a)\nlate = NoOp(after=[s])", "'s' outside"),
        ("= Identity(c)", f"= Identity(c)\n{HELD}\ns = AssignAddVariableOp(v, a)", "'s' outside"),
        ("= Identity(c)", '= Identity(c)\ns = CheckNumerics(a, message="m")', "'s' outside"),
    ],
)
def test_what_is_inside_is_nobody_elses(old: str, new: str, reason: str) -> None:
    assert reason in why(proposed(graph(TEXT.replace(old, new))))


def test_sizes_inside_may_be_fed() -> None:
    sizes = "sizes = Placeholder(dtype=int32, shape=[2])\na = Reshape(x, sizes)"
    assert proposed(graph(TEXT.replace("a = Exp(x)", sizes))).units == ["rule: b"]


def test_a_tensor_is_made_by_one_unit() -> None:
    edits = proposed(graph(TEXT))
    assert not edits.propose("rule", edits.view.index["b"], to_relu)
    assert [miss.why for miss in edits.misses] == ["another unit makes 'b'"]


@pytest.mark.parametrize("line", ["s = Shape(a)", "s = Neg(a)"])
def test_readers_that_need_no_value_do_no_harm(line: str) -> None:
    assert proposed(graph(TEXT + line)).units == ["rule: b"]


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (
            lambda new: new.replace(
                new.view.index["b"], new.op.MatMul("x", "other", transpose_b=True)
            ),
            "shape from",
        ),
        (lambda new: new.replace(new.view.index["b"], new.op.Sum("x", "axes")), "shape from"),
        (
            lambda new: new.replace(new.view.index["b"], new.op.Cast("x", DstT=2)),
            "from float to double",
        ),
        (
            lambda new: new.replace(new.view.index["b"], new.op.Mul("x", "n")),
            "Mul takes float, not int32",
        ),
        (
            lambda new: new.replace(new.view.index["b"], new.op.Exp("n")),
            "Exp does not compute in int32",
        ),
        (
            lambda new: new.replace(new.view.index["b"], new.op.BiasAdd("x", "x")),
            "no operand of rank 2",
        ),
        (
            lambda new: new.replace(new.view.index["b"], new.op.Relu("b")),
            "reads what it is to make",
        ),
    ],
)
def test_operands_and_results_agree(write: Callable[[Replacement], None], reason: str) -> None:
    assert reason in why(proposed(graph(TEXT), write))


@pytest.mark.parametrize("make", [lambda new: "x", lambda new: new.op.Relu("x")])
def test_an_operand_of_unknown_rank_is_a_near_miss(make: Callable[[Replacement], str]) -> None:
    text = TEXT.replace("x = Const(0.5, [4, 8])", "x = Placeholder(dtype=float32, shape=None)")
    edits = proposed(
        graph(text), lambda new: new.replace(new.view.index["b"], new.op.MatMul(make(new), "x"))
    )
    assert "nothing shows the rank of " in why(edits)


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace("b = Sqrt(a)", "b = Sqrt(a, after=[other])"),
        TEXT.replace("a = Exp(x)", "a = Exp(x, after=[other])"),
        TEXT.replace("a = Exp(x)", "one = Const(1.0, after=[other])\na = Mul(x, one)"),
    ],
    ids=["the end", "inside", "a constant"],
)
def test_what_was_waited_for_is_waited_for(text: str) -> None:
    before = graph(text)
    after = copy_graph(before, proposed(before).apply())
    reads = {node.name: list(node.input) for node in after.node}
    assert reads["b/Relu"] == ["x", "^other"]


def test_where_nothing_new_can_wait_nothing_is_replaced() -> None:
    text = TEXT.replace("b = Sqrt(a)", "b = Sqrt(a, after=[other])")
    edits = proposed(graph(text), lambda new: new.replace(new.view.index["b"], "x"))
    assert "'b' waits for 'other'" in why(edits)


def test_what_nothing_waited_for_may_be_there_already() -> None:
    text = TEXT.replace("b = Sqrt(a)", "b = Sqrt(a, after=[other])") + "d = Abs(x)\ne = Neg(d)"

    def write(new: Replacement) -> None:
        to_relu(new)
        new.replace(new.view.index["d"], "x")

    before = graph(text)
    after = {n.name: n for n in copy_graph(before, proposed(before, write).apply()).node}
    assert after["b/Relu"].input == ["x", "^other"]
    assert after["e"].input == ["x"]


BY_REFERENCE = """
v = VariableV2(dtype=float32, shape=[4, 8])
update = Assign(v, other, after=[b])
late = Neg(x, after=[b])
"""


def test_what_updates_a_variable_by_reference_waits_for_what_reads_it_now() -> None:
    before = graph(TEXT + BY_REFERENCE)
    after = copy_graph(before, proposed(before, preserve=("out", "update", "late")).apply())
    reads = {node.name: list(node.input) for node in after.node}
    assert reads["update"] == ["v", "other", "^b", "^b/Relu"]
    assert reads["late"] == ["x", "^b", "^b/Relu"]


def test_nothing_waits_for_what_reads_it() -> None:
    edits = proposed(
        graph(TEXT + BY_REFERENCE),
        lambda new: new.replace(new.view.index["b"], new.op.Relu("late")),
        preserve=("out", "update"),
    )
    assert "it would wait for what comes of 'late', made with it" in why(edits)


def test_waiting_makes_no_cycle() -> None:
    text = """
x = Const(0.5, [4, 8])
b = Exp(x)
late = Tanh(b)
d = Sqrt(x, after=[late])
out = AddV2(late, d)
"""

    def write(new: Replacement) -> None:
        left, right = new.op.Split(
            new.constant(0, name="axis", beside="x"),
            new.op.ConcatV2("x", "x", "axis0", N=2),
            num_split=2,
        )
        new.replace(new.view.index["b"], left)
        new.replace(new.view.index["d"], right)

    edits = GraphEdits(view_body(graph("axis0 = Const(0)\n" + text)), ("out",))
    edits.propose("rule", edits.view.index["b"], write)
    assert "it would wait for what comes of" in why(edits)


READ_BESIDE = """
axis0 = Const(0)
x = Const(0.5, [4, 8])
b = Exp(x)
late0 = Tanh({comes_of})
{chain}
d = Mul(x, late{length})
out = AddV2(b, d)
"""


@pytest.mark.parametrize("is_in_order", [True, False])
@pytest.mark.parametrize(
    ("comes_of", "length", "message"),
    [("x", 1, ""), ("b", 1, "comes of 'b', made with it"), ("x", 2100, "too much to look")],
)
def test_what_is_read_comes_of_nothing_that_is_made(
    comes_of: str, length: int, message: str, is_in_order: bool
) -> None:
    """However far from the sources it is, and whatever the order of nodes."""
    chain = "\n".join(f"late{number + 1} = Neg(late{number})" for number in range(length))
    graph_def = graph(READ_BESIDE.format(comes_of=comes_of, length=length, chain=chain))
    if not is_in_order:
        nodes = list(graph_def.node)
        del graph_def.node[:]
        graph_def.node.extend(nodes[::-1])

    def write(new: Replacement) -> None:
        late = f"late{length}"
        left, right = new.op.Split("axis0", new.op.ConcatV2("x", late, "axis0", N=2), num_split=2)
        new.replace(new.view.index["b"], left)
        new.replace(new.view.index["d"], right)

    edits = GraphEdits(view_body(graph_def), ("out",))
    assert edits.propose("rule", edits.view.index["b"], write) == (not message)
    if message:
        assert message in why(edits)


@pytest.mark.parametrize("read", ["x", "c"])
def test_a_node_with_other_inputs_is_read_by_none_of_what_makes_them(read: str) -> None:
    def write(new: Replacement) -> None:
        new.inputs["b"] = [new.op.AddV2("x", read)]

    edits = proposed(graph(TEXT), write)
    assert edits.units == (["rule: b"] if read == "x" else [])
    if read == "c":
        assert "comes of 'b', made with it" in why(edits)


def test_survivors_move_to_what_takes_the_place_of_what_is_gone() -> None:
    before = graph(TEXT)
    for node in before.node:
        if node.name in ("c", "out"):
            node.attr["_class"].list.s.extend([b"loc:@b" if node.name == "c" else b"loc:@a"])
    after = {n.name: n for n in copy_graph(before, proposed(before).apply()).node}
    assert list(after["c"].attr["_class"].list.s) == [b"loc:@b/Relu"]
    assert "_class" not in after["out"].attr
