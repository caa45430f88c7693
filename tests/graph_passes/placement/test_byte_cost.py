"""Where Casts are placed by the bytes they move, on graphs where first come is a bad choice."""

from __future__ import annotations

import random

import graph_checks
import pytest
from decisions import reasons_of
from graph_diff import retyped
from graph_text import graph, inferred_shapes
from tensorflow.core.framework import graph_pb2

from graph_passes import PrecisionConfig, Reason, rewrite_graph_def
from graph_passes.ir.view import view_body
from graph_passes.pipeline import paint
from graph_passes.policy.cost_table import CostTable, Curve
from graph_passes.policy.op_lists import FLOAT32

ON = PrecisionConfig()
OFF = PrecisionConfig(disabled_rules=frozenset(("cast-cut",)))


def casts(text: str, config: PrecisionConfig = ON) -> set[str]:
    """What the Casts of the rewritten graph read."""
    graph_def = graph(text)
    shapes = inferred_shapes(graph_def)
    result = rewrite_graph_def(graph_def, config, preserve=("out",), shapes=shapes)
    assert result.failure is None
    graph_checks.check(graph_def, result.graph_def, device=config.device, preserve=("out",))
    return {node.input[0] for node in result.graph_def.node if node.op == "Cast"}


def low(graph_def: graph_pb2.GraphDef, config: PrecisionConfig = ON) -> set[str]:
    """The nodes that go low."""
    shapes = inferred_shapes(graph_def)
    after = rewrite_graph_def(graph_def, config, preserve=("out",), shapes=shapes).graph_def
    return {found.node for found in retyped(graph_def, after)}


EXPANDED = """
    x = Placeholder(dtype=float32, shape=[1024, 1024])
    a = MatMul(x, x)
    b = Tanh(a)
    c = Tile(b, [{times}, 1])
    out = Exp(c)
"""


def test_a_cast_is_made_before_its_tensor_grows():
    assert casts(EXPANDED.format(times=8), OFF) == {"x", "c"}
    assert casts(EXPANDED.format(times=8)) == {"x", "b"}
    # Of equal places the last one: the Tile moves half as much.
    assert casts(EXPANDED.format(times=1)) == {"x", "c"}


def test_a_cast_is_made_where_its_tensor_has_shrunk():
    text = """
        x = Placeholder(dtype=float32, shape=[2048, 2048])
        a = MatMul(x, x)
        b = Reshape(a, [4, 1024, 1024])
        c = Neg(b)
        d = Slice(c, [0, 0, 0], [1, 1024, 1024])
        out = Exp(d)
    """
    assert casts(text) == {"x", "d"}


def test_readers_of_a_tensor_share_its_cast():
    text = EXPANDED.format(times=1).replace("out =", "d =")
    text += "    e = Exp(b)\n    f = Expm1(b)\n    out = AddN(d, e, f)\n"
    # The tile in the target dtype would need a Cast of its own beside the one of b.
    assert casts(text, OFF) == {"x", "b", "c"}
    assert casts(text) == {"x", "b"}


CHAIN = """
    x = Placeholder(dtype=float32, shape=[{side}, {side}])
    v = Placeholder(dtype=float32, shape=[{side}])
    a = MatMul(x, x)
    b = Reshape(a, [{side}, {side}])
    c = BiasAdd(b, v)
    d = Mul(c, b)
    e = AddV2(d, x)
    out = Exp(e)
"""


@pytest.mark.parametrize(("side", "joins"), [(2048, True), (64, False)])
def test_element_wise_ops_behind_clear_ones_join_where_they_gain_more_than_a_cast(side, joins):
    graph_def = graph(CHAIN.format(side=side))
    assert ({"c", "d", "e"} <= low(graph_def)) is joins
    assert low(graph_def).isdisjoint({"c", "d", "e"}) is not joins


def test_casts_that_a_compiler_fuses_take_no_colour_away():
    graph_def = graph(CHAIN.format(side=64))
    assert {"c", "d", "e"} <= low(graph_def, PrecisionConfig(fused=True))


