"""Sizes of work, worked out from static shapes of which a dimension may be unknown."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from graph_text import graph, inferred_shapes
from sized_graphs import sizes_of

from graph_passes.functions.call_tree import CallTrees, node_types_with
from graph_passes.functions.inlining import Inlined
from graph_passes.ir.view import view_body
from graph_passes.placement.work_sizes import LANES, UNKNOWN_DIMENSION, UNKNOWN_ELEMENTS, WorkSizes
from graph_passes.policy.cost_table import (
    Curve,
    OpCost,
)

FLOPS = OpCost("flops", Curve((1,), (1.0,)), Curve((1,), (1.0,)))


@pytest.mark.parametrize(("batch", "counted"), [(5, 5), (None, UNKNOWN_DIMENSION)])
def test_an_axis_made_of_several_counts_for_all_of_them(batch, counted):
    def merge(x: tf.Tensor) -> tf.Tensor:
        rows = tf.reshape(x, [-1, 4], name="rows")
        return tf.matmul(rows, rows, transpose_a=True, name="product")

    sizes, index = sizes_of(merge, (batch, 6, 7, 4))
    assert sizes.elements(index["rows"]) == counted * 6 * 7 * 4
    assert sizes.size(index["product"], FLOPS) == 2 * 4 * 4 * counted * 6 * 7


def test_what_is_known_less_of_does_not_tell_what_is_known_more_of():
    def split(x: tf.Tensor) -> tf.Tensor:
        parts = tf.reshape(x, [-1, 6, 4], name="parts")
        rows = tf.reshape(parts, [-1, 4], name="rows")
        return tf.matmul(rows, rows, transpose_a=True, name="product")

    sizes, index = sizes_of(split, (None, None))
    assert sizes.elements(index["rows"]) == UNKNOWN_DIMENSION * 6 * 4
    assert sizes.size(index["product"], FLOPS) == 2 * 4 * 4 * UNKNOWN_DIMENSION * 6


@pytest.mark.parametrize("channels", [4, 2])
def test_an_axis_made_of_several_that_are_not_known_counts_for_all_of_them(channels):
    def merge(x: tf.Tensor) -> tf.Tensor:
        rows = tf.reshape(x, [-1, channels], name="rows")
        return tf.matmul(rows, rows, transpose_a=True, name="product")

    sizes, index = sizes_of(merge, (None, None, 4))
    assert sizes.elements(index["rows"]) == UNKNOWN_DIMENSION**2 * 4
    assert sizes.size(index["product"], FLOPS) == 2 * 4 * channels * UNKNOWN_DIMENSION**2


def test_the_rows_of_a_list_are_those_of_all_its_elements():
    """A loop gives a product behind it the rows of all rounds."""

    def multiply() -> tf.Tensor:
        shape, lengths = [-1, 4], tf.constant([], tf.int64)
        rounds = tf.raw_ops.EmptyTensorList(
            element_shape=shape, max_num_elements=-1, element_dtype=tf.float32
        )
        rows = tf.raw_ops.TensorListConcatV2(
            input_handle=rounds,
            element_shape=shape,
            leading_dims=lengths,
            element_dtype=tf.float32,
            name="rows",
        ).tensor
        return tf.matmul(rows, rows, transpose_a=True, name="product")

    sizes, index = sizes_of(multiply)
    assert sizes.elements(index["rows"]) == UNKNOWN_DIMENSION**2 * 4
    assert sizes.size(index["product"], FLOPS) == 2 * 4 * 4 * UNKNOWN_DIMENSION**2


@pytest.mark.parametrize(("batch", "counted"), [(5, 5), (None, UNKNOWN_DIMENSION)])
def test_rows_of_several_axes_reach_both_gradients_of_a_dense_layer(batch, counted):
    weights = tf.constant(1.0, shape=(6, 7))

    def gradients(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch([x, weights])
            y = tf.tensordot(x, weights, 1)
        return tape.gradient(y, [x, weights], output_gradients=2 * y)

    sizes, index = sizes_of(gradients, (batch, 4, 6))
    products = [number for name, number in index.items() if "MatMul" in name.rpartition("/")[2]]
    assert [sizes.size(number, FLOPS) for number in products] == [2 * 4 * counted * 6 * 7] * 3
    made = sorted(sizes.elements(number) for number in products)
    assert made == sorted([4 * counted * 7, 4 * counted * 6, 6 * 7])


@pytest.mark.parametrize("combine", [tf.multiply, tf.matmul])
def test_sums_that_broadcasting_calls_for_have_the_operands_sizes_and_mostly_no_work(combine):
    def gradients(x: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch([x, factors])
            y = combine(x, factors)
        return tape.gradient(y, [x, factors])

    sizes, index = sizes_of(gradients, (None, 4, 6, 6), (None, 1, 6, 6))
    sums = [number for name, number in index.items() if "/Sum" in name]
    of_x, of_factors = UNKNOWN_DIMENSION * 4 * 6 * 6, UNKNOWN_DIMENSION * 6 * 6
    elements = OpCost("elements", FLOPS.float32, FLOPS.low)
    assert [sizes.elements(number) for number in sums] == [of_x, of_factors]
    assert [sizes.size(number, elements) for number in sums] == [0, of_x]
    sizes, index = sizes_of(gradients, None, None)
    assert [sizes.size(number, elements) for name, number in index.items() if "/Sum" in name] == (
        [None, None]
    )


def test_a_sum_over_written_axes_has_the_size_of_no_operand():
    def add_up(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        shape = tf.shape(x)
        axes = tf.constant(0)
        # The first that reads anything behind the axes.
        return tf.cast(shape, tf.float32), tf.raw_ops.Sum(input=y, axis=axes, name="sum")

    sizes, index = sizes_of(add_up, (None, 8), None)
    assert sizes.elements(index["sum"]) is None


def test_float32_tensors_of_several_nodes_are_told_at_once():
    def function(x: tf.Tensor) -> tf.Tensor:
        first, second = tf.raw_ops.Split(axis=1, value=x, num_split=2, name="halves")
        ids = tf.cast(tf.add_n([second, first, second], name="sum"), tf.int32, name="ids")
        return tf.gather(x, ids, name="rows")

    sizes, index = sizes_of(function, (3, 8))
    x, halves, total, ids = (index[name] for name in ("x", "halves", "sum", "ids"))
    second = halves + len(index)
    numbers = np.array([ids, total, halves])
    for found, expected in (
        (sizes.read(numbers), [(ids, total), *((total, t) for t in (second, halves, second)),
                               (halves, x)]),
        (sizes.written(numbers), [(total, total), (halves, halves), (halves, second)]),
    ):  # fmt: skip
        tensors, places = found
        assert list(zip(numbers[places], tensors, strict=True)) == expected
    assert sizes.counted(np.array([second, x, second])).tolist() == [12, 24, 12]


def test_a_shape_of_unknown_rank_has_no_size():
    sizes, index = sizes_of(lambda x: tf.nn.relu(x, name="y"), None)
    assert sizes.elements(index["y"]) is None
    assert sizes.counted(np.array([index["y"]])) == [UNKNOWN_ELEMENTS]


@pytest.mark.parametrize(
    ("equation", "counted"),
    [
        ("bij,jk->bik", 2 * 3 * 4 * 5 * 6),
        ("bij,jk->bk", 2 * 3 * 4 * 5 * 6),
        ("...j,jk->...k", None),
    ],
)
def test_an_einsum_multiplies_for_every_combination_of_labels(equation, counted):
    def function(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.Einsum(inputs=[x, y], equation=equation, name="z")

    sizes, index = sizes_of(function, (3, 4, 5), (5, 6))
    assert sizes.size(index["z"], FLOPS) == counted
    sizes, index = sizes_of(function, (None, 4, 5), (5, 6))
    unknown = None if counted is None else counted // 3 * UNKNOWN_DIMENSION
    assert sizes.size(index["z"], FLOPS) == unknown


def test_a_convolution_of_volumes_and_its_gradients_have_equal_work():
    def function(x: tf.Tensor, weights: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        attrs = {"strides": [1, 2, 2, 2, 1], "padding": "SAME"}
        raw = tf.raw_ops
        raw.Conv3D(input=x, filter=weights, name="forward", **attrs)
        raw.Conv3DBackpropInputV2(
            input_sizes=[2, 4, 4, 4, 3], filter=weights, out_backprop=y, name="to_input", **attrs
        )
        return raw.Conv3DBackpropFilterV2(
            input=x, filter_sizes=[3, 3, 3, 3, 5], out_backprop=y, name="to_filter", **attrs
        )

    sizes, index = sizes_of(function, (2, 4, 4, 4, 3), (3, 3, 3, 3, 5), (2, 2, 2, 2, 5))
    work = 2 * (2 * 2 * 2 * 2) * 5 * 3 * 3 * 3 * 3
    for name, channels in (("forward", 5), ("to_input", 3), ("to_filter", 5)):
        assert sizes.flops(index[name]) == work
        assert sizes.size(index[name], FLOPS) == work // channels * LANES


@pytest.mark.parametrize(
    ("left", "right", "attrs", "counted"),
    [
        ((3, 5), (5, 7), {}, 2 * 3 * 7 * 5),
        ((5, 3), (5, 7), {"transpose_a": True}, 2 * 3 * 7 * 5),
        ((2, 3, 5), (2, 5, 7), {}, 2 * 2 * 3 * 7 * 5),
        ((2, 5, 3), (2, 5, 7), {"transpose_a": True}, 2 * 2 * 3 * 7 * 5),
        ((None, None), (5, 7), {}, 2 * (UNKNOWN_DIMENSION**2 // 5) * 5 * 7),
        (None, (5, 7), {}, None),
    ],
)
def test_a_product_sums_over_one_axis_of_its_first_factor(left, right, attrs, counted):
    function = lambda x, y: tf.matmul(x, y, name="z", **attrs)  # noqa: E731
    sizes, index = sizes_of(function, left, right)
    assert sizes.size(index["z"], FLOPS) == counted


@pytest.mark.parametrize(
    ("left", "right", "attrs", "expected"),
    [
        ((3, 5), (5, 7), {}, (3, 5, 7)),
        ((5, 3), (5, 7), {"transpose_a": True}, (3, 5, 7)),
        ((2, None, 5), (2, 5, 7), {}, (None, 5, 7)),
        (None, (5, 7), {}, ()),
    ],
)
def test_a_product_has_three_sides(left, right, attrs, expected):
    function = lambda x, y: tf.matmul(x, y, name="z", **attrs)  # noqa: E731
    sizes, index = sizes_of(function, left, right)
    assert sizes.sides(index["z"]) == expected


@pytest.mark.parametrize(
    ("weights", "counted"),
    [
        ((3, 3, 5, 7), 3 * 3 * 5),
        ((1, 1, 5, 7), 5),
        ((1, 3, 5, 7), 3 * 5),
        ((None, 3, 5, 7), UNKNOWN_DIMENSION * 3 * 5),
        (None, None),
    ],
)
def test_a_convolution_sums_over_a_window(weights, counted):
    def function(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        strides = [1, 1, 1, 1]
        return tf.raw_ops.Conv2D(input=x, filter=w, strides=strides, padding="SAME", name="y")

    sizes, index = sizes_of(function, (2, 8, 8, 5), weights)
    for channels, measured in (
        (7, sizes.flops(index["y"])),
        (LANES, sizes.size(index["y"], FLOPS)),
    ):
        made = 2 * 8 * 8 * channels
        assert measured == (None if counted is None else 2 * made * counted)
    assert sizes.sides(index["y"]) == (() if counted is None else (5, 7))


@pytest.mark.parametrize(("channels", "lanes"), [(1, 16), (16, 16), (17, 32), (64, 64), (0, 0)])
def test_the_channels_that_a_convolution_makes_fill_all_lanes(channels: int, lanes: int) -> None:
    def function(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.Conv2D(input=x, filter=w, strides=[1] * 4, padding="SAME", name="y")

    sizes, index = sizes_of(function, (2, 8, 8, 5), (1, 1, 5, channels))
    assert sizes.size(index["y"], FLOPS) == 2 * (2 * 8 * 8 * lanes) * 5


def test_a_depthwise_convolution_sums_over_one_channel():
    def function(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.DepthwiseConv2dNative(
            input=x, filter=w, strides=[1, 1, 1, 1], padding="SAME", name="y"
        )

    sizes, index = sizes_of(function, (2, 8, 8, 5), (3, 3, 5, 2))
    assert sizes.size(index["y"], FLOPS) == 2 * (2 * 8 * 8 * 10) * 3 * 3


def test_outputs_that_no_shape_is_given_for_have_no_size():
    view = view_body(graph("x = Placeholder(dtype=float32, shape=[8])"), lambda _: ())
    assert WorkSizes(view).elements(0) is None


def test_an_argument_has_the_size_of_what_the_calling_node_takes():
    graph_def = graph("""
        def layer(a: float32):
            b = MatMul(a, a)
            return b

        x = Placeholder(dtype=float32, shape=[8, 8])
        y = MatMul(x, x)
        call = PartitionedCall(y, Tout=[float32], f=layer)
    """)
    library = {function.signature.name: function for function in graph_def.library.function}
    tree = CallTrees(library.get, lambda op: op == "MatMul", graph_def).build(graph_def)
    inlined = Inlined(tree)
    views = {tree: view_body(graph_def, node_types=node_types_with(library.get))}
    (layer,) = tree.calls[0].callees
    view = inlined.view(views, {tree: inferred_shapes(graph_def), layer: None})
    sizes = WorkSizes(view)
    assert sizes.elements(view.index["layer@1/a"]) == 64
    assert sizes.elements(view.index["layer@1/b"]) is None
