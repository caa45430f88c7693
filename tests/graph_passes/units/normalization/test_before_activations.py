"""Normalizations are found whatever activation is behind them, and whatever it makes of y."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from norm_networks import NORMS as OF_TOKENS
from traced_graphs import Traced, node_types, trace

from graph_passes import PrecisionConfig

CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU")
GPU = PrecisionConfig(target_dtype="float16", device="GPU")
NORMS: dict[str, Callable[[], layers.Layer]] = {
    "batch-norm": layers.BatchNormalization,
    "layer-norm": OF_TOKENS["layer"],
    "rms-norm": OF_TOKENS["rms"],
}
ACTIVATIONS = [
    *("relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "silu", "hard_silu", "hard_sigmoid"),
    *("softplus", "softsign", "tanh", "sigmoid", "exponential"),
]
BY_HAND: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "times 1": lambda x: x * 1.0,
    "1 times, twice": lambda x: tf.nn.relu(1.0 * x) + tf.sigmoid(1.0 * x),
    "plus 0": lambda x: x + 0.0,
    "by its sigmoid": lambda x: x * tf.sigmoid(x),
    "swish of another slope": lambda x: tf.nn.silu(x, beta=1.702),
    "gelu by Erf": lambda x: 0.5 * x * (1.0 + tf.math.erf(x / 2**0.5)),
    "half of it": lambda x: 0.5 * x,
    "both signs": lambda x: tf.concat([tf.nn.relu(x), tf.nn.relu(-x)], 3),
    "squeezed": lambda x: x * tf.sigmoid(tf.reduce_mean(x, [1, 2], keepdims=True)),
}


def traced(norm: str, activation: object, *, is_training: bool = True) -> Traced:
    """A convolution, a normalization, an activation and a convolution, with all gradients."""
    first, second = layers.Conv2D(8, 3, use_bias=False), layers.Conv2D(4, 1)
    between, behind = NORMS[norm](), layers.Activation(activation)
    for layer, width in ((first, 4), (between, 8)):
        layer.build((None, 8, 8, width))
    second.build((None, 8, 8, 16 if activation is BY_HAND["both signs"] else 8))

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            y = second(behind(between(first(x), training=is_training)))
        variables = [*first.trainable_variables, *between.trainable_variables]
        return [y, *tape.gradient(y, variables)] if is_training else [y]

    return trace(step, tf.TensorSpec((None, 8, 8, 4)))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", [*ACTIVATIONS, *BY_HAND])
def test_a_normalization_in_front_is_found(norm: str, activation: str) -> None:
    graph = traced(norm, BY_HAND.get(activation, activation))
    for config in (CPU, GPU):
        assert {norm, f"fused-{norm}"}.intersection(node_types(graph.find(config)))


@pytest.mark.parametrize("norm", NORMS)
def test_before_inference_as_well(norm: str) -> None:
    fusion = traced(norm, "silu", is_training=False).find(CPU)
    assert norm in node_types(fusion)


SHAPE, TABLE = (None, 8), np.arange(8, dtype=np.float32)
BEHIND: dict[str, tuple[Callable[..., tf.Tensor], tuple[int | None, ...], int]] = {
    "repeated": (lambda y, x, p: tf.tile(y, [2, 1]) * p, SHAPE, 8),
    "in other places": (lambda y, x, p: tf.reshape(y, [8, -1]) * p, SHAPE, 1),
    "in one column": (lambda y, x, p: tf.reshape(y, [-1, 1]) * p, SHAPE, 8),
    "row by row": (lambda y, x, p: tf.reshape(y, [-1, 1, 8]) + p, (None, *SHAPE), 8),
    "divided by as many": (lambda y, x, p: y / 8.0, SHAPE, 1),
    "times a sum over rows": (lambda y, x, p: y * tf.reduce_sum(x * TABLE, 0), SHAPE, 1),
    "plus a sum of a row": (lambda y, x, p: y + tf.reduce_sum(x * TABLE, 1, True), SHAPE, 1),
}
"""What is made of a normalization y of x with a parameter p, the shape of x, the size of p."""


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("is_batch", [True, False])
@pytest.mark.parametrize("name", BEHIND)
def test_what_is_no_scale_or_offset_is_no_part_of_it(
    name: str, is_batch: bool, config: PrecisionConfig
) -> None:
    (behind, shape, size), eye = BEHIND[name], np.eye(8, dtype=np.float32)
    last = len(shape) - 1

    def step(x: tf.Tensor, p: tf.Tensor) -> list[tf.Tensor]:
        made = tf.matmul(x, eye)
        mean, variance = tf.nn.moments(made, [*range(last)] if is_batch else [last], keepdims=True)
        return [behind((made - mean) * tf.math.rsqrt(variance + 1e-3), made, p)]

    graph = trace(step, tf.TensorSpec(shape), tf.TensorSpec((size,)))
    fusion = graph.find(config)
    assert {"batch-norm", "layer-norm", "fused-layer-norm"}.intersection(node_types(fusion))
    x = np.random.default_rng(0).normal(size=[n or 16 for n in shape]).astype(np.float32)
    given = x, np.full(size, 0.5, np.float32)
    (wanted,), (found,) = (graph.run(g, *given) for g in (graph.graph_def, fusion.proto))
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