def test_useful_work_is_not_given_up_for_a_cast():
    # In float32, b and c would save the second Cast of a, and move 2 * 8 MB more.
    text = """
        x = Placeholder(dtype=float32, shape=[2048, 2048])
        a = MatMul(x, x)
        b = Tanh(a)
        c = Sigmoid(b)
        d = Exp(a)
        e = Exp(c)
        out = AddV2(d, e)
    """
    assert casts(text) == {"x", "a", "c"}


@pytest.mark.parametrize(
    "op",
    [
        "ExpandDims({}, 0)",
        "Identity({})",
        "PreventGradient({})",
        "Reshape({}, [4096, 1024])",
        "Squeeze({})",
        "StopGradient({})",
    ],
)
def test_what_moves_nothing_is_worth_no_cast(op: str):
    text = f"""
        x = Placeholder(dtype=float32, shape=[2048, 2048])
        a = MatMul(x, x)
        b = {op.format("a")}
        c = {op.format("b")}
        d = Exp(a)
        e = Exp(c)
        out = Identity(d, after=[e])
    """
    assert casts(text) == {"x", "a"}


@pytest.mark.parametrize(
    ("reader", "goes_low"),
    [
        # What takes a part of a tensor reads no more than that part.
        ("Slice(a, [0, 0], [64, 2048])", False),
        ("StridedSlice(a, [0, 0], [64, 2048], [1, 1])", False),
        ("GatherV2(a, [1, 2, 3], 0)", False),
        ("GatherNd(a, [[1], [2]])", False),
        # What reads all of it is worth a Cast of the little it makes.
        ("Max(a, [0])", True),
    ],
)
def test_an_op_is_worth_the_bytes_that_it_reads(reader: str, goes_low: bool):
    text = f"""
        x = Placeholder(dtype=float32, shape=[2048, 2048])
        a = MatMul(x, x)
        b = {reader}
        c = Exp(a)
        out = Exp(b)
    """
    assert casts(text, OFF) == {"x", "a", "b"}
    text = text.replace("out = Exp(b)", "d = Exp(b)\n        out = Identity(c, after=[d])")
    assert casts(text) == {"x", "a", *(["b"] if goes_low else [])}


def test_calls_move_nothing():
    text = """
        def same(p: float32):
            q = Identity(p)
            return q

        x = Placeholder(dtype=float32, shape=[2048, 2048])
        a = MatMul(x, x)
        b = PartitionedCall(a, Tout=[float32], f=same)
        c = PartitionedCall(b, Tout=[float32], f=same)
        d = Exp(a)
        e = Exp(c)
        out = AddV2(d, e)
    """
    graph_def = graph(text)
    shapes = inferred_shapes(graph_def)
    for config, read in ((OFF, {"x", "a", "c"}), (ON, {"x", "a"})):
        result = rewrite_graph_def(graph_def, config, preserve=("out",), shapes=shapes)
        assert result.failure is None
        assert {node.input[0] for node in result.graph_def.node if node.op == "Cast"} == read


def test_an_op_that_tensorflow_does_not_know_moves_nothing():
    graph_def = graph(EXPANDED.format(times=8))
    graph_def.node.add(name="other", op="OpOfSomeLibrary", input=["b"])
    result = rewrite_graph_def(graph_def, ON, preserve=("out",))
    assert result.failure is None
    assert result.changed


TABLE = CostTable(
    "made up", "GPU", "float16", "nothing", Curve((1,), (1e-6,)), Curve((1,), (1e-6,)), ()
)


@pytest.mark.parametrize(
    ("changes", "in_force"),
    [
        ({}, True),
        ({"disabled_rules": frozenset(("cast-cut",))}, False),
        ({"parity": True}, False),
        ({"level": "UNSAFE_FORCE_ALL"}, False),
        ({"cost_table": TABLE}, False),
        ({"cost_table": TABLE, "disabled_rules": frozenset(("cost",))}, True),
    ],
)
def test_bytes_decide_where_no_times_do(changes: dict, in_force: bool):
    assert PrecisionConfig(**changes).weighs_bytes is in_force


