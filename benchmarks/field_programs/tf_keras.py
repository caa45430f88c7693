"""tf_keras: applications and models of Keras 2, with legacy optimizers and custom train steps."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from field_programs.program import Program, Running, fitted


def _application(network: str) -> Running:
    import tensorflow as tf
    import tf_keras as keras

    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(1)
    model = getattr(keras.applications, network)(weights=None, input_shape=(96, 96, 3), classes=10)
    model.compile(keras.optimizers.legacy.SGD(1e-3), "sparse_categorical_crossentropy")
    # In batches of two, rounding the images alone moves the first loss by a fifth.
    images = rng.normal(size=(8, 96, 96, 3)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((images, rng.integers(0, 10, 8))).batch(8)
    return fitted(model, data, images)


def _recurrent(layer: str) -> Running:
    import tensorflow as tf
    import tf_keras as keras

    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Embedding(500, 64, mask_zero=True),
            layers.Bidirectional(getattr(layers, layer)(128, return_sequences=True)),
            getattr(layers, layer)(128, dropout=0.1),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("rmsprop", "binary_crossentropy", metrics=["accuracy"])
    tokens = rng.integers(0, 500, (40, 24))
    data = tf.data.Dataset.from_tensor_slices((tokens, rng.integers(0, 2, 40))).batch(16)
    return fitted(model, data, tokens)


def _convolutional_lstm() -> Running:
    import tf_keras as keras

    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(1)
    model = keras.Sequential(
        [
            keras.Input((None, 16, 16, 3)),
            keras.layers.ConvLSTM2D(16, 3, padding="same", return_sequences=True),
            keras.layers.BatchNormalization(),
            keras.layers.Conv3D(1, 3, padding="same", activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy")
    films = rng.random((4, 6, 16, 16, 3), dtype="float32")
    return Running(
        lambda: model.fit(films, films[..., :1], batch_size=2, verbose=0).history["loss"][-1],
        lambda: {"predict": model.predict(films, batch_size=2, verbose=0)},
    )


def _adversarial() -> Running:
    """Two networks and two optimizers in one `train_step`, as in the DCGAN example."""
    import tensorflow as tf
    import tf_keras as keras

    keras.utils.set_random_seed(1)
    layers = keras.layers

    class Adversarial(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.discriminator = keras.Sequential(
                [
                    layers.Conv2D(64, 4, 2, "same"),
                    layers.LeakyReLU(0.2),
                    layers.Conv2D(128, 4, 2, "same"),
                    layers.LeakyReLU(0.2),
                    layers.Flatten(),
                    layers.Dense(1),
                ]
            )
            self.generator = keras.Sequential(
                [
                    layers.Dense(8 * 8 * 128),
                    layers.Reshape((8, 8, 128)),
                    layers.Conv2DTranspose(64, 4, 2, "same"),
                    layers.BatchNormalization(),
                    layers.LeakyReLU(0.2),
                    layers.Conv2D(3, 5, padding="same", activation="tanh"),
                ]
            )
            self.optimizers = keras.optimizers.Adam(1e-4), keras.optimizers.Adam(1e-4)

        def call(self, noise: Any) -> Any:
            return self.generator(noise)

        def train_step(self, images: Any) -> dict[str, Any]:
            loss_of = keras.losses.BinaryCrossentropy(from_logits=True)
            noise = tf.random.normal((tf.shape(images)[0], 32), seed=3)
            with tf.GradientTape() as tape, tf.GradientTape() as other:
                made = self.discriminator(self.generator(noise, training=True), training=True)
                real = self.discriminator(images, training=True)
                loss = loss_of(tf.ones_like(made), made)
                judged = loss_of(tf.ones_like(real), real) + loss_of(tf.zeros_like(made), made)
            variables = self.generator.trainable_variables
            self.optimizers[0].apply_gradients(
                zip(tape.gradient(loss, variables), variables, strict=True)
            )
            variables = self.discriminator.trainable_variables
            self.optimizers[1].apply_gradients(
                zip(other.gradient(judged, variables), variables, strict=True)
            )
            return {"loss": loss, "judged": judged}

    model = Adversarial()
    model.compile()
    rng = np.random.default_rng(1)
    images = rng.normal(size=(20, 16, 16, 3)).astype("float32")
    noise = rng.normal(size=(6, 32)).astype("float32")
    return fitted(model, tf.data.Dataset.from_tensor_slices(images).batch(8), noise)


def _program(name: str, build: Any) -> Program:
    return Program(f"tf_keras/{name}", ("tf_keras",), build)


PROGRAMS = [
    *(
        _program(name, functools.partial(_application, name))
        for name in ("ResNet50", "MobileNetV2", "EfficientNetB0", "DenseNet121", "ConvNeXtTiny")
    ),
    _program("LSTM", functools.partial(_recurrent, "LSTM")),
    _program("GRU", functools.partial(_recurrent, "GRU")),
    _program("ConvLSTM2D", _convolutional_lstm),
    _program("adversarial", _adversarial),
]
