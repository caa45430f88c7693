"""Small networks with one kind of normalization, in the forms in which libraries write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import keras
import tensorflow as tf
from keras import layers


class _Stored(layers.Layer):
    """A layer with a stored scale and offset over the last axis."""

    def build(self, shape):
        self.gamma = self.add_weight(shape=shape[-1:], initializer="ones", name="gamma")
        self.beta = self.add_weight(shape=shape[-1:], initializer="zeros", name="beta")


class Moments(_Stored):
    """Layer normalization by `tf.nn.moments` and `tf.nn.batch_normalization`."""

    def call(self, x):
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return tf.nn.batch_normalization(x, mean, variance, self.beta.value, self.gamma.value, 1e-5)


class Centred(_Stored):
    """Layer normalization with the mean subtracted first."""

    def call(self, x):
        centred = x - tf.reduce_mean(x, -1, keepdims=True)
        variance = tf.reduce_mean(tf.square(centred), -1, keepdims=True)
        return centred * tf.math.rsqrt(variance + 1e-6) * self.gamma.value + self.beta.value


class OnePlusGamma(layers.Layer):
    """Root-mean-square normalization with a stored scale around 0."""

    def build(self, shape):
        self.gamma = self.add_weight(shape=shape[-1:], initializer="zeros", name="gamma")

    def call(self, x):
        square = tf.reduce_mean(tf.pow(x, 2), -1, keepdims=True)
        return x * tf.math.rsqrt(square + 1e-6) * (1 + self.gamma.value)


NORMS: Mapping[str, Callable[[], layers.Layer]] = {
    "layer": layers.LayerNormalization,
    "layer, no scale": lambda: layers.LayerNormalization(scale=False),
    "layer, no offset": lambda: layers.LayerNormalization(center=False),
    "layer, plain": lambda: layers.LayerNormalization(scale=False, center=False),
    "layer, two axes": lambda: layers.LayerNormalization(axis=(1, 2)),
    "layer, tf.nn": Moments,
    "layer, centred": Centred,
    "group": lambda: layers.GroupNormalization(4),
    "group, no scale": lambda: layers.GroupNormalization(4, scale=False),
    "group, channels first": lambda: layers.GroupNormalization(2, axis=1),
    "rms": getattr(layers, "RMSNormalization", OnePlusGamma),  # Keras 3.4 has none
    "rms, one plus gamma": OnePlusGamma,
}
"""Normalizations of tokens [batch, 6, 16], by a name for the test."""

RULES = {name: "rms-norm" if name.startswith("rms") else "layer-norm" for name in NORMS}
"""The rule that each falls under."""


def token_network(norm: str) -> Callable[[], keras.Model]:
    """A network with three normalizations, whose input is a sum, a product or a residual sum."""

    def build() -> keras.Model:
        inputs = keras.Input((6, 8))
        x = layers.Dense(16)(inputs)
        y = layers.Dense(16, activation="relu")(NORMS[norm]()(x))
        x = NORMS[norm]()(layers.Add()([x, y]))
        y = layers.Dense(16)(x)
        x = NORMS[norm]()(layers.Add()([x, y]))
        return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))

    return build
