"""One training of ``tf-amp demo``: a plain Keras program, which switches nothing on by itself.

``python -m tf_amp.cli.demo_training SEED EPOCHS WIDTH`` prints one JSON object per line: one an
epoch, and one at the end with the accuracy, the step times and what `tf_amp.status` says.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

BATCH = 128
# Digits are 8x8; twice the size gives the convolutions work that is more than their start-up.
IMAGE = 16


def load_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Loads scikit-learn's 1,797 digits, enlarged, split 80 : 20.

    Returns:
        Training images ``[n, 16, 16, 1]`` float32 in 0..1, their labels ``[n]`` int32, and the same
        for testing.
    """
    from sklearn.datasets import load_digits as load

    data = load()
    images = np.repeat(np.repeat(data.images, 2, axis=1), 2, axis=2)
    images = (images / 16.0).astype("float32")[..., np.newaxis]
    labels = data.target.astype("int32")
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], labels[order]
    split = len(images) * 4 // 5
    return images[:split], labels[:split], images[split:], labels[split:]


def build_model(width: int) -> Any:
    """Builds a compiled Keras CNN with batch normalization: 16x16x1 images to 10 classes.

    Args:
        width: Filters of the first convolutions; the later ones have twice as many.
    """
    import keras
    from keras import layers

    model = keras.Sequential([keras.Input((IMAGE, IMAGE, 1))])
    for filters in (width, 2 * width, 2 * width):
        model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization(momentum=0.9))
        model.add(layers.ReLU())
        model.add(layers.Conv2D(filters, 3, padding="same", activation="relu"))
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dense(128, activation="relu"))
    model.add(layers.Dense(10))
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(seed: int, epochs: int, width: int) -> None:
    """Trains once and prints the JSON lines.

    Args:
        seed: Of the weights and of the order of the images.
        epochs: How often all images are seen.
        width: Filters of the first convolutions.
    """
    import keras
    import tensorflow as tf

    import tf_amp

    class Progress(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.step_seconds: list[float] = []
            self._first_epoch = True
            self._started = 0.0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self._started = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            # The first epoch traces and compiles.
            if not self._first_epoch:
                self.step_seconds.append(time.perf_counter() - self._started)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self._first_epoch = False
            print(json.dumps({"epoch": epoch, "loss": logs["loss"]}), flush=True)

    keras.utils.set_random_seed(seed)
    x_train, y_train, x_test, y_test = load_digits()
    # Whole batches only: a last smaller one would be traced once more.
    batches = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    batches = batches.shuffle(len(x_train), seed=seed).batch(BATCH, drop_remainder=True)
    model = build_model(width)
    progress = Progress()
    model.fit(batches, epochs=epochs, shuffle=False, verbose=0, callbacks=[progress])
    _, accuracy = model.evaluate(x_test, y_test, batch_size=BATCH, verbose=0)
    result = {
        "accuracy": float(accuracy),
        "step_seconds": float(np.median(progress.step_seconds)),
        "status": tf_amp.status().as_dict(),
    }
    print(json.dumps(result, default=str), flush=True)


if __name__ == "__main__":
    train(*map(int, sys.argv[1:4]))
