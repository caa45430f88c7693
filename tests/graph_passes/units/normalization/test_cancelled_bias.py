"""Gradients of biases before a batch normalization: zeros, and where they are none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from traced_graphs import Traced, node_types, of_op, trace

from graph_passes import PrecisionConfig
from graph_passes.units.normalization.cancelled_bias import RULE

CPU = PrecisionConfig(
    target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("cast-cut",))
)
GPU = PrecisionConfig(target_dtype="float16", device="GPU")
CHANNELS = 8
IMAGES = (16, 12, 12, CHANNELS)
random = np.random.default_rng(0)
Norm = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def primitives(x: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    return tf.nn.batch_normalization(x, mean, variance, scale, scale, 1e-3)


def fused(x: tf.Tensor, scale: tf.Tensor, is_training: bool = True) -> tf.Tensor:
    stored = {} if is_training else {"mean": 0.1 * scale, "variance": scale * scale + 0.5}
    return tf.compat.v1.nn.fused_batch_norm(x, scale, scale, is_training=is_training, **stored)[0]


def network(norm: Norm) -> Callable[..., list[tf.Tensor]]:
    """A convolution with a bias and a normalization, all gradients, and the bias's first."""

    def step(x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor, scale: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([x, kernel, bias, scale])
            y = norm(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), bias), scale)
            y = tf.nn.conv2d(tf.nn.relu(y), kernel, 1, "SAME")
        return [*tape.gradient(y, [bias, x, kernel, scale]), y]

    return step


def traced(norm: Norm, batch: int | None = IMAGES[0]) -> Traced:
    shapes = (batch, *IMAGES[1:]), (3, 3, CHANNELS, CHANNELS), (CHANNELS,), (CHANNELS,)
    return trace(network(norm), *map(tf.TensorSpec, shapes))


def given() -> list[np.ndarray]:
    shapes = IMAGES, (3, 3, CHANNELS, CHANNELS), (CHANNELS,), (CHANNELS,)
    x, kernel, bias, scale = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    return [x, kernel / 8, bias, np.abs(scale) + 0.5]


@pytest.mark.parametrize("norm", [primitives, fused])
@pytest.mark.parametrize("config", [CPU, GPU], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("batch", [IMAGES[0], None])
def test_the_gradient_is_zero_and_all_else_is_as_before(
    norm: Norm, config: PrecisionConfig, batch: int | None
) -> None:
    graph, inputs = traced(norm, batch), given()
    fusion = graph.find(config)
    assert RULE in node_types(fusion)
    before, after = (graph.run(each, *inputs) for each in (graph.graph_def, fusion.proto))
    assert not after[0].any()
    assert after[0].shape == before[0].shape
    assert np.abs(before[0]).max() < 1e-4 * np.abs(before[3]).max()  # the rounding of 2304 terms
    for old, new in zip(before[1:], after[1:], strict=True):
        np.testing.assert_allclose(new, old, atol=2e-5 * np.abs(old).max())
    low = graph.rewrite(config).graph_def
    result = graph.results[0].partition(":")[0]
    needed = tf.compat.v1.graph_util.extract_sub_graph(low, [result])
    assert {node.op for node in needed.node} <= {"Const", "Identity"}


def test_without_the_rule_it_is_the_rounding_of_bfloat16() -> None:
    graph, inputs = traced(primitives), given()
    off = dataclasses.replace(CPU, disabled_rules=CPU.disabled_rules | {RULE})
    (exact, *_), (rounded, *_) = (
        graph.run(each, *inputs) for each in (graph.graph_def, graph.rewrite(off).graph_def)
    )
    assert np.abs(rounded).max() > 3 * np.abs(exact).max()


def test_with_a_layer_of_keras_and_channels_first() -> None:
    norm = layers.BatchNormalization(axis=1)
    norm.build((None, CHANNELS, 6, 6))

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        bias = tf.zeros(CHANNELS)
        with tf.GradientTape() as tape:
            tape.watch(bias)
            y = tf.nn.bias_add(tf.matmul(x, x), bias, data_format="NCHW")
            y = tf.matmul(tf.nn.relu(norm(y, training=True)), x)
        return [tape.gradient(y, bias)]

    fusion = trace(step, tf.TensorSpec((16, CHANNELS, 6, 6))).find(GPU)
    assert RULE in node_types(fusion)


STAYING: dict[str, Norm] = {
    "stored statistics": lambda x, scale: fused(x, scale, is_training=False),
    "none": lambda x, scale: x * scale,
    "an activation between": lambda x, scale: primitives(tf.nn.relu(x), scale),
    "another way besides": lambda x, scale: primitives(x, scale) + x,
    "of each example": lambda x, scale: tf.nn.batch_normalization(
        x, *tf.nn.moments(x, [1, 2], keepdims=True), None, scale, 1e-3
    ),
    "of other axes": lambda x, scale: tf.nn.batch_normalization(
        x, *tf.nn.moments(x, [0, 2, 3], keepdims=True), None, None, 1e-3
    ),
    "centred elsewhere": lambda x, scale: tf.nn.batch_normalization(
        x, tf.zeros(CHANNELS), tf.nn.moments(x, [0, 1, 2])[1], scale, scale, 1e-3
    ),
}


@pytest.mark.parametrize("case", STAYING)
def test_another_gradient_stays(case: str) -> None:
    graph, inputs = traced(STAYING[case]), given()
    fusion = graph.find(GPU)
    assert RULE not in node_types(fusion)
    (before, *_), (after, *_) = (
        graph.run(each, *inputs) for each in (graph.graph_def, fusion.proto)
    )
    np.testing.assert_allclose(after, before, atol=3e-4 * np.abs(before).max())


def test_what_is_fed_inside_is_no_gradient_of_it() -> None:
    graph = traced(fused)
    for op in ("FusedBatchNormV3", "FusedBatchNormGradV3"):
        (node,) = of_op(graph.graph_def, op)
        assert RULE not in node_types(graph.find(GPU, preserve=[node.name]))
    graph = traced(primitives)
    for node in of_op(graph.graph_def, "Rsqrt"):
        assert RULE not in node_types(graph.find(GPU, preserve=[node.name]))


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(CPU, parity=True),
        dataclasses.replace(CPU, disabled_rules=CPU.disabled_rules | {RULE}),
    ],
    ids=["parity", "switched off"],
)
def test_where_it_is_off(config: PrecisionConfig) -> None:
    assert RULE not in node_types(traced(primitives).find(config))
