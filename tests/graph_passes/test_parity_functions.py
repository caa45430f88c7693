"""Parity mode on what tf.function makes of models: training steps, branches, loops, calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from graph_diff import retyped
from oracle import Oracle
from parity import assert_parity
from tensorflow.core.framework import graph_pb2

MODELS: dict[str, Callable[[], Any]] = {}


def model(build: Callable[[], Any]) -> Callable[[], Any]:
    """Registers a builder of a tf.function, to be traced without arguments."""
    MODELS[build.__name__] = build
    return build


def traced(function: Any) -> tuple[graph_pb2.GraphDef, tuple[str, ...]]:
    """The graph of a tf.function and the nodes that running it fetches."""
    graph = tf.function(function).get_concrete_function().graph
    fetches = [tensor.op.name for tensor in graph.outputs if tensor is not None]
    return graph.as_graph_def(), (*fetches, *(op.name for op in graph.control_outputs))


def training_step(layers: Any, x: tf.Tensor, optimizer: Any) -> Callable[[], tf.Tensor]:
    """One training step of a Keras model, in either of the two packages."""
    layers(x)
    optimizer.build(layers.trainable_variables)

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layers(x, training=True)))
        gradients = tape.gradient(loss, layers.trainable_variables)
        optimizer.apply_gradients(zip(gradients, layers.trainable_variables, strict=True))
        return loss

    return step


@model
def branch_of_a_condition() -> Any:
    w = tf.Variable(tf.ones([8, 8]))

    def step() -> tf.Tensor:
        x = tf.matmul(w, w)
        x = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.nn.relu(tf.matmul(x, w)), lambda: tf.exp(x))
        return tf.matmul(x, w)

    return step


@model
def gradient_of_a_branch() -> Any:
    w = tf.Variable(tf.ones([8, 8]))

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            x = tf.cond(tf.reduce_sum(w) > 0, lambda: tf.matmul(w, w), lambda: tf.tanh(w))
            loss = tf.reduce_sum(tf.matmul(x, w))
        return tape.gradient(loss, w)

    return step


@model
def calls_of_functions() -> Any:
    w = tf.Variable(tf.ones([8, 8]))

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(tf.matmul(x, w))

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(inner(inner(w)))
        return tape.gradient(loss, w)

    return step


@model
def keras_network_with_batch_norm() -> Any:
    import keras

    layers = keras.Sequential(
        [
            keras.layers.Conv2D(4, 3),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3),
        ]
    )
    return training_step(layers, tf.ones([2, 8, 8, 1]), keras.optimizers.Adam())


@model
def keras_attention() -> Any:
    import keras

    x = keras.Input([6, 8])
    y = keras.layers.MultiHeadAttention(2, 4)(x, x)
    y = keras.layers.LayerNormalization()(x + y)
    y = keras.layers.Dense(8, activation="gelu")(y)
    layers = keras.Model(x, y)
    return training_step(layers, tf.ones([2, 6, 8]), keras.optimizers.SGD(momentum=0.9))


@model
def keras_recurrent_network() -> Any:
    import keras

    layers = keras.Sequential([keras.layers.LSTM(4), keras.layers.Dense(2)])
    return training_step(layers, tf.ones([2, 5, 3]), keras.optimizers.SGD())


@model
def tf_keras_network_with_batch_norm() -> Any:
    import tf_keras

    layers = tf_keras.Sequential(
        [
            tf_keras.layers.Conv2D(4, 3),
            tf_keras.layers.BatchNormalization(),
            tf_keras.layers.ReLU(),
            tf_keras.layers.Flatten(),
            tf_keras.layers.Dense(3),
        ]
    )
    return training_step(layers, tf.ones([2, 8, 8, 1]), tf_keras.optimizers.Adam())


@pytest.mark.parametrize("name", MODELS)
def test_function_of_a_model(oracle: Oracle, name: str) -> None:
    graph_def, fetches = traced(MODELS[name]())
    result = assert_parity(oracle, graph_def, fetches)
    assert retyped(graph_def, result.proto)


def test_loop_of_products(start_oracle: Callable[[str], Oracle]) -> None:
    """A body is converted for itself; the bfloat16 oracle breaks such graphs."""
    w = tf.Variable(tf.ones([8, 8]))

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            _, x = tf.while_loop(
                lambda i, _: i < 3, lambda i, x: (i + 1, tf.tanh(tf.matmul(x, w))), (0, w)
            )
            loss = tf.reduce_sum(x)
        return tape.gradient(loss, w)

    graph_def, fetches = traced(step)
    result = assert_parity(start_oracle("float16"), graph_def, fetches)
    functions = {slot.function for slot in retyped(graph_def, result.proto)}
    assert any("while_body" in name for name in functions)
