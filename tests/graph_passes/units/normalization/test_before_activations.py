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


MOVES: dict[str, tuple[Callable[[tf.Tensor], tf.Tensor], int]] = {
    "repeated": (lambda y: tf.tile(y, [2, 1]), 8),
    "in other places": (lambda y: tf.reshape(y, [8, -1]), 1),
}
"""What is made of a normalization of unknown length, and the size of a scale behind it."""


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", MOVES)
def test_what_has_other_rows_is_no_part_of_it(
    name: str, axis: int, config: PrecisionConfig
) -> None:
    (move, size), eye = MOVES[name], np.eye(8, dtype=np.float32)

    def step(x: tf.Tensor, scale: tf.Tensor) -> list[tf.Tensor]:
        made = tf.matmul(x, eye)
        mean, variance = tf.nn.moments(made, [axis], keepdims=True)
        return [move((made - mean) * tf.math.rsqrt(variance + 1e-3)) * scale]

    graph = trace(step, tf.TensorSpec((None, 8)), tf.TensorSpec((size,)))
    rng = np.random.default_rng(0)
    given = rng.normal(size=(16, 8)).astype(np.float32), np.full(size, 0.5, np.float32)
    (wanted,), (found,) = (
        graph.run(g, *given) for g in (graph.graph_def, graph.find(config).proto)
    )
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
