"""Trains a small CNN with Keras: a plain script that knows nothing of mixed precision.

    python examples/train.py                                       # float32
    TF_ENABLE_AUTO_MIXED_PRECISION=1 python examples/train.py      # mixed precision

The images are made on the spot: each class is a pattern of stripes, moved at random, under noise.
"""

from __future__ import annotations

import argparse
import time

import keras
import numpy as np
import tensorflow as tf
from keras import layers

CLASSES = 8
SIZE = 32


def make_images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Makes noisy stripes whose direction is the class.

    Args:
        count: How many images.
        seed: Of the random numbers.

    Returns:
        Images ``[count, 32, 32, 1]`` float32 and labels ``[count]`` int32.
    """
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, count).astype("int32")
    angle = labels[:, None, None] * np.pi / CLASSES
    phase = random.uniform(0, 2 * np.pi, (count, 1, 1))
    y, x = np.mgrid[:SIZE, :SIZE]
    stripes = np.sin(0.7 * (x * np.cos(angle) + y * np.sin(angle)) + phase)
    images = stripes + random.normal(0, 2.5, (count, SIZE, SIZE))
    return images[..., None].astype("float32"), labels


def build_model() -> keras.Model:
    """Builds a compiled classifier of ``[n, 32, 32, 1]`` images."""
    model = keras.Sequential([keras.Input((SIZE, SIZE, 1))])
    for filters in (64, 128, 128):
        model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization(momentum=0.9))
        model.add(layers.ReLU())
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dense(128, activation="relu"))
    model.add(layers.Dense(CLASSES))
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    """Trains, evaluates on fresh images, and prints the time of an epoch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=2048, help="training images")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    model = build_model()
    data = tf.data.Dataset.from_tensor_slices(make_images(arguments.images, seed=1))
    data = data.shuffle(arguments.images, seed=2).batch(64, drop_remainder=True)
    for epoch in range(arguments.epochs):
        started = time.perf_counter()
        history = model.fit(data, shuffle=False, verbose=0).history
        seconds = time.perf_counter() - started
        print(
            f"epoch {epoch + 1}: loss {history['loss'][0]:.4f}, "
            f"accuracy {history['accuracy'][0]:.4f}, {seconds:.2f} s"
        )
    loss, accuracy = model.evaluate(*make_images(512, seed=3), batch_size=64, verbose=0)
    print(f"test: loss {loss:.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
