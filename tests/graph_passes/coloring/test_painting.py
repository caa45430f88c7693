"""The colouring, stage by stage, on graphs where one rule decides."""

from __future__ import annotations

import pytest
from graph_text import graph, inferred_shapes
from tensorflow.core.framework import graph_pb2

from graph_passes import PrecisionConfig, Reason
from graph_passes.ir.view import view_body
from graph_passes.pipeline import paint
from graph_passes.policy.op_lists import FLOAT32

GPU = PrecisionConfig(device="GPU")
PARITY = PrecisionConfig(device="GPU", parity=True)
UNWEIGHED = PrecisionConfig(device="GPU", disabled_rules=frozenset(("cast-cut",)))
FORCED = PrecisionConfig(device="GPU", level="UNSAFE_FORCE_ALL")

INPUTS = """
x = Placeholder(dtype=float32, shape=[2048, 2048])
y = Placeholder(dtype=float32, shape=[2048, 2048])
"""


def reasons(
    text: str | graph_pb2.GraphDef,
    config: PrecisionConfig = GPU,
    *,
    preserve: tuple[str, ...] = (),
    units: tuple[str, ...] = (),
) -> dict[str, Reason | None]:
    """Why the nodes stay float32, None for converted ones; results of units are float32."""
    graph_def = graph(INPUTS + text) if isinstance(text, str) else text
    view = view_body(graph_def, inferred_shapes(graph_def))
    coloring = paint(view, config, preserve, dict.fromkeys(units, FLOAT32))
    return {
        view.node_of(v).name: None
        if coloring.low[v]
        else Reason(coloring.why[v] or Reason.UNLISTED)
        for v in range(1, len(view.dtypes))
        if view.is_float[v]
    }


def low(text: str, config: PrecisionConfig = GPU, **more: tuple[str, ...]) -> set[str]:
    return {node for node, reason in reasons(text, config, **more).items() if reason is None}


def test_all_that_can_is_forced() -> None:
    text = "a = Exp(x)\nb = Cumsum(a, 0)\nc = MatMul(b, b)\nd = Exp(c)\nv = Zeta(d, d)"
    assert low(text, FORCED) == {"x", "y", "a", "b", "c", "d"}
    assert low(text) == {"c"}


def test_in_parity_infer_ops_behind_clear_ones_are_painted_between_allowed_ones_alone() -> None:
    text = "a = MatMul(x, x)\nb = Reshape(a, [2048, 2048])\nc = Sigmoid(b)\n"
    assert low(text + "d = MatMul(c, c)", PARITY) == {"a", "b", "c", "d"}
    assert low(text + "d = Sin(c)", PARITY) == {"a", "b"}
    # Below an allowed op alone, or above one alone, is not between.
    assert low("a = Sigmoid(x)\nb = MatMul(a, a)", PARITY) == {"b"}


@pytest.mark.parametrize("maker", ["Neg(x)", "Tanh(x)"])
def test_what_a_unit_reads_is_not_given_low(maker: str) -> None:
    """The unit's result is cast in any case, and says nothing of what comes before."""
    text = f"""
p = MatMul(x, x)
b = {maker}
c = Neg(b)
d = Neg(c)
n = Exp(d)
r = MatMul(n, n)
"""
    assert low(text, units=("n",)) == {"p", "r"}


def test_a_unit_counts_as_low_once_what_reads_it_has_joined() -> None:
    text = """
n = Exp(x)
a = MatMul(x, x)
b = Reshape(a, [2048, 2048])
c = {reader}
d = Sigmoid(c)
e = Exp(d)
f = Sigmoid(n)
g = Tanh(f)
h = Tanh(g)
i = Exp(h)
"""
    assert low(text.format(reader="Mul(b, n)"), units=("n",)) == set("abcdfgh")
    assert low(text.format(reader="Mul(b, b)"), units=("n",)) == set("abcd")


BEHIND_CLEAR = """
a = MatMul(x, x)
c = Reshape(a, [2048, 2048])
r = {joined}
s = Reshape(r, [4096, 1024])
t = {behind}
u = Reshape(t, [2048, 2048])
z = Exp(u)
"""


@pytest.mark.parametrize(
    ("joined", "behind"),
    [("Sigmoid(c)", "Tanh(s)"), ("AddV2(c, y)", "Tanh(s)"), ("AddV2(c, y)", "Neg(s)")],
)
def test_what_saves_no_cast_leaves_in_any_order_of_the_nodes(joined: str, behind: str) -> None:
    graph_def = graph(INPUTS + BEHIND_CLEAR.format(joined=joined, behind=behind))
    for nodes in (graph_def.node, reversed(graph_def.node)):
        found = reasons(graph_pb2.GraphDef(node=nodes, versions=graph_def.versions), UNWEIGHED)
        assert {name for name, reason in found.items() if reason is None} == {"a", "c"}
        assert [found[node] for node in "rstu"] == [Reason.NO_ALLOW_NEAR] * 4


def test_a_preserved_read_of_a_variable_is_called_preserved() -> None:
    text = "v = VariableV2(dtype=float32, shape=[8, 8])\nread = Identity(v)\na = MatMul(read, read)"
    assert reasons(text)["read"] is Reason.READS_VARIABLE
    assert reasons(text, preserve=("read",))["read"] is Reason.PRESERVED


@pytest.mark.parametrize(
    ("readers", "preserve", "is_low"),
    [
        ("a = MatMul(c, x)", (), True),
        ("a = MatMul(c, x)", ("c",), False),
        ("a = MatMul(c, x)\nb = Sin(c)", (), False),
        ("a = MatMul(x, x)", (), False),
    ],
)
def test_a_cast_makes_the_target_dtype_where_nothing_else_reads_it(
    readers: str, preserve: tuple[str, ...], is_low: bool
) -> None:
    text = f"n = Placeholder(dtype=int32, shape=[2048, 2048])\nc = Cast(n, DstT=float32)\n{readers}"
    found = reasons(text, preserve=preserve)
    assert found["a"] is None
    assert (found["c"] is None) == is_low


@pytest.mark.parametrize(
    ("dtype", "after", "is_low"),
    [("float16", "", True), ("float16", ", after=[x]", False), ("int32", ", after=[x]", True)],
)
def test_a_cast_that_waits_does_not_come_to_change_nothing(
    dtype: str, after: str, is_low: bool
) -> None:
    text = f"n = Placeholder(dtype={dtype}, shape=[2048, 2048])\nc = Cast(n, DstT=float32{after})\n"
    assert (reasons(text + "a = MatMul(c, x)")["c"] is None) == is_low
    assert reasons(text + "a = MatMul(c, x)", PARITY)["c"] is None
