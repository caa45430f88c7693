"""The forward half of layer, group and root-mean-square normalization."""

from __future__ import annotations

import pytest
from graph_text import graph
from norm_networks import NORMS, token_network
from training_steps import trace

from graph_passes.patterns.layer_norm import Norm, find_norm, is_parameter
from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.view import view_graph

LAYER_NORM = """
weights = Const(0.5, [8, 8])
axes = Const([1])
epsilon = Const(0.001)
gamma = Const(1.0, [8])
beta = Const(0.0, [8])
x = MatMul(weights, weights)
mean = Mean(x, axes)
square = SquaredDifference(x, mean)
variance = Mean(square, axes)
total = AddV2(variance, epsilon)
rsqrt = Rsqrt(total)
scale = Mul(rsqrt, gamma)
product = Mul(x, scale)
shift = Mul(mean, scale)
offset = Sub(beta, shift)
y = AddV2(product, offset)
z = Relu(y)
"""


def norms_of(graph_def, shapes=None) -> tuple[Matcher, list[Norm | None]]:
    matcher = Matcher(view_graph(graph_def, shapes))
    numbers = [n for n, node in enumerate(matcher.view.nodes) if node.op == "Rsqrt"]
    return matcher, [find_norm(matcher, number) for number in numbers]


@pytest.mark.parametrize("batch", [8, None])
@pytest.mark.parametrize("name", NORMS)
def test_every_form_is_found(name: str, batch: int | None) -> None:
    step = trace(token_network(name), batch)
    matcher, found = norms_of(step.graph_def, step.shapes)
    assert len(found) == 3
    for norm in found:
        assert norm is not None
        assert norm.is_centred is not name.startswith("rms")
        assert (norm.gamma is None) is ("no scale" in name or "plain" in name)
        stored_offset = norm.is_centred and "no offset" not in name and "plain" not in name
        assert (norm.beta is not None) is stored_offset
        assert matcher.op(norm.output) in ("AddV2", "Mul")
        inside = {matcher.op(number) for number in norm.nodes}
        assert not inside & {"MatMul", "Relu", "AddN", "RsqrtGrad", "Sum"}


def test_a_written_norm_is_found() -> None:
    matcher, (norm,) = norms_of(graph(LAYER_NORM))
    assert norm is not None
    assert matcher.node(norm.output).name == "y"
    assert (norm.x, norm.gamma, norm.beta, norm.axes) == ("x", "gamma", "beta", (1,))
    assert norm.epsilon == pytest.approx(1e-3)
    inside = "mean square variance total rsqrt scale product shift offset y"
    assert {matcher.node(n).name for n in norm.nodes} == set(inside.split())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("axes = Const([1])", "axes = Const([0])"),
        ("total = AddV2(variance, epsilon)", "total = Mul(variance, epsilon)"),
        ("variance = Mean(square, axes)", "variance = Sum(square, axes)"),
        ("square = SquaredDifference(x, mean)", "square = SquaredDifference(x, weights)"),
    ],
)
def test_other_statistics_are_none(old: str, new: str) -> None:
    assert norms_of(graph(LAYER_NORM.replace(old, new)))[1] == [None]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("product = Mul(x, scale)", "product = Mul(gamma, scale)", "not applied"),
        ("y = AddV2(product, offset)", "y = Exp(product)", "2 nodes"),
        ("scale = Mul(rsqrt, gamma)", "scale = Exp(rsqrt)", "nothing multiplies"),
        (
            "mean = Mean(x, axes)",
            "other = Const([0, 1])\nmean = Mean(x, other)",
            "different axes",
        ),
    ],
)
def test_a_near_miss_says_what_is_amiss(old: str, new: str, why: str) -> None:
    with pytest.raises(NoMatchError, match=why):
        norms_of(graph(LAYER_NORM.replace(old, new)))


def test_a_residual_sum_is_no_offset() -> None:
    text = LAYER_NORM.replace("offset = Sub(beta, shift)", "offset = Neg(shift)")
    text += "sum = AddV2(y, x)\nscaled = Mul(y, epsilon)\n"
    matcher, (norm,) = norms_of(graph(text))
    assert norm is not None
    assert norm.beta is None
    assert matcher.node(norm.output).name == "y"


def test_what_turns_y_around_is_behind_it() -> None:
    matcher, (norm,) = norms_of(
        graph(LAYER_NORM + "turned = Neg(y)\nhalf = Mul(turned, epsilon)\n")
    )
    assert norm is not None
    assert matcher.node(norm.output).name == "y"
    assert "turned" not in {matcher.node(n).name for n in norm.nodes}


def test_what_is_computed_is_no_parameter() -> None:
    matcher = Matcher(view_graph(graph(LAYER_NORM)))
    assert is_parameter(matcher, "gamma")
    assert not is_parameter(matcher, "x")
    assert not is_parameter(matcher, "epsilon")
