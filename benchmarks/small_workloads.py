"""Small networks as people try them first: a float32 training step takes 1 to 100 ms on two cores.

The networks of `workloads.py` are mostly products; in these, what starts a kernel, moves a tensor
or normalizes a few rows counts as much. Keras' and TensorFlow's own tutorials have their like.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers
from workloads import Batch, Workload, float32_logits

_ADAM = keras.optimizers.Adam


def _made(
    classes: int, shape: tuple[int, ...], labels: tuple[int, ...] = (), integers: int = 0
) -> Callable[[np.random.Generator], Batch]:
    """Batches of a shape: of the standard normal distribution, or of integers below a bound."""

    def make(rng: np.random.Generator) -> Batch:
        x = rng.integers(integers, size=shape) if integers else rng.standard_normal(shape)
        y = rng.integers(classes, size=(shape[0], *labels), dtype=np.int32)
        return x.astype(np.int32 if integers else np.float32), y

    return make


def _tabular() -> keras.Model:
    """Ten embedded columns, then dense layers with batch normalization and dropout."""
    inputs = keras.Input((10,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(500, 16)(inputs))
    for _ in range(2):
        x = layers.BatchNormalization()(layers.Dense(64, activation="relu")(x))
        x = layers.Dropout(0.2)(x)
    return float32_logits(inputs, layers.Dense(2)(x))


def _normalized_mlp() -> keras.Model:
    inputs = x = keras.Input((64,))
    for _ in range(3):
        x = layers.Dense(64, use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return float32_logits(inputs, layers.Dense(10)(x))


def _tanh_mlp() -> keras.Model:
    """As networks that solve differential equations are."""
    inputs = x = keras.Input((2,))
    for _ in range(6):
        x = layers.Dense(50, activation="tanh")(x)
    return float32_logits(inputs, layers.Dense(2)(x))


def _text_convolutions() -> keras.Model:
    tokens = keras.Input((500,), dtype="int32")
    x = layers.Dropout(0.5)(layers.Embedding(20000, 128)(tokens))
    for _ in range(2):
        x = layers.Conv1D(128, 7, strides=3, activation="relu")(x)
    x = layers.Dense(128, activation="relu")(layers.GlobalMaxPooling1D()(x))
    return float32_logits(tokens, layers.Dense(2)(layers.Dropout(0.5)(x)))


def _text_attention() -> keras.Model:
    tokens = keras.Input((200,), dtype="int32")
    x = layers.Embedding(20000, 32)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 32, dropout=0.1)(x, x))
    hidden = layers.Dense(32)(layers.Dense(32, activation="relu")(x))
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x + hidden))
    return float32_logits(tokens, layers.Dense(2)(layers.Dense(20, activation="relu")(x)))


def _series() -> keras.Model:
    """A series of 500 numbers, by convolutions with batch normalization."""
    inputs = x = keras.Input((500, 1))
    for _ in range(3):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv1D(64, 3, padding="same")(x)))
    return float32_logits(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def _wavenet() -> keras.Model:
    """Dilated causal convolutions with gates, towards one of 256 values a sample."""
    inputs = keras.Input((1000, 1))
    x, skips = layers.Conv1D(32, 1)(inputs), []
    for step in range(8):
        dilated: dict[str, Any] = {"dilation_rate": 2**step, "padding": "causal"}
        value = layers.Conv1D(32, 2, activation="tanh", **dilated)(x)
        gate = layers.Conv1D(32, 2, activation="sigmoid", **dilated)(x)
        skips.append(layers.Conv1D(32, 1)(value * gate))
        x = x + skips[-1]
    x = layers.Conv1D(64, 1, activation="relu")(layers.ReLU()(layers.Add()(skips)))
    return float32_logits(inputs, layers.Conv1D(256, 1)(x))


def _point_cloud() -> keras.Model:
    inputs = x = keras.Input((1024, 3))
    for width in (32, 32, 64, 512):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv1D(width, 1)(x)))
    x = layers.GlobalMaxPooling1D()(x)
    for width in (256, 128):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Dense(width)(x)))
    return float32_logits(inputs, layers.Dense(10)(layers.Dropout(0.3)(x)))


def _pictures() -> keras.Model:
    inputs = x = keras.Input((32, 32, 3))
    for width in (32, 64, 128):
        for _ in range(2):
            x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
            x = layers.BatchNormalization()(x)
        x = layers.Dropout(0.2)(layers.MaxPooling2D()(x))
    x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
    return float32_logits(inputs, layers.Dense(10)(layers.Dropout(0.5)(x)))


def _tagger() -> keras.Model:
    tokens = keras.Input((50,), dtype="int32")
    x = layers.Embedding(10000, 64)(tokens)
    x = layers.Bidirectional(layers.LSTM(64, return_sequences=True))(x)
    return float32_logits(tokens, layers.Dense(20)(x))


SMALL_WORKLOADS = {
    "tabular": Workload(_tabular, _ADAM, _made(2, (256, 10), integers=500)),
    "normalized_mlp": Workload(_normalized_mlp, _ADAM, _made(10, (128, 64))),
    "tanh_mlp": Workload(_tanh_mlp, _ADAM, _made(2, (2048, 2))),
    "text_convolutions": Workload(_text_convolutions, _ADAM, _made(2, (32, 500), integers=20000)),
    "text_attention": Workload(_text_attention, _ADAM, _made(2, (32, 200), integers=20000)),
    "series": Workload(_series, _ADAM, _made(2, (32, 500, 1))),
    "wavenet": Workload(_wavenet, _ADAM, _made(256, (16, 1000, 1), (1000,))),
    "point_cloud": Workload(_point_cloud, _ADAM, _made(10, (16, 1024, 3))),
    "pictures": Workload(_pictures, _ADAM, _made(10, (32, 32, 32, 3))),
    "tagger": Workload(_tagger, _ADAM, _made(20, (32, 50), (50,), integers=10000)),
}
"""Name -> workload; the names are those of ``--workloads``."""
