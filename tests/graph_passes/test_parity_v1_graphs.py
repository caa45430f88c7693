"""Parity mode on graphs of layers, loops and gradients built with TensorFlow 1's interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graph_diff import added, retyped
from oracle import Oracle
from parity import assert_parity
from v1_graphs import fetch, v1, v1_graph

Builder = Callable[[], tuple[str, ...]]

BUILDERS: dict[str, tuple[Builder, str, str]] = {}
"""Name -> builder, nodes that must be converted, dtypes in which that holds."""


def expect(low: str, dtypes: str = "float16 bfloat16") -> Callable[[Builder], Builder]:
    """Registers a builder with the nodes that must be converted."""

    def register(build: Builder) -> Builder:
        BUILDERS[build.__name__] = (build, low, dtypes)
        return build

    return register


def values(*shape: int) -> tf.Tensor:
    """A constant of fixed random values."""
    return tf.constant(np.random.RandomState(sum(shape)).uniform(0.1, 1, shape), tf.float32)


def conv(x: tf.Tensor, filters: int = 6) -> tf.Tensor:
    return tf.nn.conv2d(x, values(3, 3, x.shape[-1], filters), strides=1, padding="SAME")


def batch_norm(x: tf.Tensor) -> tf.Tensor:
    size = x.shape[-1]
    return v1.nn.fused_batch_norm(x, values(size), values(size))[0]


def conv_pool(x: tf.Tensor) -> tf.Tensor:
    y = tf.nn.relu(tf.nn.bias_add(conv(x), values(6)))
    return tf.nn.max_pool2d(y, 2, 2, "SAME")


def matmul_act(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.relu(tf.matmul(x, values(*x.shape[::-1])))


def with_gradients(loss: tf.Tensor, *sources: tf.Tensor) -> tuple[str, ...]:
    """Fetches a tensor and the gradients of its sum."""
    return fetch(loss, *tf.gradients(tf.reduce_sum(loss), list(sources)))


@expect("Conv2D FusedBatchNormV3 Conv2D_1")
def conv_bn() -> tuple[str, ...]:
    return fetch(batch_norm(conv(batch_norm(conv(values(2, 8, 8, 1))))))


@expect("Conv3D Conv3D_1")
def conv3d_bn() -> tuple[str, ...]:
    x = values(2, 4, 4, 4, 1)
    for size in (1, 6):
        x = tf.nn.conv3d(x, values(3, 3, 3, size, 6), strides=[1] * 5, padding="SAME")
        x = v1.nn.fused_batch_norm(x, values(6), values(6), data_format="NDHWC")[0]
    return fetch(x)


@expect("Conv3D grad/Conv3D_grad/Conv3DBackpropInputV2 grad/Conv3D_grad/Conv3DBackpropFilterV2")
def conv3d_gradients() -> tuple[str, ...]:
    x, w = values(2, 4, 4, 4, 1), values(3, 3, 3, 1, 6)
    y = tf.nn.conv3d(x, w, strides=[1] * 5, padding="SAME")
    return fetch(y, *tf.gradients(y, [x, w], name="grad"))


@expect("Conv2D FusedBatchNormV3 addition Conv2D_1")
def conv_bn_dropout() -> tuple[str, ...]:
    x = values(2, 8, 8, 1)
    y = v1.nn.dropout(batch_norm(conv(x)), rate=0.5)
    y = tf.add(y, 1.0, name="addition")
    y = batch_norm(conv(y))
    return fetch(y, *v1.train.GradientDescentOptimizer(0.01).compute_gradients(y, [x])[0])


@expect("Conv2D Relu MaxPool2d Conv2D_1")
def conv_and_pool() -> tuple[str, ...]:
    return fetch(conv_pool(conv_pool(values(2, 8, 8, 1))))


@expect(
    "depthwise grad/depthwise_grad/DepthwiseConv2dNativeBackpropInput "
    "grad/depthwise_grad/DepthwiseConv2dNativeBackpropFilter"
)
def depthwise_gradients() -> tuple[str, ...]:
    x, w = values(2, 8, 8, 3), values(3, 3, 3, 2)
    y = tf.nn.depthwise_conv2d(x, w, strides=[1] * 4, padding="SAME", name="depthwise")
    return fetch(y, *tf.gradients(y, [x, w], name="grad"))


@expect("while/MatMul while/Relu")
def simple_loop() -> tuple[str, ...]:
    x = values(8, 8)
    y = tf.while_loop(lambda i, _: i < 4, lambda i, y: (i + 1, matmul_act(y)), (0, x))[1]
    return with_gradients(y, x)


@expect("while/MatMul while/Relu while/MatMul_1 while/Relu_1")
def loop_that_swaps_two_states() -> tuple[str, ...]:
    x = values(8, 8)

    def body(i: tf.Tensor, s: tf.Tensor, t: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return i + 1, matmul_act(t), matmul_act(s)

    _, s, t = tf.while_loop(lambda i, *_: i < 4, body, (0, x, tf.nn.relu(x)))
    return with_gradients(s + t, x)


@expect("split Conv2D Conv2D_5 Relu Relu_5 MaxPool2d MaxPool2d_5 concat", "float16")
def many_paths() -> tuple[str, ...]:
    x = values(2, 8, 8, 3)
    parts = [conv_pool(conv_pool(part)) for part in tf.split(x, 3, axis=3)]
    return with_gradients(tf.concat(parts, axis=0), x)


@expect("MatMul Relu MatMul_1 Relu_1")
def two_paths_and_a_sum() -> tuple[str, ...]:
    x = values(8, 8)
    y1, y2 = matmul_act(x), matmul_act(x)
    return with_gradients(y1 + y2 + x, x)


@expect(
    "while/concat while/MatMul while/split while/Sigmoid while/Sigmoid_1 while/Sigmoid_2 "
    "while/Tanh while/Tanh_1",
    "float16",
)
def recurrent_lstm() -> tuple[str, ...]:
    steps, w = values(5, 2, 4), values(8, 16)
    array = v1.TensorArray(tf.float32, size=5).unstack(steps)
    output = v1.TensorArray(tf.float32, size=5)

    def body(i: tf.Tensor, h: tf.Tensor, c: tf.Tensor, out: Any) -> tuple[Any, ...]:
        gates = tf.matmul(tf.concat([array.read(i), h], 1), w)
        gate, forget, take, new = tf.split(gates, 4, axis=1)
        c = tf.sigmoid(forget) * c + tf.sigmoid(take) * tf.tanh(new)
        h = tf.sigmoid(gate) * tf.tanh(c)
        return i + 1, h, c, out.write(i, h)

    state = tf.zeros([2, 4])
    loop = tf.while_loop(lambda i, *_: i < 5, body, (0, state, state, output))
    return with_gradients(loop[3].stack(), w, steps)


@expect("MatMul")
def function_with_its_own_gradient() -> tuple[str, ...]:
    from tensorflow.python.framework import function

    @function.Defun(tf.float32, tf.float32)
    def swish_gradient(x: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
        s = tf.sigmoid(x)
        return dy * (s + x * s * (1 - s))

    @function.Defun(tf.float32, grad_func=swish_gradient, noinline=True)
    def swish(x: tf.Tensor) -> tf.Tensor:
        return x * tf.sigmoid(x)

    x = values(8, 8)
    y = swish(matmul_act(x), name="swish")
    y.set_shape([8, 8])
    return with_gradients(y, x)


@expect("adam/loop/MatMul adam/loop/grad/adam/loop/MatMul_grad/MatMul_1")
def training_inside_a_loop() -> tuple[str, ...]:
    x, y = values(8, 4), values(8, 1)
    with v1.variable_scope("net", use_resource=False):
        w = v1.get_variable("w", [4, 1])
    adam = v1.train.AdamOptimizer(0.01)
    with v1.variable_scope("adam", use_resource=False):

        def body(i: tf.Tensor) -> tf.Tensor:
            loss = tf.reduce_mean((tf.matmul(x, w) - y) ** 2)
            (gradient,) = tf.gradients(loss, [w], name="grad")
            with tf.control_dependencies([adam.apply_gradients([(gradient, w)])]):
                return i + 1

        steps = v1.while_loop(lambda i: i < 100, body, [0], name="loop")
    return fetch(steps)


@expect("MatMul MatMul_1")
def variables_by_reference() -> tuple[str, ...]:
    x = values(8, 4)
    with v1.variable_scope("net", use_resource=False):
        w, v = v1.get_variable("w", [4, 16]), v1.get_variable("v", [16, 1])
    loss = tf.reduce_mean(tf.matmul(tf.nn.relu(tf.matmul(x, w)), v) ** 2)
    step = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
    return (step.name, *fetch(loss))


@expect("MatMul MatMul_1")
def resource_variables() -> tuple[str, ...]:
    x = v1.placeholder(tf.float32, [None, 4])
    with v1.variable_scope("net", use_resource=True):
        w, v = v1.get_variable("w", [4, 16]), v1.get_variable("v", [16, 1])
    loss = tf.reduce_mean(tf.matmul(tf.nn.relu(tf.matmul(x, w)), v) ** 2)
    step = v1.train.AdamOptimizer(0.1).minimize(loss)
    return (x.op.name, step.name, *fetch(loss))


@pytest.mark.parametrize("name", BUILDERS)
def test_graph_of_layers(oracle: Oracle, name: str) -> None:
    build, low, dtypes = BUILDERS[name]
    with v1_graph() as graph:
        fetches = build()
    before = graph.as_graph_def()
    after = assert_parity(oracle, before, fetches).proto
    if oracle.mode.target_dtype in dtypes.split():
        assert set(low.split()) <= {slot.node for slot in retyped(before, after)}


@pytest.mark.parametrize(
    ("name", "casts_to_low", "casts_to_float32"), [("conv_bn", 3, 1), ("conv_and_pool", 5, 1)]
)
def test_number_of_casts_each_way(
    start_oracle: Callable[[str], Oracle], name: str, casts_to_low: int, casts_to_float32: int
) -> None:
    oracle = start_oracle("float16")
    with v1_graph() as graph:
        fetches = BUILDERS[name][0]()
    report = assert_parity(oracle, graph.as_graph_def(), fetches).report
    assert (report.casts_to_low, report.casts_to_float32) == (casts_to_low, casts_to_float32)


# Letters: W a product (allow), G an addition (infer), C a Relu (clear), B powers (deny).
# A capital must be converted, a small letter must not.
LETTERS: dict[str, Callable[[tf.Tensor, str], tf.Tensor]] = {
    "w": lambda x, name: tf.matmul(x, values(8, 8), name=name),
    "g": lambda x, name: tf.add(x, 0.1, name=name),
    "c": lambda x, name: tf.nn.relu(x, name=name),
    "b": lambda x, name: tf.pow(tf.pow(x, 2.0), 0.5, name=name),
}
LOOPS = {
    "W,C,C": 3,
    "C,C,W": 3,
    "W,G,W": 5,
    "W,gbg,W": 6,
    "b,gWC,c": 3,
    "b,CWCG,C": 4,
    "C,GWCG,C": 5,
    "C,CgbgWC,g": 5,
}


def letters(x: tf.Tensor, text: str, part: str) -> tf.Tensor:
    """Applies the ops that letters stand for, named by their place."""
    for place, letter in enumerate(text):
        x = LETTERS[letter.lower()](x, f"{part}{place}")
    return x


def letter_loop(text: str) -> tuple[str, ...]:
    """Ops before a loop, in its body, and after it."""
    before, body, after = text.split(",")
    x = letters(values(8, 8), before, "before")
    x = tf.while_loop(
        lambda i, _: i < 8, lambda i, x: (i + 1, letters(x, body, "body")), (0, x), name="loop"
    )[1]
    return fetch(letters(x, after, "after"))


@pytest.mark.parametrize("text", LOOPS)
def test_colours_through_a_loop(oracle: Oracle, text: str) -> None:
    with v1_graph() as graph:
        fetches = letter_loop(text)
    before = graph.as_graph_def()
    after = assert_parity(oracle, before, fetches).proto
    low = {slot.node for slot in retyped(before, after)}
    for part, name in zip(text.split(","), ("before", "loop/body", "after"), strict=True):
        for place, letter in enumerate(part):
            assert (f"{name}{place}" in low) == letter.isupper(), f"{name}{place}"
    assert len(added(before, after)) == LOOPS[text]


@pytest.mark.parametrize("text", LOOPS)
def test_colours_in_the_body_of_a_functional_loop(
    start_oracle: Callable[[str], Oracle], text: str
) -> None:
    """Each body is rewritten for itself and keeps its float32 signature.

    In bfloat16 the oracle breaks such graphs; see the table of differences.
    """
    with v1_graph(functional_loops=True) as graph:
        fetches = letter_loop(text)
    assert_parity(start_oracle("float16"), graph.as_graph_def(), fetches)
