"""Programs with a planted fault; each prints what the test looks at, as JSON."""

from __future__ import annotations

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_amp


def large(blocks: int) -> dict:
    """About 25 nodes a block, of which one has values near 1e5."""
    rng = np.random.default_rng(0)
    weights = [
        tf.Variable(np.eye(16) + 0.01 * rng.random((16, 16)), dtype="float32") for _ in "abc"
    ]

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for number in range(blocks):
                with tf.name_scope(f"block{number}"):
                    for w in weights:
                        x = tf.nn.relu(tf.matmul(x, w))
                    x = x / (1 + tf.reduce_max(x))
                    if number == 2 * blocks // 3:
                        with tf.name_scope("planted"):
                            x = tf.matmul(x, 1e5 * tf.eye(16)) * 1e-5
            loss = tf.reduce_mean(x)
        for w, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(gradient)
        return loss

    x = rng.random((8, 16)).astype(np.float32)
    nodes = len(step.get_concrete_function(x).graph.get_operations())
    before = [w.numpy() for w in weights]
    found = tf_amp.diagnose(step, [x])
    kept = all(np.array_equal(w, b) for w, b in zip(weights, before, strict=True))
    return {
        "nodes": nodes,
        "found": [f.remark.node for f in found.findings],
        "lines": found.findings[0].remark.lines,
        "largest": found.findings[0].largest,
        "finite": found.finite,
        "kept": kept,
        "rules": found.rules,
    }


def sound() -> dict:
    """Nothing is amiss, in loops and branches either."""
    w = tf.Variable(0.1 * tf.eye(16))

    def step(x: tf.Tensor) -> tf.Tensor:
        for number in tf.range(4):
            x = tf.nn.relu(tf.matmul(x, w))
            if number > 2:
                x = tf.matmul(x, w)
        return x

    found = tf_amp.diagnose(step, [tf.ones([4, 16])])
    return {"found": len(found.findings), "tensors": found.tensors, "text": str(found)}


def jump() -> dict:
    """A difference of large values loses most digits, and all is finite."""
    w = tf.Variable(tf.eye(16))

    def step(x: tf.Tensor) -> tf.Tensor:
        near = tf.matmul(x, w) + 100.0
        return tf.matmul(tf.nn.relu(near - 100.0), w)

    x = np.random.default_rng(0).random((8, 16)).astype(np.float32) / 10
    (found,) = tf_amp.diagnose(step, [x]).findings
    return {"op": found.remark.op, "error": found.error}


def not_ours() -> dict:
    """Float32 is not finite either."""
    w = tf.Variable(tf.eye(16))
    found = tf_amp.diagnose(
        lambda x: tf.matmul(tf.matmul(x, w), w), [tf.fill([4, 16], float("inf"))]
    )
    return {"found": len(found.findings), "text": str(found)}


def iterator() -> dict:
    """A function that takes its batch itself."""
    data = iter(tf.data.Dataset.from_tensors(tf.ones([4, 16])).repeat())
    w = tf.Variable(tf.eye(16))
    try:
        tf_amp.diagnose(tf.function(lambda: tf.matmul(next(data), w)), [])
    except ValueError as error:
        return {"said": str(error)}
    return {}


@keras.saving.register_keras_serializable()
class Planted(keras.layers.Layer):
    """Values near 1e5 where the input is large."""

    def build(self, shape: tuple) -> None:
        self.w = self.add_weight(shape=(shape[-1], shape[-1]), initializer="identity")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return keras.ops.matmul(x * 1e5, self.w) * 1e-5


def fit() -> dict:
    """The third batch has the values that overflow."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input([16])
    x = keras.layers.Dense(16, activation="relu")(inputs)
    x = keras.layers.BatchNormalization()(keras.layers.Dropout(0.1)(x))
    x = keras.layers.Dense(16)(Planted(name="planted")(x))
    model = keras.Model(inputs, x)
    model.compile("adam", "mse")
    told = []
    callback = tf_amp.diagnose_callback(model, tell=told.append)
    x = 0.01 * np.random.default_rng(0).random((64, 16)).astype(np.float32)
    x[32:48] = 1e3
    history = model.fit(
        x, x, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[callback]
    )
    found = callback.diagnosis
    return {
        "epochs": len(history.history["loss"]),
        "nodes": [f.remark.node for f in found.findings],
        "finite": found.finite,
        "told": len(told),
        "released": not hasattr(model.train_function, "tf_amp_train_function"),
    }


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*map(int, sys.argv[2:])), default=str))
