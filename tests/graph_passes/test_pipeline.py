"""Stages on one graph: what units say of single nodes reaches the colours."""

from __future__ import annotations

import pytest
from graph_text import graph

from graph_passes import PrecisionConfig, Reason
from graph_passes.ir.view import view_body
from graph_passes.pipeline import STAGES, paint
from graph_passes.policy.config import RULES
from graph_passes.policy.op_lists import FLOAT32

TEXT = """
w = Const(0.5, [8, 8])
a = MatMul(w, w)
b = Exp(a)
c = Reshape(b, [64])
d = Reshape(c, [8, 8])
e = AddV2(d, a)
f = MatMul(e, w)
"""


def reasons(
    node_lists: dict[str, str], text: str = TEXT, config: PrecisionConfig | None = None
) -> dict[str, Reason | None]:
    """The reason of each float32 node, None for a converted one."""
    view = view_body(graph(text))
    coloring = paint(view, config or PrecisionConfig(device="GPU"), (), node_lists)
    floats = [vertex for vertex in range(1, len(view.dtypes)) if view.is_float[vertex]]
    return {
        view.node_of(v).name: None
        if coloring.low[v]
        else Reason(coloring.why[v] or Reason.UNLISTED)
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


UNWEIGHED = PrecisionConfig(device="GPU", disabled_rules=frozenset(("cast-cut",)))

BEHIND_CLEAR = """
w = Const(0.5, [8, 8])
v = Const(0.5, [16])
x = Const(0.5, [4, 16])
e = Exp(x)
a = MatMul(w, w)
b = MatMul(w, w)
c = Reshape(a, [4, 16])
d = Reshape(b, [4, 16])
r = {joined}
s = Reshape(r, [64])
t = Exp(s)
"""


@pytest.mark.parametrize(
    ("joined", "is_low"),
    [
        ("AddV2(c, d)", True),
        ("AddN(c, d, x)", True),
        ("AddN(c, d, e)", False),
        ("BiasAdd(c, v)", False),
        ("Mul(c, x)", False),
    ],
)
def test_an_infer_op_behind_clear_ops_joins_where_that_saves_a_cast(joined, is_low) -> None:
    text = BEHIND_CLEAR.format(joined=joined)
    assert (reasons({}, text, UNWEIGHED)["r"] is None) is is_low
    parity = PrecisionConfig(device="GPU", parity=True)
    assert reasons({}, text, parity)["r"] is not None


def test_a_chain_that_only_moves_a_cast_leaves_as_a_whole() -> None:
    text = BEHIND_CLEAR.format(joined="BiasAdd(c, v)").replace("Exp(s)", "Mul(s, 2.0)")
    found = reasons({}, text + "u = Reshape(t, [64])\nz = Exp(u)", UNWEIGHED)
    assert [found[node] for node in "rst"] == [Reason.NO_ALLOW_NEAR] * 3


def test_a_chain_on_the_way_to_a_converted_op_joins_as_a_whole() -> None:
    text = BEHIND_CLEAR.format(joined="Sigmoid(c)").replace("Exp(s)", "Mul(s, s)")
    low = reasons({}, text + "u = Reshape(t, [8, 8])\nz = AddV2(u, a)")
    assert [low[node] for node in "rstuz"] == [None] * 5


CONFIGS = [
    PrecisionConfig(target_dtype=dtype, device=device, parity=parity, disabled_rules=off)
    for dtype, device in (("float16", "GPU"), ("bfloat16", "CPU"))
    for parity in (False, True)
    for off in (frozenset(), frozenset(("cast-cut",)), frozenset(RULES))
]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_stage_comes_behind_what_it_requires(config: PrecisionConfig) -> None:
    ensured: set[str] = set()
    for stage in STAGES:
        if stage.applies(config):
            assert set(stage.requires) <= ensured, stage.name
            ensured.update(stage.ensures)


def test_every_stage_has_a_name_of_its_own_that_switches_it_off() -> None:
    names = [stage.name for stage in STAGES]
    assert len(set(names)) == len(names)
    for stage in STAGES:
        if stage.name in RULES:
            off = PrecisionConfig(disabled_rules=frozenset((stage.name,)))
            assert not stage.applies(off)
