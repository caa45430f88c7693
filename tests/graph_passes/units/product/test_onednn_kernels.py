"""Which ops name oneDNN's kernels in float32, and that they make what the others make."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from traced_graphs import Traced, node_types, trace

from graph_passes import PrecisionConfig
from graph_passes.units.product.onednn_kernels import RULE

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="builds for other processors have no such kernels"
)

FLOAT32 = PrecisionConfig(target_dtype="bfloat16", device="CPU", converts=False)
OFF = dataclasses.replace(FLOAT32, disabled_rules=frozenset((RULE,)))
Function = Callable[..., Any]


def gradients(function: Function) -> Function:
    """What a tape makes of a function, for all that it takes."""

    def step(*tensors: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = function(*tensors)
        # Not the gradient of a sum alone: one that differs from place to place.
        ramp = tf.reshape(tf.range(tf.size(value), dtype=tf.float32) % 7.0, tf.shape(value))
        return value, *tape.gradient(value, tensors, ramp)

    return step


def convolution(**attrs: Any) -> Function:
    return lambda x, w: tf.nn.conv2d(x, w, **{"strides": 1, "padding": "SAME", **attrs})


def volumes(x: Any, w: Any) -> Any:
    return tf.nn.conv3d(x, w, (1, 2, 2, 2, 1), "SAME")


def depthwise(x: Any, w: Any) -> Any:
    return tf.nn.depthwise_conv2d(x, w, (1, 1, 1, 1), "SAME")


def pooling(**attrs: Any) -> Function:
    return lambda x: tf.nn.max_pool2d(x, **{"ksize": 3, "strides": 2, "padding": "SAME", **attrs})


def normalized(x: Any, gamma: Any, beta: Any) -> Any:
    return tf.compat.v1.nn.fused_batch_norm(x, gamma, beta)[0]


def by_primitives(x: Any, w: Any, gamma: Any, beta: Any) -> Any:
    """As Keras 3 writes it; the rule `batch-norm` makes the op of which this one is the kernel."""
    x = convolution()(x, w)
    mean, variance = tf.nn.moments(x, (0, 1, 2))
    return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-3)


def layer(x: Any, w: Any) -> Any:
    return tf.nn.bias_add(x @ w, tf.range(256.0))


def tied(x: Any, w: Any) -> Any:
    return tf.matmul(x, w, transpose_b=True)


def attention(x: Any) -> Any:
    return tf.matmul(tf.nn.softmax(tf.matmul(x, tf.sin(x), transpose_b=True)), x)


def attention_of_keras(x: Any) -> Any:
    scores = tf.einsum("btnh,bsnh->bnts", x, tf.sin(x))
    return tf.einsum("bnts,bsnh->btnh", tf.nn.softmax(scores), x)


IMAGES, FILTER = (8, 16, 16, 64), (3, 3, 64, 64)
OF_INPUT, OF_FILTER = "_MklNativeConv2DBackpropInput", "_MklNativeConv2DBackpropFilter"
OF_NORM = "_MklNativeFusedBatchNormGradV3"
POOLING = ["_MklNativeMaxPool", "_MklNativeMaxPoolGrad"]
FOUND: dict[str, tuple[Function, list[tuple[int, ...]], list[str]]] = {
    "SAME": (convolution(), [IMAGES, FILTER], [OF_FILTER, OF_INPUT]),
    "VALID": (convolution(padding="VALID"), [IMAGES, FILTER], [OF_FILTER, OF_INPUT]),
    "strides": (convolution(strides=2), [(32, *IMAGES[1:]), FILTER], [OF_FILTER, OF_INPUT]),
    "volumes": (
        volumes,
        [(4, 16, 16, 16, 16), (3, 3, 3, 16, 32)],
        [f"_MklNativeConv3D{part}" for part in ("", "BackpropFilterV2", "BackpropInputV2")],
    ),
    "depthwise": (
        depthwise,
        [(8, 32, 32, 32), (3, 3, 32, 1)],
        [f"_MklNativeDepthwiseConv2dNative{part}" for part in ("", "BackpropInput")],
    ),
    "depthwise with more channels": (
        depthwise,
        [(8, 32, 32, 32), (3, 3, 32, 2)],
        [f"_MklNativeDepthwiseConv2dNative{part}" for part in ("", "BackpropInput")],
    ),
    "pooling": (pooling(), [IMAGES], POOLING),
    "pooling by halves": (pooling(ksize=2, padding="VALID"), [IMAGES], POOLING),
    "normalization": (normalized, [IMAGES, (64,), (64,)], [OF_NORM]),
    "layer": (layer, [(64, 256), (256, 256)], ["_MklMatMul"]),
    "tied": (tied, [(64, 256), (128, 256)], ["_MklMatMul"]),
    "attention": (
        attention,
        [(16, 128, 64)],
        [*["_MklBatchMatMulV2"] * 6, "_MklSoftmax"],
    ),
    "einsum": (
        attention_of_keras,
        [(4, 128, 4, 64)],
        [*["_MklEinsum"] * 6, "_MklSoftmax"],
    ),
    "means": (
        lambda x: tf.nn.avg_pool2d(x, 3, 1, "SAME"),
        [IMAGES],
        ["_MklNativeAvgPool"],
    ),
    "primitives": (by_primitives, [(24, 8, 8, 64), (1, 1, 64, 64), (64,), (64,)], [OF_NORM]),
}


def traced(name: str, batch: int | None) -> tuple[Traced, list[tuple[int, ...]], list[str]]:
    function, shapes, ops = FOUND[name]
    known = [(batch, *shapes[0][1:]), *shapes[1:]]
    return trace(gradients(function), *map(tf.TensorSpec, known)), shapes, ops


def named(graph_def: Any) -> list[str]:
    return sorted(node.op for node in graph_def.node if node.op.startswith("_Mkl"))


@pytest.mark.parametrize("batch", ["known", "unknown"])
@pytest.mark.parametrize("name", FOUND)
def test_it_makes_what_the_other_kernel_makes(name: str, batch: str) -> None:
    program, shapes, ops = traced(name, FOUND[name][1][0][0] if batch == "known" else None)
    after = program.rewrite(FLOAT32).graph_def
    assert named(after) == ops
    assert {node.attr["_kernel"].s for node in after.node if node.op.startswith("_Mkl")} == {
        b"MklNameChangeOp"
    }
    draw = np.random.default_rng(0)
    values = [draw.normal(size=shape).astype(np.float32) for shape in shapes]
    before = program.run(program.graph_def, *values)
    for old, new in zip(before, program.run(after, *values), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-5 * np.abs(old).max())


@pytest.mark.parametrize("name", FOUND)
def test_a_batch_without_rows(name: str) -> None:
    program, shapes, _ = traced(name, None)
    after = program.rewrite(FLOAT32).graph_def
    values = [np.zeros(shape, np.float32) for shape in [(0, *shapes[0][1:]), *shapes[1:]]]
    before = program.run(program.rewrite(OFF).graph_def, *values)
    for old, new in zip(before, program.run(after, *values), strict=True):
        assert new.shape == old.shape
        # Of a depthwise filter without images TensorFlow leaves the memory as it finds it.
        if not name.startswith("depthwise"):
            np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("size", [2, 3])
def test_of_equal_elements_the_same_one_has_the_gradient(size: int) -> None:
    program = trace(gradients(pooling(ksize=size)), tf.TensorSpec(IMAGES))
    values = np.random.default_rng(0).integers(0, 3, IMAGES).astype(np.float32)
    after = program.rewrite(FLOAT32).graph_def
    assert named(after) == POOLING
    for old, new in zip(
        program.run(program.graph_def, values), program.run(after, values), strict=True
    ):
        np.testing.assert_array_equal(new, old)


LEFT: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "little to do": (convolution(), [(1, 8, 8, 32), (3, 3, 32, 32)]),
    "few pixels": (pooling(), [(1, 8, 8, 32)]),
    "few channels": (normalized, [(8, 8, 8, 32), (32,), (32,)]),
    "few rows": (layer, [(4, 256), (256, 256)]),
    "one row": (layer, [(1, 4096), (4096, 256)]),
    "one query": (tf.matmul, [(64, 8, 1, 128), (64, 8, 128, 128)]),
    "small matrices": (attention, [(512, 16, 16)]),
    "one matrix": (attention_of_keras, [(1, 128, 1, 64)]),
    "six axes": (tf.nn.softmax, [(2, 2, 2, 2, 2, 20000)]),
    "explicit padding": (
        convolution(padding=[[0, 0], [2, 1], [1, 2], [0, 0]]),
        [IMAGES, FILTER],
    ),
    "doubles": (
        lambda x, w: tf.cast(
            tf.nn.conv2d(tf.cast(x, tf.float64), tf.cast(w, tf.float64), 1, "SAME"), tf.float32
        ),
        [IMAGES, FILTER],
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_stays(name: str) -> None:
    function, shapes = LEFT[name]
    program = trace(gradients(function), *map(tf.TensorSpec, shapes))
    assert not named(program.rewrite(FLOAT32).graph_def)


def test_a_matrix_for_several_stays() -> None:
    program = trace(tf.matmul, tf.TensorSpec((8, 4, 128, 64)), tf.TensorSpec((4, 64, 128)))
    assert not named(program.rewrite(FLOAT32).graph_def)


def test_what_grappler_has_a_product_turn_itself() -> None:
    """It knows no product by another name, and would leave the Transpose where it is."""
    program = trace(lambda x: x @ tf.transpose(x, [0, 2, 1]), tf.TensorSpec((16, 128, 64)))
    assert not named(program.rewrite(FLOAT32).graph_def)
    heads = trace(lambda x: x @ tf.transpose(x, [1, 0, 2]), tf.TensorSpec((64, 64, 64)))
    assert named(heads.rewrite(FLOAT32).graph_def) == ["_MklBatchMatMulV2"]


@pytest.mark.parametrize(
    "config",
    [OFF, PrecisionConfig(target_dtype="bfloat16", device="CPU"), PrecisionConfig(parity=True)],
    ids=["switched off", "bfloat16", "parity"],
)
def test_it_is_a_rule_for_float32(config: PrecisionConfig) -> None:
    program, _, _ = traced("SAME", 8)
    assert not named(program.rewrite(config).graph_def)


def test_a_pooling_whose_gradient_must_stay() -> None:
    """As where somebody fetches it: its name is what it goes by."""
    program, _, _ = traced("pooling", 8)
    (gradient,) = [node.name for node in program.graph_def.node if node.op == "MaxPoolGrad"]
    assert not named(program.rewrite(FLOAT32, preserve=(gradient,)).graph_def)


def test_each_is_told() -> None:
    program, _, _ = traced("primitives", 24)
    assert node_types(program.find(FLOAT32)) == ["batch-norm", RULE]


def test_a_normalization_that_stays_is_no_hindrance() -> None:
    """As one of data is, whose mean is subtracted before anything is rounded."""

    def step(x: Any, gamma: Any, beta: Any, w: Any) -> Any:
        mean, variance = tf.nn.moments(x, (0, 1, 2))
        x = tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-3)
        return tf.nn.max_pool2d(convolution()(x, w), 2, 2, "SAME")

    shapes = IMAGES, (64,), (64,), FILTER
    program = trace(gradients(step), *map(tf.TensorSpec, shapes))
    assert {*node_types(program.find(FLOAT32))} == {RULE}
    assert named(program.rewrite(FLOAT32).graph_def) == [OF_FILTER, OF_INPUT, *POOLING]


def test_gradients_of_gradients() -> None:
    def second(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, dx, _ = gradients(lambda x, w: tf.nn.max_pool2d(convolution()(x, w), 2, 2, "VALID"))(
                x, w
            )
            value = tf.reduce_sum(dx * dx)
        return tape.gradient(value, x), value

    program = trace(second, tf.TensorSpec(IMAGES), tf.TensorSpec(FILTER))
    draw = np.random.default_rng(0)
    values = [draw.normal(size=shape).astype(np.float32) for shape in (IMAGES, FILTER)]
    after = program.rewrite(FLOAT32).graph_def
    assert named(after)
    for old, new in zip(
        program.run(program.graph_def, *values), program.run(after, *values), strict=True
    ):
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-5 * np.abs(old).max())
