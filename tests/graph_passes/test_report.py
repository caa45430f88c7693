from __future__ import annotations

from collections import Counter

import pytest
from decisions import decisions_of, reasons_of
from graph_text import graph

from graph_passes import ListEdit, PrecisionConfig, Reason, Rule, rewrite_graph_def

TEXT = """
x = Const(0.5, [8, 8])
w = VarHandleOp(dtype=float32, shape=[8, 8])
read = ReadVariableOp(w, dtype=float32)
deny1 = Exp(x)
clear1 = Relu(deny1)
infer1 = Tanh(clear1)
allow1 = MatMul(infer1, read)
infer2 = Tanh(allow1)
allow2 = MatMul(infer2, read)
far = Sqrt(x) @ "/device:CPU:0"
sin = Zeta(x, x)
out = Identity(allow2)
"""


def report():
    return rewrite_graph_def(graph(TEXT), PrecisionConfig(), preserve=("out",)).report


def test_counts() -> None:
    found = report()
    assert (found.target_dtype, found.device, found.total_nodes) == ("float16", "GPU", 12)
    counts = found.converted_nodes, found.casts_to_low, found.casts_to_float32
    assert counts == (3, 2, 1)
    # All but the preserved and the distant node; four of them are on no list.
    assert found.eligible_nodes == 10


def test_products_are_counted_by_op_and_reason() -> None:
    assert report().products == {("MatMul", Reason.ALLOW_LIST): 2}
    preserved = rewrite_graph_def(graph(TEXT), PrecisionConfig(), preserve=("allow1",)).report
    assert preserved.products == {
        ("MatMul", Reason.ALLOW_LIST): 1,
        ("MatMul", Reason.PRESERVED): 1,
    }
    idle = rewrite_graph_def(graph("x = Const(0.5, [8])\ny = Relu(x)"), PrecisionConfig()).report
    assert not idle.products


NETWORK = """
x = Placeholder(dtype=float32, shape=[8, 8, 8, 8])
w = Const(0.5, [1, 1, 8, 8])
first = Conv2D(x, w, strides=[1, 1, 1, 1], padding="SAME")
rows = Reshape(first, [64, 64])
second = MatMul(rows, rows)
out = Identity(second)
"""


@pytest.mark.parametrize("others", [(), ("Conv2D",)])
@pytest.mark.parametrize(
    ("list_name", "action", "reason"),
    [
        ("deny", "add", Reason.DENY_LIST),
        ("infer", "add", None),
        ("allow", "remove", Reason.UNLISTED),
    ],
)
def test_products_that_an_edit_takes_off_the_allow_list_are_still_counted(
    list_name: str, action: str, reason: Reason | None, others: tuple[str, ...]
) -> None:
    edits = [ListEdit(list_name=list_name, action=action, op=op) for op in ("MatMul", *others)]
    found = rewrite_graph_def(graph(NETWORK), PrecisionConfig(list_edits=tuple(edits))).report
    assert Counter(op for op, _ in found.products.elements()) == {"MatMul": 1, "Conv2D": 1}
    if reason is not None:
        assert found.products["MatMul", reason] == 1
    for products_only in (False, True):
        remarks = found.remarks(products_only=products_only).remarks
        assert {r.op for r in remarks if r.is_product} == {"MatMul", "Conv2D"}


def test_a_product_that_a_rule_denies_is_still_counted() -> None:
    rule = Rule(action="deny", node="second", origin="r.toml [1]", why="so")
    found = rewrite_graph_def(graph(NETWORK), PrecisionConfig(rules=(rule,))).report
    assert found.products["MatMul", Reason.DENY_LIST] == 1


def test_code_that_another_compiler_made_is_counted_as_a_product_in_float32() -> None:
    text = """
x = Const(0.5, [8, 8])
made = XlaCallModule(x, module="", Sout=[[8, 8]], Tout=[float32], version=9)
out = Identity(made)
"""
    found = rewrite_graph_def(graph(text), PrecisionConfig()).report
    assert found.products == {("XlaCallModule", Reason.RUNS_FUNCTION): 1}


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ("allow1", Reason.ALLOW_LIST),
        ("infer2", Reason.BETWEEN_ALLOW),
        ("deny1", Reason.DENY_LIST),
        ("clear1", Reason.BEHIND_DENY),
        ("infer1", Reason.BEHIND_DENY),
        ("far", Reason.OTHER_DEVICE),
        ("out", Reason.PRESERVED),
        ("read", Reason.UNLISTED),
    ],
)
def test_each_slot_has_one_reason(node: str, reason: Reason) -> None:
    (decision,) = [d for d in decisions_of(report()) if d.node == node]
    assert decision.reason is reason
    assert decision.converted == reason.converts


