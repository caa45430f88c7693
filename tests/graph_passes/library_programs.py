"""Programs with units as Keras and tf_keras write them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from norm_networks import NORMS
from programs import Program, trace
from unit_layers import CHANNELS, IMAGES, TOKENS, numbers


def keras_layer(make: Callable[[], Any], shape: tuple[int, ...], **call: Any) -> Program:
    """A layer of Keras or tf_keras between products, with the gradients of its parameters."""
    layer = make()
    layer.build((None, *shape[1:]))
    is_keras_3 = isinstance(layer, keras.layers.Layer)
    for number, weight in enumerate(layer.trainable_variables):
        weight.assign(
            0.5 + 0.25 * number + np.arange(np.prod(weight.shape)).reshape(weight.shape) % 4 / 4
        )
    weights = [v.value if is_keras_3 else v for v in layer.trainable_variables]
    eye = np.eye(shape[-1], dtype=np.float32)

    def step(x: tf.Tensor, dy: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.matmul(layer(tf.matmul(x, eye), **call), eye)
        return [y, *tape.gradient(y, [x, *weights], output_gradients=tf.matmul(dy, eye))]

    specs = [tf.TensorSpec((None, *shape[1:]))] * 2
    return trace(step, *specs, numbers(*shape), numbers(*shape, seed=1))


def encoder(layers: int) -> Program:
    """A training step of a small encoder of Keras layers."""
    keras.utils.set_random_seed(1)
    if hasattr(keras.config, "disable_flash_attention"):  # Keras 3.4 has none to disable
        keras.config.disable_flash_attention()
    inputs = keras.Input((6, 16))
    x = keras.layers.Dense(16)(inputs)
    for _ in range(layers):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(2, 8)(y, y, use_causal_mask=True)
        y = keras.layers.Dense(32, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(16)(y)
    return training_step(keras.Model(inputs, keras.layers.Dense(3)(x)), (4, 6, 16))


def convolutions() -> Program:
    """A training step of a small residual network of Keras layers."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6, 6, 4))
    x = keras.layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    left = keras.layers.BatchNormalization()(keras.layers.Conv2D(8, 3, padding="same")(x))
    right = keras.layers.BatchNormalization()(keras.layers.Conv2D(8, 1)(x))
    x = keras.layers.Activation("relu")(left + right)
    return training_step(keras.Model(inputs, keras.layers.Conv2D(3, 1)(x)), (4, 6, 6, 4))


def training_step(model: keras.Model, shape: tuple[int, ...]) -> Program:
    """The loss and all gradients of a model, whose moving statistics are kept."""
    weights = [variable.value for variable in model.trainable_variables]

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        return [loss, *tape.gradient(loss, weights)]

    return trace(step, tf.TensorSpec((None, *shape[1:])), numbers(*shape))


def optimizer_step(make: Callable[[], Any]) -> Program:
    """Gradients of a dense layer and an update of its parameters by Keras or tf_keras."""
    optimizer = make()
    is_keras_3 = isinstance(optimizer, keras.optimizers.Optimizer)
    values = (numbers(8, 6, seed=1), numbers(6, seed=2))
    weights = [keras.Variable(v) if is_keras_3 else tf.Variable(v) for v in values]
    kernel, bias = [v.value if is_keras_3 else v for v in weights]
    optimizer.build(weights)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.matmul(x, kernel) + bias))
        optimizer.apply_gradients(zip(tape.gradient(loss, [kernel, bias]), weights, strict=True))
        return loss

    program = trace(step, tf.TensorSpec((None, 8)), numbers(4, 8))
    return dataclasses.replace(program, targets=())  # the loss waits for all of them


OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "keras Adam": lambda: keras.optimizers.Adam(0.01, epsilon=0.1),
    "keras AdamW, clipped": lambda: keras.optimizers.AdamW(0.01, epsilon=0.1, global_clipnorm=1.0),
    "keras Adam, averaged": lambda: keras.optimizers.Adam(0.01, epsilon=0.1, use_ema=True),
    "keras SGD": lambda: keras.optimizers.SGD(0.01),
    "keras SGD, Nesterov": lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "keras RMSprop, centred": lambda: keras.optimizers.RMSprop(
        0.01, momentum=0.9, epsilon=0.1, centered=True
    ),
    "tf_keras Adam": lambda: tf_keras.optimizers.Adam(0.01, epsilon=0.1),
    "tf_keras SGD, momentum": lambda: tf_keras.optimizers.SGD(0.01, momentum=0.9),
    "tf_keras RMSprop, momentum": lambda: tf_keras.optimizers.RMSprop(
        0.01, momentum=0.9, epsilon=0.1
    ),
}
"""Optimizers whose updates become one op. Epsilons are large, so that rounding a gradient near 0 to
the target dtype does not change the first steps by as much as they are."""


LIBRARY: Mapping[str, Callable[[], Program]] = {
    "keras batch norm": lambda: keras_layer(keras.layers.BatchNormalization, IMAGES, training=True),
    "keras batch norm, inference": lambda: keras_layer(
        keras.layers.BatchNormalization, IMAGES, training=False
    ),
    "keras batch norm, channels first": lambda: keras_layer(
        lambda: keras.layers.BatchNormalization(axis=1), IMAGES, training=True
    ),
    "tf_keras batch norm, rank 2": lambda: keras_layer(
        tf_keras.layers.BatchNormalization, (32, CHANNELS), training=True
    ),
    "tf_keras group norm": lambda: keras_layer(
        lambda: tf_keras.layers.GroupNormalization(2), IMAGES
    ),
    "keras gelu, tanh": lambda: keras_layer(
        lambda: keras.layers.Activation(lambda x: keras.activations.gelu(x, approximate=True)),
        TOKENS,
    ),
    "keras gelu, erf": lambda: keras_layer(
        lambda: keras.layers.Activation(lambda x: keras.activations.gelu(x, approximate=False)),
        TOKENS,
    ),
    **{
        f"norm: {name}": functools.partial(keras_layer, make, (4, 6, 16))
        for name, make in NORMS.items()
    },
    **{
        f"update: {name}": functools.partial(optimizer_step, make)
        for name, make in OPTIMIZERS.items()
    },
    "encoder of one layer": lambda: encoder(1),
    "encoder of two layers": lambda: encoder(2),
    "convolutions": convolutions,
}
"""Units as libraries write them."""
