"""The two real tasks of `loss_parity.py`: digits, and characters of Python's own sources.

TensorFlow and Keras are imported by the functions, so that names can be had without them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import keras

TASK_NAMES = ("digits_cnn", "character_transformer")

_LENGTH = 64
_WIDTH = 64
# Printable ASCII, the newline and one place for everything else.
_SYMBOLS = 97
_TEXT_BYTES = 4_000_000
_HELD_OUT_WINDOWS = 256


@dataclasses.dataclass(frozen=True)
class Task:
    """A model with the data to train it on and data to judge it by.

    Attributes:
        model: the model, compiled with an accuracy metric.
        batch: makes one training batch from a random generator.
        held_out: inputs and labels that `batch` never gives.
    """

    model: keras.Model
    batch: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]
    held_out: tuple[np.ndarray, np.ndarray]


def make_task(name: str, seed: int, steps: int) -> Task:
    """Builds a task. The data are the same for every seed; weights and order differ.

    Args:
        name: one of `TASK_NAMES`.
        seed: of the initial weights.
        steps: after which the learning rate reaches 0; what is judged is then the network, and not
            the batch that came last.
    """
    import keras

    keras.utils.set_random_seed(seed)
    return {"digits_cnn": _digits, "character_transformer": _characters}[name](steps)


def _digits(steps: int) -> Task:
    import keras
    from keras import layers
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).reshape(-1, 8, 8, 1).astype(np.float32)
    labels = labels.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], labels[order]
    train_count = len(images) * 4 // 5
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            # With the default of 0.99, statistics are not settled after a few hundred steps, and
            # the accuracy is that of the noise in them.
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(0.05, steps)
    _compile(model, keras.optimizers.SGD(rate, momentum=0.9))

    def batch(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        chosen = rng.integers(train_count, size=64)
        return images[chosen], labels[chosen]

    return Task(model, batch, (images[train_count:], labels[train_count:]))


def _characters(steps: int) -> Task:
    import keras
    from keras import layers

    text = _standard_library_text()
    boundary = len(text) * 9 // 10
    tokens = keras.Input((_LENGTH,), dtype="int32")
    x = layers.Embedding(_SYMBOLS, _WIDTH)(tokens)
    x = x + layers.Embedding(_LENGTH, _WIDTH)(keras.ops.arange(_LENGTH))
    for _ in range(2):
        normed = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, _WIDTH // 4)(normed, normed, use_causal_mask=True)
        hidden = layers.Dense(4 * _WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(_WIDTH)(hidden)
    model = keras.Model(tokens, layers.Dense(_SYMBOLS)(layers.LayerNormalization()(x)))
    rate = keras.optimizers.schedules.CosineDecay(2e-3, steps)
    _compile(model, keras.optimizers.Adam(rate, global_clipnorm=1.0))

    def batch(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return _windows(text, rng.integers(boundary - _LENGTH - 1, size=16))

    held_out = np.linspace(boundary, len(text) - _LENGTH - 1, _HELD_OUT_WINDOWS).astype(int)
    return Task(model, batch, _windows(text, held_out))


def _compile(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)


def _windows(text: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    windows = text[starts[:, None] + np.arange(_LENGTH + 1)]
    return windows[:, :-1], windows[:, 1:]


def _standard_library_text() -> np.ndarray:
    """The modules beside `os`, in the order of their names, as int32 symbols."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"\n".join(file.read_bytes() for file in files)[:_TEXT_BYTES], np.uint8)
    printable = (text >= 32) & (text < 127)
    symbols = np.where(printable, text.astype(np.int32) - 32, _SYMBOLS - 1)
    return np.where(text == ord("\n"), _SYMBOLS - 2, symbols).astype(np.int32)