def test_path_leads_from_the_deny_op() -> None:
    (decision,) = [d for d in decisions_of(report()) if d.node == "infer1"]
    assert decision.path == ("deny1", "clear1", "infer1")
    assert (
        reasons_of(report())["infer1"] == "behind an op of the deny list: deny1 -> clear1 -> infer1"
    )


def test_only_what_a_denied_op_reaches_has_a_path() -> None:
    with_path = {d.node for d in decisions_of(report()) if d.path}
    assert with_path == {"clear1", "infer1"}


def test_of_a_graph_that_was_left_alone() -> None:
    found = rewrite_graph_def(graph("x = Const(0.5, [4])\ny = Sin(x)"), PrecisionConfig()).report
    assert found.summary() == "converted 0/2 nodes to float16 with 0 casts"
    assert found.eligible_nodes == 2


@pytest.mark.parametrize("op", ["Sin", "MatMul"])
def test_of_an_invalid_graph(op: str) -> None:
    graph_def = graph(f"x = Const(0.5, [4])\ny = {op}({'x, x' if op == 'MatMul' else 'x'})")
    graph_def.node[1].input[0] = "nothing"
    found = rewrite_graph_def(graph_def, PrecisionConfig()).report
    assert (found.eligible_nodes, decisions_of(found)) == (0, ())


def test_summary_is_one_line_with_the_counts() -> None:
    assert report().summary() == "converted 3/12 nodes to float16 with 3 casts"


def test_every_reason_has_a_text() -> None:
    assert len({reason.text for reason in Reason}) == len(Reason)


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("x = Const(0.5, [4])\ny = Sin(x)\nz = Sin(y)", "float32 ops seen: Sin x2"),
        (
            "x = Placeholder(dtype=float64, shape=[4, 4])\ny = MatMul(x, x)\nz = Tanh(y)",
            "MatMul x1, of the allow list: in float64, and only float32 is converted",
        ),
        (
            "x = Placeholder(dtype=float16, shape=[4, 4])\ny = MatMul(x, x)\nz = Tanh(y)",
            "MatMul x1, of the allow list: the program itself has it in float16",
        ),
        ("n = Const(1, [4])\nm = AddV2(n, n)", "no node has a float32 type attribute"),
    ],
)
def test_why_nothing_was_converted(text: str, phrase: str) -> None:
    assert phrase in rewrite_graph_def(graph(text), PrecisionConfig()).report.first_reason()


def test_why_an_op_of_the_allow_list_was_not_converted() -> None:
    text = "x = Const(0.5, [8, 8])\ny = Zeta(x, x)\nz = MatMul(y, y)"
    found = rewrite_graph_def(graph(text), PrecisionConfig(), preserve=("z",)).report
    assert found.first_reason() == (
        "MatMul x1, of the allow list: fed, fetched or otherwise to be preserved"
    )
    edit = ListEdit(list_name="allow", action="add", op="MatrixSquareRoot")
    no_kernel = PrecisionConfig(list_edits=(edit,))
    text = "x = Const(0.5, [8, 8])\ny = MatrixSquareRoot(x)"
    found = rewrite_graph_def(graph(text), no_kernel).report
    assert found.first_reason() == "no GPU kernel in float16 for MatrixSquareRoot x1"


def test_remarks_say_what_the_counts_say() -> None:
    found = report()
    remarks = found.remarks("step").remarks
    kinds = Counter(remark.kind for remark in remarks)
    assert kinds["converted"] == found.converted_nodes  # one type attribute each
    assert kinds["cast"] == found.casts_to_low + found.casts_to_float32
    assert sum(remark.is_product for remark in remarks) == sum(found.products.values())
    assert {r.rule for r in remarks if r.kind == "cast"} == {"to_target", "to_float32"}


def test_a_remark_tells_what_blocks_and_what_it_costs() -> None:
    shapes = {"infer1": [(8, None)], "allow1": [(8, 16)], "deny1": [(8, 8)]}
    result = rewrite_graph_def(
        graph(TEXT),
        PrecisionConfig(unknown_dimension=4),
        preserve=("out",),
        shapes=lambda name: shapes.get(name, ()),
    )
    lines = {"infer1": ("model.py:7",)}
    found = result.report.remarks(lines=lambda _, node: lines.get(node, ()))
    by_node = {remark.node: remark for remark in found.remarks}
    blocked = by_node["infer1"]
    assert (blocked.kind, blocked.rule, blocked.blocked_by) == ("kept", "behind_deny", "Exp")
    assert blocked.path == ("deny1", "clear1", "infer1")
    assert (blocked.shapes, blocked.lines) == (((8, None),), ("model.py:7",))
    assert by_node["allow1"].flops == 2 * 8 * 16 * 4
    assert by_node["infer2"].flops is None
    cast = by_node["infer1-0-CastToFp16-0-AutoMixedPrecision"]
    assert (cast.bytes, cast.lines) == (6 * 8 * 4, ("model.py:7",))
