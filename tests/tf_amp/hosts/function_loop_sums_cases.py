"""Training steps of recurrent layers under the function host; prints what they gave as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import tensorflow as tf

if sys.argv[1] == "amp":
    import tf_amp

    tf_amp.enable_mixed_precision_graph_rewrite()

import keras
from tensorflow.python.eager import context

RNG = np.random.default_rng(0)
KERNEL = tf.Variable(RNG.standard_normal((64, 64)).astype(np.float32) / 12)
FUNCTIONS: list[Any] = []
"""Functions that are to stay in the runtime until they have been looked at."""
X = tf.constant(RNG.standard_normal((6, 4, 64)).astype(np.float32))


def recurrence(x: tf.Tensor) -> tf.Tensor:
    """The last state of a layer whose state and inputs share one weight."""
    start = tf.zeros_like(x[0])
    layer = lambda t, h: (t + 1, tf.tanh(x[t] + h @ KERNEL))  # noqa: E731
    return tf.while_loop(lambda t, _: t < x.shape[0], layer, (0, start), maximum_iterations=6)[1]


def gradient(x: tf.Tensor) -> tf.Tensor:
    """The weight's gradient."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(recurrence(x) ** 2)
    return tape.gradient(loss, KERNEL)


def second(x: tf.Tensor) -> tf.Tensor:
    """The gradient of a penalty on the gradient."""
    with tf.GradientTape() as tape:
        penalty = tf.reduce_sum(gradient(x) ** 2)
    return tape.gradient(penalty, KERNEL)


def through_a_function(x: tf.Tensor) -> tf.Tensor:
    """The gradient of a function of its own, by a tape outside of it."""
    called = tf.function(recurrence, autograph=False)
    FUNCTIONS.append(called)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(called(x) ** 2)
    return tape.gradient(loss, KERNEL)


def inside_xla(x: tf.Tensor) -> tf.Tensor:
    """A function that was traced before XLA compiles its caller."""
    inner = tf.function(gradient, autograph=False)
    FUNCTIONS.append(inner)
    inner(x)
    return tf.function(lambda x: inner(x) * 1.0, autograph=False, jit_compile=True)(x)


def fit() -> list[float]:
    """Losses of a model; its last batch is smaller than the others.

    Its LSTM is so wide that sums leave the loop for the 32 rows that stand for an unknown batch.
    """
    keras.utils.set_random_seed(1)
    inner = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(20, 128, mask_zero=True)(inner)
    x = keras.layers.LSTM(128, return_sequences=True)(x)
    x = keras.layers.Bidirectional(keras.layers.GRU(64))(x)
    model = keras.Model(inner, keras.layers.Dense(20)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    tokens = RNG.integers(1, 20, (22, 6)).astype("int32")
    tokens[::3, 4:] = 0
    history = model.fit(tokens, tokens[:, 0], batch_size=8, epochs=3, verbose=0, shuffle=False)
    return history.history["loss"]


def moved() -> list[str]:
    """The functions in which sums were moved, each with a product in the target dtype."""
    found = []
    for name in context.context().list_function_names():
        function = context.context().get_function_def(name)
        dtypes = {
            tf.as_dtype(node.attr["T"].type).name
            for node in function.node_def
            if node.op == "MatMul" and "gradient_sums" in node.name
        }
        found.extend(f"{name}: {dtype}" for dtype in dtypes)
    return found


def main() -> None:
    """Runs every case in turn."""
    cases: dict[str, Any] = {"gradient": gradient, "second": second}
    made: dict[str, Any] = {}
    for name, case in cases.items():
        FUNCTIONS.append(tf.function(case, autograph=False))
        made[name] = np.asarray(FUNCTIONS[-1](X)).tolist()
    made["through a function"] = np.asarray(through_a_function(X)).tolist()
    made["inside XLA"] = np.asarray(inside_xla(X)).tolist()
    made["fit"] = fit()
    made["moved"] = moved()
    print(json.dumps(made))


main()
