"""The gradient half of normalizations, found by what it computes."""

from __future__ import annotations

import pytest
from norm_networks import NORMS, token_network
from tensorflow.core.framework import graph_pb2
from training_steps import Step, trace

from graph_passes.ir.view import view_body
from graph_passes.rewriter.editor import GraphEdits
from graph_passes.units.normalization.norms import FoundNorm, find_norms


def norms_of(
    step: Step, graph_def: graph_pb2.GraphDef | None = None
) -> tuple[GraphEdits, list[FoundNorm]]:
    edits = GraphEdits(view_body(graph_def or step.graph_def, step.shapes))
    return edits, find_norms(edits)


def changed(step: Step) -> graph_pb2.GraphDef:
    return graph_pb2.GraphDef.FromString(step.graph_def.SerializeToString())


@pytest.fixture(scope="module")
def layer() -> Step:
    return trace(token_network("layer"), 8)


@pytest.mark.parametrize("batch", [8, None])
@pytest.mark.parametrize("name", NORMS)
def test_every_form_is_found_and_proved(name: str, batch: int | None) -> None:
    edits, found = norms_of(trace(token_network(name), batch))
    assert len(found) == 3
    assert not edits.misses
    m = edits.matcher
    for norm in found:
        forward, gradient = norm.forward, norm.gradient
        assert forward.is_centred is not name.startswith("rms")
        assert (forward.gamma is None) is ("no scale" in name or "plain" in name)
        assert gradient is not None
        assert gradient.is_proved
        assert gradient.dx is not None
        ops = {m.op(number) for number in gradient.nodes}
        assert "RsqrtGrad" in ops
        assert not ops & {"MatMul", "ReluGrad", "BiasAddGrad", "Shape", "AssignSubVariableOp"}
        assert m.maker(gradient.dy) not in norm.inside


def test_other_terms_of_the_sum_are_left_outside(layer: Step) -> None:
    """One normalization reads what a residual sum reads too."""
    edits, found = norms_of(layer)
    outside = []
    for norm in found:  # in the order of their names, which depends on what was traced before
        gradient = norm.gradient
        assert gradient is not None and gradient.dx is not None
        others = set(edits.matcher.inputs(gradient.dx)) - set(gradient.dx_terms)
        assert gradient.nodes.isdisjoint(map(edits.matcher.maker, others))
        outside.append(len(others))
    assert sorted(outside) == [0, 0, 1]


def test_a_forward_graph_has_no_gradient(layer: Step) -> None:
    graph_def = graph_pb2.GraphDef()
    end = next(i for i, node in enumerate(layer.graph_def.node) if "gradient_tape" in node.name)
    graph_def.node.extend(layer.graph_def.node[:end])
    assert [norm.gradient for norm in norms_of(layer, graph_def)[1]] == [None] * 3


@pytest.mark.parametrize(("op", "other"), [("Neg", "Identity"), ("Sub", "AddV2")])
def test_a_gradient_that_computes_something_else_is_noticed(
    layer: Step, op: str, other: str
) -> None:
    graph_def = changed(layer)
    for node in graph_def.node:
        if node.op == op and "layer_norm" in node.name and "gradient_tape" in node.name:
            node.op = other
    edits, found = norms_of(layer, graph_def)
    assert len(found) + len(edits.misses) == 3
    assert all(norm.gradient is None or norm.gradient.dx is None for norm in found)


def test_a_wrong_count_is_noticed(layer: Step) -> None:
    graph_def = changed(layer)
    for node in graph_def.node:
        value = node.attr["value"].tensor
        if node.op == "Const" and list(value.float_val) == [16.0]:
            value.float_val[:] = [15.0]
    edits, found = norms_of(layer, graph_def)
    assert len(found) + len(edits.misses) == 3
    assert all(norm.gradient is None or norm.gradient.dx is None for norm in found)


def test_unknown_shapes_prove_nothing(layer: Step) -> None:
    edits = GraphEdits(view_body(layer.graph_def))
    found = find_norms(edits)
    assert not any(norm.gradient is not None and norm.gradient.is_proved for norm in found)
