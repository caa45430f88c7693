"""Counts over graphs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from tensorflow.core.framework import graph_pb2, types_pb2

from graph_passes import PrecisionConfig, Reason, RewriteResult, rewrite_graph_def
from graph_passes.policy.config import PAY_IN_FLOAT32
from tf_amp.tally import NodeCounts, Tally

CONFIG = PrecisionConfig(target_dtype="bfloat16", device="CPU")


def product_graph(products: int = 1, dtype: int = types_pb2.DT_FLOAT) -> graph_pb2.GraphDef:
    """A chain of matrix products behind a placeholder."""
    graph = graph_pb2.GraphDef()
    given = graph.node.add(name="given", op="Placeholder")
    given.attr["dtype"].type = dtype
    for number in range(products):
        last = graph.node[-1].name
        product = graph.node.add(name=f"product{number}", op="MatMul", input=[last, last])
        product.attr["T"].type = dtype
    return graph


def converted(products: int = 1) -> RewriteResult:
    result = rewrite_graph_def(product_graph(products), CONFIG)
    assert result.changed
    return result


def unchanged() -> RewriteResult:
    return rewrite_graph_def(graph_pb2.GraphDef(), CONFIG)


def converted_to_nothing(nodes: int) -> RewriteResult:
    graph = graph_pb2.GraphDef()
    graph.node.add(name="given", op="Placeholder").attr["dtype"].type = types_pb2.DT_FLOAT
    for number in range(nodes):
        shape = graph.node.add(name=f"shape{number}", op="Shape", input=["given"])
        shape.attr["T"].type = types_pb2.DT_FLOAT
    return rewrite_graph_def(graph, CONFIG)


def failed() -> RewriteResult:
    result = converted()
    return dataclasses.replace(
        result, proto=product_graph(), changed=False, failure="planted", rejected=result.proto
    )


MATMUL, KEPT = ("MatMul", Reason.ALLOW_LIST), ("MatMul", Reason.SLOWER_HERE)


def test_a_plan_that_converts_nothing_takes_the_place_of_one_that_does() -> None:
    tally = Tally()
    before, after = converted(), unchanged()
    counts = NodeCounts.of(before.report)
    tally.add("step", before, counts)
    assert tally.as_dict()["nodes_converted"] == 1
    tally.add("step, sizes near 2", after, NodeCounts.of(after.report), [counts])
    found = tally.as_dict()
    assert (found["nodes_total"], found["nodes_converted"], found["casts"]) == (0, 0, 0)


def test_counts_of_a_report() -> None:
    counts = NodeCounts.of(converted(2).report)
    assert (counts.total, counts.converted, counts.casts) == (3, 2, 1)
    assert counts.products == {MATMUL: 2}
    assert NodeCounts.of(unchanged().report).products == {}


@pytest.mark.parametrize(
    ("products", "said"),
    [
        (
            {MATMUL: 9, ("Conv2D", Reason.ALLOW_LIST): 4, KEPT: 2},
            "MatMul 9 of 11, Conv2D 4 of 4 in low, 3 casts; 2 MatMul stay float32: slower here",
        ),
        (
            {MATMUL: 1, ("Add", Reason.QUANTIZED): 1},
            "MatMul 1 of 1, Add 0 of 1 in low, 3 casts; 1 Add stays float32: a quantized op",
        ),
        ({KEPT: 3}, "MatMul 0 of 3 in low, 3 casts; 3 MatMul stay float32: slower here"),
        ({}, "475 nodes in low, 3 casts"),
    ],
)
def test_line_names_products_first_and_what_keeps_them(products: Any, said: str) -> None:
    line = NodeCounts(1130, 475, 3, Counter(products)).line("train_step", "low")
    assert line == f"train_step: {said}"


def test_counts_add_up() -> None:
    one, other = (
        NodeCounts(1, 2, 3, Counter({MATMUL: 1})),
        NodeCounts(10, 20, 30, Counter({KEPT: 2})),
    )
    assert one + other == NodeCounts(11, 22, 33, Counter({MATMUL: 1, KEPT: 2}))


def add(tally: Tally, name: str, result: RewriteResult, **options: Any) -> NodeCounts:
    counts = NodeCounts.of(result.report)
    tally.add(name, result, counts, **options)
    return counts


def test_tally_of_all_outcomes() -> None:
    tally = Tally()
    add(tally, "a", converted())
    add(tally, "b", unchanged())
    add(tally, "c", failed())
    assert tally.add_fault("d", "RuntimeError: planted")
    assert not tally.add_fault("e", "RuntimeError: planted again")
    found = tally.as_dict()
    assert (found["graphs_seen"], found["graphs_rewritten"], found["graphs_failed"]) == (5, 1, 3)
    assert (tally.rewritten, tally.failed) == (1, 3)


def test_what_is_part_of_a_later_graph_counts_once() -> None:
    tally = Tally()
    callee = add(tally, "callee", converted(1))
    idle = add(tally, "idle", unchanged())
    add(tally, "caller", converted(3), covered=[callee, idle])
    found = tally.as_dict()
    assert (found["nodes_total"], found["nodes_converted"], found["casts"]) == (4, 3, 1)
    assert found["graphs_rewritten"] == 2


def test_functions_have_a_row_each_but_for_parts_of_others() -> None:
    tally = Tally()
    callee = add(tally, "callee", converted(1))
    add(tally, "idle", unchanged())
    add(tally, "inner", converted(1), is_top=False)
    add(tally, "caller", converted(3), covered=[callee])
    (row,) = tally.as_dict()["functions"]
    assert (row.name, row.casts) == ("caller", 1)
    for number in range(200):
        add(tally, f"more {number}", converted(1))
    assert len(tally.as_dict()["functions"]) == 100


def test_row_of_a_function_says_what_keeps_its_products() -> None:
    counts = NodeCounts(9, 3, 2, Counter({MATMUL: 3, KEPT: 2}))
    row = counts.status("step")
    assert (row.name, row.products, row.products_low, row.casts) == ("step", 5, 3, 2)
    assert row.kept == {"MatMul: slower here": 2}


def test_reason_for_nothing_is_that_of_the_largest_graph() -> None:
    tally = Tally()
    assert "no function ran" in tally.why_nothing()
    add(tally, "small", unchanged())
    add(tally, "large", failed())
    add(tally, "small again", unchanged())
    assert "'large': planted" in tally.why_nothing()


def test_what_is_left_out_tells_more_than_graphs_without_products() -> None:
    tally = Tally()
    add(tally, "initializer", unchanged())
    tally.leave_out("a session runs in float32", 0)
    add(tally, "initializer again", unchanged())
    assert tally.why_nothing() == "no graph was converted: a session runs in float32"
    add(tally, "large", failed())
    assert "'large': planted" in tally.why_nothing()


def test_reason_for_nothing_is_that_of_a_graph_with_products() -> None:
    sums = graph_pb2.GraphDef()
    for number in range(9):
        sums.node.add(name=f"n{number}", op="NoOp")
    tally = Tally()
    add(tally, "products", failed())
    add(tally, "sums", rewrite_graph_def(sums, CONFIG))
    assert "'products': planted" in tally.why_nothing()


@pytest.mark.parametrize(
    ("dtype", "why"),
    [
        (types_pb2.DT_DOUBLE, "in float64, and only float32 is converted"),
        (types_pb2.DT_HALF, "the program itself has it in float16"),
        (types_pb2.DT_BFLOAT16, "the program itself has it in bfloat16"),
    ],
)
def test_reason_for_nothing_is_another_dtype_before_that_of_larger_graphs_without_products(
    dtype: int, why: str
) -> None:
    tally = Tally()
    add(tally, "other", rewrite_graph_def(product_graph(2, dtype), CONFIG))
    add(tally, "of shapes alone", converted_to_nothing(40))
    assert f"'other': MatMul x2, of the allow list: {why}" in tally.why_nothing()
    add(tally, "products", failed())
    assert "'products': planted" in tally.why_nothing()


def test_reason_for_nothing_names_the_products_of_what_a_graph_calls() -> None:
    tally = Tally()
    part = NodeCounts(9, products=Counter({KEPT: 2}))
    tally.add("one_step", unchanged(), part, is_top=False)
    tally.add("many steps (fit)", unchanged(), part + NodeCounts(1))
    assert tally.why_nothing().endswith("'many steps (fit)': 2 MatMul stay float32: slower here")
    add(tally, "of shapes alone", converted_to_nothing(40))
    assert "'many steps (fit)'" in tally.why_nothing()


def test_what_was_converted_alone_has_no_nodes_looked_at() -> None:
    counts = NodeCounts(1, 2, 3, Counter({MATMUL: 1}))
    assert counts.converted_alone() == NodeCounts(0, 2, 3)


def updates(count: int) -> Counter[str]:
    return Counter({"fused-update": count})


def test_what_was_fused_is_counted_and_said() -> None:
    counts = NodeCounts(products=Counter({MATMUL: 1}), fused=updates(1))
    counts += NodeCounts(fused=updates(2))
    assert counts.converted_alone().fused.total() == 3
    assert counts.line("step", "bfloat16").endswith("0 casts, 3 updates fused")
    line = NodeCounts(fused=updates(1)).line("step", "bfloat16")
    assert line.endswith("1 update fused; it has no matrix product or convolution in float32")
    assert NodeCounts(converted=1, casts=1).line("step", "bfloat16").endswith("1 cast")
    both = Counter({"grouped-convolution": 2, "batch-norm": 1})
    assert NodeCounts(fused=both).line("step", None) == (
        "step: 1 batch normalization fused, 2 grouped convolutions without XLA"
    )
    assert NodeCounts(total=3).line("step", None) == "step: nothing fused"


@pytest.mark.parametrize("rule", PAY_IN_FLOAT32)
def test_every_rule_that_pays_in_float32_is_counted(rule: str) -> None:
    report = converted().report
    report.fused = Counter({rule: 2, "ones-product": 1})
    counts = NodeCounts.of(report)
    assert counts.fused.total() == 2
    assert counts.line("step", None).startswith("step: 2 ")


def test_reason_for_nothing_does_not_deny_what_was_fused() -> None:
    tally = Tally()
    counts = NodeCounts(total=9, fused=updates(2))
    tally.add("part", unchanged(), counts, is_top=False)
    tally.add("step", unchanged(), counts + NodeCounts(1), [counts])
    start = "no matrix product or convolution was converted (2 updates fused): the largest graph"
    assert tally.why_nothing().startswith(start)


def test_what_lost_its_trial_is_not_counted() -> None:
    tally = Tally()
    counts = [NodeCounts.of(converted(products).report) for products in (1, 3)]
    for name, each in zip(("kept", "lost"), counts, strict=True):
        tally.add(name, converted(), each)
    tally.take_back("lost", counts[1], changed=True, counted=True)
    found = tally.as_dict()
    rows = {row.name: (row.products, row.products_low, row.casts) for row in found["functions"]}
    assert rows == {"kept": (1, 1, 1), "lost": (3, 0, 0)}
    assert found["functions"][1].kept == {"MatMul: slower here": 3}
    assert (found["graphs_seen"], found["graphs_rewritten"]) == (2, 1)
    assert (found["nodes_total"], found["nodes_converted"]) == (2, 1)
    assert "'lost': in float32 it was faster" in tally.why_nothing()
