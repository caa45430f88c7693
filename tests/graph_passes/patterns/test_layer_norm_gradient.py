"""The gradient half of layer, group and root-mean-square normalization."""

from __future__ import annotations

import keras
import pytest
from keras import layers
from norm_networks import NORMS, token_network
from tensorflow.core.framework import graph_pb2
from training_steps import Step, trace

from graph_passes.patterns.layer_norm import Norm, find_norm
from graph_passes.patterns.layer_norm_gradient import NormGradient, find_gradient
from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.view import view_graph

Halves = list[tuple[Norm, NormGradient | None]]


def halves_of(step: Step, graph_def: graph_pb2.GraphDef | None = None) -> tuple[Matcher, Halves]:
    matcher = Matcher(view_graph(graph_def or step.graph_def, step.shapes))
    numbers = [n for n, node in enumerate(matcher.view.nodes) if node.op == "Rsqrt"]
    norms = [find_norm(matcher, number) for number in numbers]
    return matcher, [(norm, find_gradient(matcher, norm)) for norm in norms if norm is not None]


@pytest.mark.parametrize("batch", [8, None])
@pytest.mark.parametrize("name", NORMS)
def test_the_gradient_of_every_form_is_found(name: str, batch: int | None) -> None:
    matcher, found = halves_of(trace(token_network(name), batch))
    assert len(found) == 3
    for norm, gradient in found:
        assert gradient is not None
        assert gradient.dx_sum is not None
        ops = {matcher.op(number) for number in gradient.nodes}
        assert "RsqrtGrad" in ops
        assert not ops & {"MatMul", "ReluGrad", "BiasAddGrad", "Shape", "AssignSubVariableOp"}
        makers = {matcher.maker(tensor) for tensor in gradient.dx_terms}
        assert len(makers) >= 2
        assert makers <= gradient.nodes
        assert matcher.maker(gradient.dy) not in gradient.nodes | norm.nodes


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_a_gelu_behind_it_is_outside(name: str, approximate: bool) -> None:
    """The exact one reads y by a Neg, forward from TensorFlow 2.20 on and backward before."""

    def build() -> keras.Model:
        inputs = keras.Input((6, 8))
        y = NORMS[name]()(layers.Dense(16)(inputs))
        y = layers.Dense(3)(keras.activations.gelu(y, approximate=approximate))
        return keras.Model(inputs, layers.GlobalAveragePooling1D()(y))

    matcher, ((norm, gradient),) = halves_of(trace(build, 8))
    assert matcher.op(norm.output) in ("AddV2", "Mul")
    assert gradient is not None
    assert gradient.dx_sum is not None
    inside = norm.nodes | gradient.nodes
    assert matcher.maker(gradient.dy) not in inside
    assert not [matcher.node(n).name for n in inside if "/Gelu/" in matcher.node(n).name]


@pytest.mark.parametrize("batch", [8, None])
def test_nothing_outside_reads_the_inside(batch: int | None) -> None:
    """But for sums that are the gradients of gamma and beta, and what asks for shapes."""
    matcher, found = halves_of(trace(token_network("layer"), batch))
    for norm, gradient in found:
        assert gradient is not None
        inside = norm.nodes | gradient.nodes
        for number in inside - {norm.output, gradient.dx_sum}:
            outside = {matcher.op(n) for n in matcher.readers(number) if n not in inside}
            assert outside <= {"Sum", "Shape", "Reshape"}


def test_other_terms_of_the_sum_are_left_outside() -> None:
    """The first normalization reads what a residual sum reads too."""
    matcher, found = halves_of(trace(token_network("layer"), 8))
    gradient = found[0][1]
    assert gradient is not None and gradient.dx_sum is not None
    others = set(matcher.inputs(gradient.dx_sum)) - set(gradient.dx_terms)
    assert len(others) == 1
    assert matcher.maker(others.pop()) not in gradient.nodes


def test_a_forward_graph_has_no_gradient() -> None:
    step = trace(token_network("layer"), 8)
    graph_def = graph_pb2.GraphDef()
    end = next(i for i, node in enumerate(step.graph_def.node) if "gradient_tape" in node.name)
    graph_def.node.extend(step.graph_def.node[:end])
    _, found = halves_of(step, graph_def)
    assert [gradient for _, gradient in found] == [None] * 3


def test_two_gradients_are_a_near_miss() -> None:
    step = trace(token_network("layer"), 8)
    graph_def = graph_pb2.GraphDef.FromString(step.graph_def.SerializeToString())
    twin = graph_def.node.add()
    twin.CopyFrom(next(node for node in graph_def.node if node.op == "RsqrtGrad"))
    twin.name = "twin"
    with pytest.raises(NoMatchError, match="two gradients"):
        halves_of(step, graph_def)


def test_a_gradient_that_reaches_no_sum_is_a_near_miss() -> None:
    step = trace(token_network("layer"), 8)
    graph_def = graph_pb2.GraphDef.FromString(step.graph_def.SerializeToString())
    for node in graph_def.node:
        if node.op == "RealDiv":
            node.op = "Div"
    with pytest.raises(NoMatchError, match="reaches no sum"):
        halves_of(step, graph_def)
