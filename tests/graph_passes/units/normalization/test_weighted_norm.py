"""Normalizations of tf_keras whose statistics are weighted by a mask or by ones."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tf_keras
from graph_text import graph
from layer_graphs import (
    CPU,
    GPU,
    OF_PRODUCTS,
    OF_UNIT,
    LayerGraph,
    assert_near,
    inside,
    low_statistics,
    trace_layer,
    whole_numbers,
    wide_casts,
)
from traced_graphs import node_types

from graph_passes import PrecisionConfig
from graph_passes.ir.view import view_body
from graph_passes.rewriter.matcher import Matcher, NoMatchError
from graph_passes.units.normalization.statistics import Statistics, find_statistics

SHAPE = (4, 4, 6, 16)
ROUNDING = {"GPU": 2**-10, "CPU": 2**-7}
"""One rounding of what is summed, and one of the sum of a parameter's gradient."""
MASK = (np.arange(6) < 4).astype(np.float32).reshape(1, 1, 6, 1)

Norm = tf_keras.layers.GroupNormalization
FORMS: dict[str, tuple[Callable[[], object], np.ndarray | None]] = {
    "groups": (lambda: Norm(4), None),
    "one group": (lambda: Norm(1), None),
    "a group a channel": (lambda: Norm(-1), None),
    "no scale": (lambda: Norm(4, scale=False), None),
    "no offset": (lambda: Norm(4, center=False), None),
    "plain": (lambda: Norm(4, scale=False, center=False), None),
    "channels first": (lambda: Norm(2, axis=1), None),
    "masked": (lambda: Norm(4), MASK),
}


@pytest.fixture(scope="module", params=[(name, known) for name in FORMS for known in (True, False)])
def layer(request: pytest.FixtureRequest) -> LayerGraph:
    name, known = request.param
    make, mask = FORMS[name]
    return trace_layer(make(), SHAPE if known else (None, *SHAPE[1:]), mask=mask)


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
def test_every_form_is_a_unit(layer: LayerGraph, config: PrecisionConfig) -> None:
    fusion = layer.find(config)
    assert sum(unit.startswith("layer-norm: ") for unit in fusion.units) == 1
    why = ("the statistics are weighted", "the statistics are not taken over the last axes")
    assert {miss.why for miss in fusion.misses} <= {*why}
    result = layer.rewrite(config)
    assert not low_statistics(result.graph_def)
    assert wide_casts(layer, result) <= OF_PRODUCTS + OF_UNIT


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
def test_values_and_gradients_are_those_of_float32(
    layer: LayerGraph, config: PrecisionConfig
) -> None:
    given = whole_numbers(SHAPE)
    wanted = layer.run(layer.graph_def, *given)
    found = layer.run(layer.rewrite(config).graph_def, *given)
    assert_near(found, wanted, ROUNDING[config.device])


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("known", [True, False])
def test_what_a_mask_leaves_out_is_no_part_of_a_batch(known: bool, config: PrecisionConfig) -> None:
    shape, mask = (8, 6, 16), np.arange(48).reshape(8, 6) % 3 > 0
    make, size = tf_keras.layers.BatchNormalization, shape[0] if known else None
    layer = trace_layer(make(), (size, *shape[1:]), mask=mask)
    given = whole_numbers(shape)
    wanted = layer.run(layer.graph_def, *given)
    assert_near(layer.run(layer.rewrite(config).graph_def, *given), wanted, ROUNDING[config.device])
    assert "batch-norm in float32" in node_types(layer.find(config))


def test_ones_are_made_of_what_is_cast_already() -> None:
    """With an unknown batch the weights are ones like x, which must not be cast for them alone."""
    layer = trace_layer(Norm(4), (None, *SHAPE[1:]))
    ones = next(node.name for node in layer.graph_def.node if node.op == "OnesLike")
    assert ones in inside(layer, CPU)
    keras_3 = trace_layer(keras.layers.GroupNormalization(4), (None, *SHAPE[1:]))
    casts = [wide_casts(graph, graph.rewrite(CPU)) for graph in (layer, keras_3)]
    assert casts[0] == casts[1]


def test_it_is_switched_off_as_layer_normalization_is() -> None:
    layer = trace_layer(Norm(4), SHAPE)
    off = PrecisionConfig(
        target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("layer-norm",))
    )
    assert inside(layer, CPU)
    assert not inside(layer, off)


MOMENTS = """
x = Const(0.5, [4, 8])
w = Const(1.0, [4, 8])
v = Const(2.0, [4, 8])
axes = Const([1])
zeros = ZerosLike(x)
spread = AddV2(w, zeros)
count = Sum(spread, axes)
weighted = Mul(w, x)
total = Sum(weighted, axes)
mean = DivNoNan(total, count)
square = SquaredDifference(x, mean)
product = Mul(w, square)
squares = Sum(product, axes)
variance = DivNoNan(squares, count)
epsilon = Const(0.001)
shifted = AddV2(variance, epsilon)
rsqrt = Rsqrt(shifted)
"""


def statistics_of(text: str) -> Statistics | None:
    matcher = Matcher(view_body(graph(text)))
    return find_statistics(matcher, matcher.view.index["rsqrt"])


def test_written_moments_are_found() -> None:
    found = statistics_of(MOMENTS)
    assert found is not None
    assert (found.x, found.weights, found.axes) == ("x", "w", (1,))
    nodes = view_body(graph(MOMENTS)).nodes
    wanted = "zeros spread count weighted total mean square product squares variance shifted rsqrt"
    assert {nodes[number].name for number in found.nodes} == set(wanted.split())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("zeros = ZerosLike(x)", "zeros = OnesLike(x)"),
        ("count = Sum(spread, axes)", "other = Const([0])\ncount = Sum(spread, other)"),
        ("product = Mul(w, square)", "product = Mul(v, square)"),
        ("squares = Sum(product, axes)", "squares = Sum(square, axes)"),
        ("mean = DivNoNan(total, count)", "mean = DivNoNan(total, w)"),
    ],
)
def test_other_divisions_are_no_weighted_moments(old: str, new: str) -> None:
    assert statistics_of(MOMENTS.replace(old, new)) is None


def test_statistics_with_different_weights_are_a_near_miss() -> None:
    text = MOMENTS.replace("weighted = Mul(w, x)", "weighted = Mul(v, x)").replace(
        "mean = DivNoNan(total, count)",
        "other = AddV2(v, zeros)\nsum = Sum(other, axes)\nmean = DivNoNan(total, sum)",
    )
    with pytest.raises(NoMatchError, match="different weights"):
        statistics_of(text)
