"""Softmax over several axes, which comes as exponentials and a log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
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
    wide_casts,
)
from traced_graphs import trace

from graph_passes import PrecisionConfig
from graph_passes.ir.view import view_graph
from graph_passes.rewriter.editor import GraphEdits
from graph_passes.units.activation.softmax import find_softmaxes

SHAPE = (2, 4, 32, 32)
ROUNDING = {"GPU": 2**-10, "CPU": 2**-7}
"""A rounding of y, which the gradient of the products reads, and one of the result."""


def guarded_by_zeros(x: tf.Tensor) -> tf.Tensor:
    """As TensorFlow 2.17 writes `tf.reduce_logsumexp`."""
    largest = tf.reduce_max(x, (2, 3), keepdims=True)
    kept = {"condition": tf.math.is_finite(largest), "x": largest, "y": tf.zeros_like(largest)}
    bound = tf.stop_gradient(tf.raw_ops.Select(**kept))
    total = tf.reduce_sum(tf.exp(x - bound), (2, 3), keepdims=True)
    return tf.exp(x - (tf.math.log(total) + bound))


FORMS: dict[str, Callable[[], object]] = {
    "last two": lambda: keras.layers.Softmax(axis=(2, 3)),
    "not the last": lambda: keras.layers.Softmax(axis=(1, 2)),
    "apart": lambda: keras.layers.Softmax(axis=(1, 3)),
    "all but the batch": lambda: keras.layers.Softmax(axis=(1, 2, 3)),
    "tf_keras": lambda: tf_keras.layers.Softmax(axis=(2, 3)),
    "guarded by zeros": lambda: keras.layers.Lambda(guarded_by_zeros),
}


@pytest.fixture(scope="module", params=[(name, known) for name in FORMS for known in (True, False)])
def layer(request: pytest.FixtureRequest) -> LayerGraph:
    name, known = request.param
    return trace_layer(FORMS[name](), SHAPE if known else (None, *SHAPE[1:]))


def scores() -> tuple[np.ndarray, np.ndarray]:
    """Scores near to one another, of whose exponentials bfloat16 cannot add up a thousand."""
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 9, SHAPE) / 8
    return x.astype(np.float32), rng.integers(-3, 4, SHAPE).astype(np.float32)


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
def test_every_form_is_a_unit(layer: LayerGraph, config: PrecisionConfig) -> None:
    fusion = layer.find(config)
    assert sum(unit.startswith("softmax: ") for unit in fusion.units) == 1
    assert not fusion.misses
    result = layer.rewrite(config)
    assert not low_statistics(result.graph_def)
    assert wide_casts(layer, result) == OF_PRODUCTS + OF_UNIT


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
def test_values_and_gradients_are_those_of_float32(
    layer: LayerGraph, config: PrecisionConfig
) -> None:
    wanted = layer.run(layer.graph_def, *scores())
    found = layer.run(layer.rewrite(config).graph_def, *scores())
    assert_near(found, wanted, ROUNDING[config.device])


def test_the_values_of_these_tests_need_sums_in_float32() -> None:
    total = tf.constant(0, tf.bfloat16)
    for value in np.exp(scores()[0][0, 0].ravel()):
        total += tf.cast(value, tf.bfloat16)
    assert float(total) < 0.8 * np.exp(scores()[0][0, 0]).sum()


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("library", [keras, tf_keras], ids=["Keras 3", "tf_keras"])
def test_masked_scores_stay_masked(library: object, config: PrecisionConfig) -> None:
    mask = np.arange(32) % 3 > 0
    mask = np.broadcast_to(mask if library is keras else mask.astype(np.float32), SHAPE)
    masked = trace_layer(library.layers.Softmax(axis=(2, 3)), SHAPE, mask=mask)
    assert any(unit.startswith("softmax: ") for unit in masked.find(config).units)
    wanted = masked.run(masked.graph_def, *scores())
    found = masked.run(masked.rewrite(config).graph_def, *scores())
    assert_near(found, wanted, ROUNDING[config.device])
    assert not found[0][mask == 0].any()


def test_attention_over_images_is_a_unit_in_its_graph() -> None:
    keras.config.disable_flash_attention()
    attention = keras.layers.MultiHeadAttention(2, 8, attention_axes=(1, 2))
    attention.build((None, 4, 4, 16), (None, 4, 4, 16))
    traced = trace(lambda x: tf.identity(attention(x, x)), tf.TensorSpec((2, 4, 4, 16)))
    units = traced.find(CPU).units
    assert [unit for unit in units if unit.startswith("softmax: ")]


def test_it_can_be_switched_off() -> None:
    layer = trace_layer(FORMS["last two"](), SHAPE)
    off = PrecisionConfig(
        target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("softmax",))
    )
    assert inside(layer, CPU)
    assert not inside(layer, off)


SOFTMAX = """
x = Const(0.5, [4, 8, 8])
dy = Const(2.0, [4, 8, 8])
axes = Const([1, 2])
most = Max(x, axes)
bound = StopGradient(most)
shifted = Sub(x, bound)
exponential = Exp(shifted)
total = Sum(exponential, axes)
log = Log(total)
all = AddV2(log, bound)
difference = Sub(x, all)
y = Exp(difference)
weighted = Mul(dy, y)
negated = Neg(weighted)
into_all = Sum(negated, axes)
inverse = Reciprocal(total)
into_total = Mul(into_all, inverse)
shape = Const([4, 8, 8])
spread = BroadcastTo(into_total, shape)
into_exponential = Mul(spread, exponential)
dx = AddN(weighted, into_exponential)
"""


def find(text: str) -> tuple[list[set[str]], list[str]]:
    """The nodes of each unit in a graph, and what came close."""
    edits = GraphEdits(view_graph(graph(text)))
    units = find_softmaxes(edits)
    names = [{edits.view.nodes[number].name for number in unit.inside} for unit in units]
    return names, [miss.why for miss in edits.misses]


def test_a_written_softmax_is_found_with_its_gradient() -> None:
    (names,), misses = find(SOFTMAX)
    assert not misses
    outside = {"x", "dy", "axes", "shape"}
    assert names == {node.name for node in graph(SOFTMAX).node} - outside


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("total = Sum(exponential, axes)", "total = Sum(shifted, axes)"),
        ("shifted = Sub(x, bound)", "shifted = AddV2(x, bound)"),
        ("difference = Sub(x, all)", "difference = Sub(dy, all)"),
        ("all = AddV2(log, bound)", "all = AddV2(log, dy)"),
    ],
)
def test_another_logarithm_is_none(old: str, new: str) -> None:
    assert find(SOFTMAX.replace(old, new)) == ([], [])


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("y = Exp(difference)", "y = Tanh(difference)", "0 nodes that make the exponential"),
        ("bound = StopGradient(most)", "bound = Tanh(most)", "shifted by Tanh, not by its"),
        ("most = Max(x, axes)", "most = Max(dy, axes)", "the largest of another tensor"),
        ("dx = AddN(weighted, into", "dx = AddN(dy, into", "does not flow to its input"),
        ("into_total = Mul(into_all", "into_total = Mul(total", "make the gradient of the sum"),
    ],
)
def test_a_near_miss_says_what_is_amiss(old: str, new: str, why: str) -> None:
    found, (miss,) = find(SOFTMAX.replace(old, new))
    assert not found
    assert why in miss
