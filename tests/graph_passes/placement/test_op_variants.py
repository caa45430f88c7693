"""Which variant of its op a node is, by attributes and static shapes."""

from __future__ import annotations

import dataclasses

import pytest
import tensorflow as tf
from sized_graphs import convolution_and_gradients, sizes_of

from graph_passes.placement.op_variants import OpVariants
from graph_passes.policy.cost_table import (
    BROADCAST,
    CHANNELS_FIRST,
    CHANNELS_FIRST_DEEP,
    CHANNELS_FIRST_POINTWISE,
    GROUPED,
    GROUPED_WIDE,
    POINTWISE,
    RAGGED,
    STRIDED,
    TRANSPOSED,
    WIDE,
    WIDE_STRIDED,
)
from graph_passes.policy.cost_table_files import shipped_table


def variant_of(sizes, number, *, by_layout=False):
    table = shipped_table("cpu-avx512_bf16", "bfloat16")
    return OpVariants(sizes, dataclasses.replace(table, compiled=not by_layout)).of(number)


@pytest.mark.parametrize(
    ("transpose", "variant"),
    [({}, ""), ({"transpose_a": True}, ""), ({"transpose_b": True}, TRANSPOSED)],
)
def test_reading_the_second_matrix_by_columns_is_a_variant(transpose, variant):
    function = lambda x, y: tf.matmul(x, y, name="z", **transpose)  # noqa: E731
    sizes, index = sizes_of(function, (8, 8), (8, 8))
    assert variant_of(sizes, index["z"]) == variant


@pytest.mark.parametrize(("other", "variant"), [((8,), BROADCAST), ((3, 8), "")])
def test_reading_a_smaller_tensor_is_a_variant(other, variant):
    sizes, index = sizes_of(lambda x, y: tf.add(x, y, name="z"), (3, 8), other)
    assert variant_of(sizes, index["z"]) == variant