@pytest.mark.parametrize("merge", ["Merge(enter, next)", "Merge(enter, next, next)"])
def test_both_ends_of_a_back_edge_have_one_dtype(merge: str):
    # The state is cheaper in float32: beside the product, Exp and what is behind the loop read it.
    text = f"""
        x = Placeholder(dtype=float32, shape=[2048, 2048])
        enter = Enter(x, frame_name="loop")
        merge = {merge}
        more = Const(False, after=[merge])
        go = LoopCond(more)
        switch = Switch(merge, go)
        a = MatMul(switch[1], switch[1])
        b = Exp(switch[1])
        c = Relu(a, after=[b])
        next = NextIteration(c)
        exit = Exit(switch[0])
        out = Exp(exit)
    """
    graph_def = graph(text)
    assert {"merge", "next"} <= low(graph_def, OFF)
    assert low(graph_def) == {"a", "c"}


def test_what_only_costs_casts_stays_float32():
    text = """
        x = Placeholder(dtype=float32, shape=[32, 32])
        y = Placeholder(dtype=float32, shape=[32, 32])
        a = MatMul(x, x)
        d = Exp(a)
        b = Mul(a, y)
        e = Expm1(b)
        out = AddV2(d, e)
    """
    assert casts(text, OFF) == {"x", "y", "a", "b"}
    assert casts(text) == {"x", "a"}
    report = rewrite_graph_def(graph(text), ON, preserve=("out",)).report
    assert reasons_of(report)["b"] == Reason.MOVES_MORE.text


BEHIND_DENIED = """
    x = Placeholder(dtype=float32, shape=[2048, 2048])
    a = Mean(x, [0], keep_dims=True)
    b = {between}
    c = Transpose(b, [1, 0])
    d = MatMul(c, x)
    out = Identity(d)
"""


def test_behind_a_denied_op_values_may_be_moved_in_the_target_dtype_and_not_changed():
    assert casts(BEHIND_DENIED.format(between="Tile(a, [2048, 1])")) == {"x", "a", "d"}
    assert casts(BEHIND_DENIED.format(between="Mul(a, x)")) == {"x", "b", "d"}


def _painted(unit: str, text: str) -> set[str]:
    graph_def = graph(text)
    view = view_body(graph_def, inferred_shapes(graph_def))
    coloring = paint(view, ON, ("out",), {unit: FLOAT32})
    return {view.node_of(v).name for v in range(1, len(view.dtypes)) if coloring.low[v]}


def test_an_op_that_reads_what_a_unit_gives_low_may_go_low():
    text = """
        x = Placeholder(dtype=float32, shape=[2048, 2048])
        s = Placeholder(dtype=float32, shape=[])
        n = Exp(x)
        r = {reader}
        b = Neg(n)
        c = Mul(b, s)
        d = Reshape(c, [2048, 2048])
        e = MatMul(d, d)
        out = AddV2(r, e)
    """
    # The unit's result is cast in any case; behind it the Mul is worth its halved traffic.
    assert {"b", "c", "d"} <= _painted("n", text.format(reader="MatMul(n, n)"))
    assert _painted("n", text.format(reader="Tanh(n)")).isdisjoint({"b", "c"})


def test_without_shapes_nothing_is_lost():
    graph_def = graph(EXPANDED.format(times=8))
    result = rewrite_graph_def(graph_def, ON, preserve=("out",))
    assert result.failure is None
    assert result.report.casts_to_float32 == 1


def test_parity_and_the_switch_leave_the_painting_alone():
    graph_def = graph(EXPANDED.format(times=8))
    for config in (OFF, PrecisionConfig(parity=True)):
        assert "c" in low(graph_def, config)


def test_the_order_of_nodes_does_not_matter():
    graph_def = graph(CHAIN.format(side=2048))
    expected = low(graph_def)
    for seed in range(5):
        nodes = list(graph_def.node)
        random.Random(seed).shuffle(nodes)
        assert low(graph_pb2.GraphDef(node=nodes, versions=graph_def.versions)) == expected
