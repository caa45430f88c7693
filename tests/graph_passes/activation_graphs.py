"""Activations between two products, with the gradient on its way back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from free_casts import FREE_CASTS
from traced_graphs import Traced, trace

from graph_passes import PrecisionConfig

CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU", cost_table=FREE_CASTS)
WIDTH = 16
UNIT = 2.0**-9
"""Half a unit in the last place of a number in [0.5, 1)."""
Activation = Callable[[tf.Tensor], tf.Tensor]


def traced_activation(activation: Activation, rows: int | None = 2048) -> Traced:
    """An activation between products with the identity: what they make, and the gradient."""

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        one = tf.eye(WIDTH)
        with tf.GradientTape() as tape:
            before = tf.matmul(x, one)
            tape.watch(before)
            after = tf.matmul(activation(before), one)
        gradient = tape.gradient(after, before, output_gradients=tf.ones_like(after))
        return [after, tf.matmul(gradient, one)]

    return trace(step, tf.TensorSpec((rows, WIDTH)))


def numbers(end: float) -> np.ndarray:
    """Numbers from -end to end that bfloat16 holds."""
    x = np.linspace(-end, end, 2048 * WIDTH).reshape(2048, WIDTH).astype(np.float32)
    rounded: np.ndarray = tf.cast(tf.cast(x, tf.bfloat16), tf.float32).numpy()
    return rounded