@pytest.mark.parametrize(
    ("weights", "stride", "variant"),
    [
        ((3, 3, 5, 7), 1, ""),
        ((1, 1, 5, 7), 1, POINTWISE),
        ((1, 1, 5, 7), 2, STRIDED),
        ((1, 3, 5, 7), 1, ""),
        ((None, 3, 5, 7), 1, ""),
        ((3, 3, 3, 5, 7), 2, STRIDED),
        (None, 1, ""),
        (None, 2, STRIDED),
    ],
)
def test_strides_and_filters_of_one_pixel_make_convolutions_others(weights, stride, variant):
    axes = len(weights or (3, 3, 5, 7)) - 2
    convolution = tf.raw_ops.Conv2D if axes == 2 else tf.raw_ops.Conv3D

    def function(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        strides = [1, *[stride] * axes, 1]
        return convolution(input=x, filter=w, strides=strides, padding="SAME", name="y")

    sizes, index = sizes_of(function, (2, *[8] * axes, 5), weights)
    assert variant_of(sizes, index["y"]) == variant


@pytest.mark.parametrize(
    ("side", "stride", "variant"),
    [(1, 1, POINTWISE), (3, 1, ""), (3, 2, STRIDED), (5, 1, WIDE), (7, 2, WIDE_STRIDED)],
)
def test_wide_filters_make_depthwise_convolutions_others(side, stride, variant):
    op, weights = "DepthwiseConv2dNative", (side, side, 5, 1)
    for sizes, number in convolution_and_gradients(op, weights, stride):
        assert variant_of(sizes, number) == variant


@pytest.mark.parametrize(
    ("side", "stride", "group", "variant"),
    [
        (3, 1, 4, GROUPED),
        (3, 2, 1, GROUPED),
        (7, 1, 1, GROUPED_WIDE),
        (3, 1, 16, ""),
        (3, 2, 16, STRIDED),
        (3, 1, 32, ""),
    ],
)
def test_small_groups_make_convolutions_others(side, stride, group, variant):
    weights = (side, side, group, 64)
    for sizes, number in convolution_and_gradients("Conv2D", weights, stride):
        assert variant_of(sizes, number) == variant
        assert sizes.flops(number) == 2 * (2 * (8 // stride) ** 2 * 64) * side**2 * group


@pytest.mark.parametrize(
    ("op", "weights", "stride", "side", "variant"),
    [
        ("Conv2D", (3, 3, 32, 64), 1, 8, CHANNELS_FIRST),
        ("Conv2D", (3, 3, 32, 128), 1, 8, CHANNELS_FIRST_DEEP),
        ("Conv2D", (3, 3, 32, 128), 2, 8, CHANNELS_FIRST_DEEP),
        ("Conv2D", (3, 3, 32, 128), 1, 7, CHANNELS_FIRST),
        ("Conv2D", (5, 5, 32, 128), 1, 8, CHANNELS_FIRST),
        ("Conv2D", (1, 1, 32, 8), 1, 8, CHANNELS_FIRST_POINTWISE),
        ("Conv2D", (1, 1, 32, 128), 2, 8, CHANNELS_FIRST_POINTWISE),
        ("Conv2D", (3, 3, 4, 64), 1, 8, CHANNELS_FIRST),
        ("DepthwiseConv2dNative", (3, 3, 128, 1), 1, 8, CHANNELS_FIRST),
        ("DepthwiseConv2dNative", (5, 5, 128, 1), 2, 8, CHANNELS_FIRST),
        ("DepthwiseConv2dNative", (1, 1, 128, 1), 1, 8, CHANNELS_FIRST),
    ],
)
def test_channels_that_come_first_make_convolutions_others(op, weights, stride, side, variant):
    convolutions = convolution_and_gradients(op, weights, stride, side=side, data_format="NCHW")
    for sizes, number in convolutions:
        assert variant_of(sizes, number, by_layout=True) == variant
        assert variant_of(sizes, number) not in {
            CHANNELS_FIRST,
            CHANNELS_FIRST_DEEP,
            CHANNELS_FIRST_POINTWISE,
        }
    for sizes, number in convolution_and_gradients(op, weights, stride, side=side):
        assert variant_of(sizes, number, by_layout=True) == variant_of(sizes, number)


def test_an_image_of_unknown_sides_is_not_taken_for_a_large_one():
    def function(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        common = {"strides": [1] * 4, "padding": "SAME", "data_format": "NCHW", "name": "y"}
        return tf.raw_ops.Conv2D(input=x, filter=w, **common)

    for shape in ((2, 32, None, None), None):
        sizes, index = sizes_of(function, shape, (3, 3, 32, 128))
        assert variant_of(sizes, index["y"], by_layout=True) == CHANNELS_FIRST


@pytest.mark.parametrize("data_format", ["NDHWC", "NCDHW"])
def test_volumes_have_a_layout_as_well(data_format):
    def function(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        common = {"strides": [1] * 5, "padding": "SAME", "data_format": data_format, "name": "y"}
        return tf.raw_ops.Conv3D(input=x, filter=w, **common)

    sizes, index = sizes_of(function, (2, 8, 8, 8, 8), (1, 1, 1, 8, 8))
    variant = CHANNELS_FIRST if data_format == "NCDHW" else POINTWISE
    assert variant_of(sizes, index["y"], by_layout=True) == variant
    assert variant_of(sizes, index["y"]) == POINTWISE


@pytest.mark.parametrize(
    ("shape", "data_format", "variant"),
    [
        ((2, 8, 8, 64), "NHWC", ""),
        ((2, 8, 8, 72), "NHWC", RAGGED),
        ((2, 16, 8, 9), "NCHW", ""),
        ((2, 9, 8, 16), "NCHW", RAGGED),
        ((2, 8, 8, None), "NHWC", ""),
        (None, "NHWC", ""),
    ],
)
def test_channels_that_fill_no_register_make_a_batch_normalization_another(
    shape, data_format, variant
):
    def function(x: tf.Tensor, scale: tf.Tensor) -> tuple[tf.Tensor, ...]:
        made = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=scale, offset=scale, mean=[], variance=[], data_format=data_format, name="y"
        )
        return made[0], made[1]

    sizes, index = sizes_of(function, shape, (None,))
    assert variant_of(sizes, index["y"]) == variant


def test_what_makes_a_tensor_of_unknown_rank_has_no_variant():
    sizes, index = sizes_of(lambda x, y: tf.add(x, y, name="z"), None, (8,))
    assert variant_of(sizes, index["z"]) == ""
