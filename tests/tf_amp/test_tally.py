"""Counts over graphs."""

from __future__ import annotations

import dataclasses

from tensorflow.core.framework import graph_pb2, types_pb2

from graph_passes import PrecisionConfig, RewriteResult, rewrite_graph_def
from tf_amp.tally import NodeCounts, Tally

CONFIG = PrecisionConfig(target_dtype="bfloat16", device="CPU")


def product_graph(products: int = 1) -> graph_pb2.GraphDef:
    """A chain of matrix products behind a placeholder."""
    graph = graph_pb2.GraphDef()
    given = graph.node.add(name="given", op="Placeholder")
    given.attr["dtype"].type = types_pb2.DT_FLOAT
    for number in range(products):
        last = graph.node[-1].name
        product = graph.node.add(name=f"product{number}", op="MatMul", input=[last, last])
        product.attr["T"].type = types_pb2.DT_FLOAT
    return graph


def converted(products: int = 1) -> RewriteResult:
    result = rewrite_graph_def(product_graph(products), CONFIG)
    assert result.changed
    return result


def unchanged() -> RewriteResult:
    return rewrite_graph_def(graph_pb2.GraphDef(), CONFIG)


def failed() -> RewriteResult:
    result = converted()
    return dataclasses.replace(
        result, proto=product_graph(), changed=False, failure="planted", rejected=result.proto
    )


def test_counts_of_a_report() -> None:
    counts = NodeCounts.of(converted(2).report)
    assert (counts.total, counts.converted, counts.allow, counts.deny) == (3, 2, 2, 0)
    assert counts.casts == 1


def test_line_names_every_count() -> None:
    line = NodeCounts(1130, 475, 38, 12, 4, 7).line("one_step_on_data", "bfloat16")
    assert line == (
        "Converted 475/1130 nodes of 'one_step_on_data' to bfloat16 using 38 casts "
        "(12 allow, 4 deny, 7 blocked by denied nodes)"
    )


def test_counts_add_up() -> None:
    total = NodeCounts(1, 2, 3, 4, 5, 6) + NodeCounts(10, 20, 30, 40, 50, 60)
    assert total == NodeCounts(11, 22, 33, 44, 55, 66)


def test_tally_of_all_outcomes() -> None:
    tally = Tally()
    tally.add("a", converted())
    tally.add("b", unchanged())
    tally.add("c", failed())
    assert tally.add_fault("d", "RuntimeError: planted")
    assert not tally.add_fault("e", "RuntimeError: planted again")
    found = tally.as_dict()
    assert (found["graphs_seen"], found["graphs_rewritten"], found["graphs_failed"]) == (5, 1, 3)
    assert (found["nodes_total"], found["nodes_converted"]) == (2, 1)
    assert (tally.rewritten, tally.failed) == (1, 3)


def test_reason_for_nothing_is_that_of_the_largest_graph() -> None:
    tally = Tally()
    assert "no function was traced" in tally.why_nothing()
    tally.add("small", unchanged())
    tally.add("large", failed())
    tally.add("small again", unchanged())
    assert "'large': planted" in tally.why_nothing()


def test_what_was_converted_alone_has_no_nodes_looked_at() -> None:
    assert NodeCounts(1, 2, 3, 4, 5, 6).converted_alone() == NodeCounts(0, 2, 3, 4, 0, 0)
