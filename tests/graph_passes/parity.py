"""One check for every graph: parity mode against the oracle and against the post-conditions."""

from __future__ import annotations

import graph_checks
from graph_diff import added, differences, retyped
from graph_text import lines
from oracle import Oracle, meta_graph
from tensorflow.core.framework import graph_pb2

from graph_passes import PrecisionConfig, RewriteResult, rewrite_graph_def


def parity_config(oracle: Oracle) -> PrecisionConfig:
    """The configuration that plans as the oracle of a mode does."""
    mode = oracle.mode
    return PrecisionConfig(target_dtype=mode.target_dtype, device=mode.device, parity=True)


def assert_parity(
    oracle: Oracle, graph_def: graph_pb2.GraphDef, fetches: tuple[str, ...]
) -> RewriteResult:
    """Asserts that parity mode makes the oracle's graph: slots, Casts, wiring, names, devices."""
    theirs = oracle.rewrite(meta_graph(graph_def, fetches))
    result = rewrite_graph_def(graph_def, parity_config(oracle), preserve=fetches)
    assert result.failure is None
    found = differences(result.proto, theirs)
    assert not found, "\n".join([*found, "graph:", lines(graph_def)])
    assert result.changed == bool(retyped(graph_def, theirs) or added(graph_def, theirs))
    graph_checks.check(graph_def, result.proto, device=oracle.mode.device, preserve=fetches)
    return result


def converted(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef) -> set[str]:
    """The nodes of the main graph that have a type attribute in another dtype."""
    return {slot.node for slot in retyped(before, after) if not slot.function}
