"""Proofs that nodes compute layer normalization and its gradient."""

from __future__ import annotations

import pytest
from norm_networks import token_network
from tensorflow.core.framework import graph_pb2
from training_steps import Step, trace

from graph_passes.patterns.edits import GraphEdits
from graph_passes.patterns.layer_norm_algebra import ParameterSums, normalized_size, prove
from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.patterns.norms import find_norms
from graph_passes.view import view_graph

PROVABLE = {
    "layer": (1, 1),
    "layer, no scale": (0, 1),
    "layer, no offset": (1, 0),
    "layer, plain": (0, 0),
    "layer, two axes": (1, 1),
    "layer, tf.nn": (1, 1),
    "layer, centred": (1, 1),
}
"""Forms, and how many sums there are behind the gradients of scale and offset."""


def proofs(
    step: Step, graph_def: graph_pb2.GraphDef | None = None
) -> tuple[Matcher, list[ParameterSums]]:
    view = view_graph(graph_def or step.graph_def, step.shapes)
    matcher, edits = Matcher(view), GraphEdits(view)
    norms = find_norms(edits, matcher)
    assert len(norms) == 3
    return matcher, [prove(matcher, norm.forward, norm.gradient) for norm in norms]


@pytest.mark.parametrize("batch", [8, None])
@pytest.mark.parametrize("name", PROVABLE)
def test_every_form_of_layer_normalization_is_proved(name: str, batch: int | None) -> None:
    matcher, found = proofs(trace(token_network(name), batch))
    scales, offsets = PROVABLE[name]
    for sums in found:
        assert len(sums.gamma) == scales
        assert len(sums.beta) >= offsets
        assert {matcher.op(number) for number in (*sums.gamma, *sums.beta)} <= {"Sum"}


@pytest.mark.parametrize(
    ("name", "why"),
    [("group", "last axes"), ("rms", "not x . scale"), ("group, channels first", "other axes")],
)
def test_other_normalizations_are_not(name: str, why: str) -> None:
    with pytest.raises(NoMatchError, match=why):
        proofs(trace(token_network(name), 8))


def test_unknown_shapes_prove_nothing() -> None:
    step = trace(token_network("layer"), 8)
    view = view_graph(step.graph_def)
    matcher = Matcher(view)
    with pytest.raises(NoMatchError, match="is not known"):
        normalized_size(matcher, find_norms(GraphEdits(view), matcher)[0].forward)


@pytest.mark.parametrize(("op", "other"), [("Neg", "Identity"), ("Sub", "AddV2")])
def test_a_gradient_that_computes_something_else_is_noticed(op: str, other: str) -> None:
    step = trace(token_network("layer"), 8)
    graph_def = graph_pb2.GraphDef.FromString(step.graph_def.SerializeToString())
    for node in graph_def.node:
        if node.op == op and "layer_norm" in node.name and "gradient_tape" in node.name:
            node.op = other
    with pytest.raises(NoMatchError, match="what flows back is not"):
        proofs(step, graph_def)


def test_a_wrong_count_is_noticed() -> None:
    step = trace(token_network("layer"), 8)
    graph_def = graph_pb2.GraphDef.FromString(step.graph_def.SerializeToString())
    for node in graph_def.node:
        value = node.attr["value"].tensor
        if node.op == "Const" and list(value.float_val) == [16.0]:
            value.float_val[:] = [15.0]
    with pytest.raises(NoMatchError, match="not divided by the number"):
        proofs(step, graph_def)
