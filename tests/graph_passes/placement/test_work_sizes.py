"""Sizes of work, worked out from static shapes of which a dimension may be unknown."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf
from graph_text import graph, inferred_shapes

from graph_passes.functions.call_tree import CallTrees, node_types_with
from graph_passes.functions.inlining import Inlined
from graph_passes.ir.view import view_graph
from graph_passes.placement.work_sizes import UNKNOWN_DIMENSION, UNKNOWN_ELEMENTS, WorkSizes
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
    Curve,
    OpCost,
)
from tf_amp.hosts.function_shapes import static_shapes

FLOPS = OpCost("flops", Curve((1,), (1.0,)), Curve((1,), (1.0,)))


def sizes_of(function, *shapes):
    """The sizes of a function's graph, and the numbers of its nodes by name."""
    specs = [tf.TensorSpec(shape) for shape in shapes]
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    view = view_graph(graph.as_graph_def(), static_shapes(graph))
    return WorkSizes(view), view.index


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
    ("transpose", "variant"),
    [({}, ""), ({"transpose_a": True}, ""), ({"transpose_b": True}, TRANSPOSED)],
)
def test_reading_the_second_matrix_by_columns_is_a_variant(transpose, variant):
    function = lambda x, y: tf.matmul(x, y, name="z", **transpose)  # noqa: E731
    sizes, index = sizes_of(function, (8, 8), (8, 8))
    assert sizes.variant(index["z"]) == variant


@pytest.mark.parametrize(("other", "variant"), [((8,), BROADCAST), ((3, 8), "")])
def test_reading_a_smaller_tensor_is_a_variant(other, variant):
    sizes, index = sizes_of(lambda x, y: tf.add(x, y, name="z"), (3, 8), other)
    assert sizes.variant(index["z"]) == variant


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
    for name in ("forward", "to_input", "to_filter"):
        assert sizes.size(index[name], FLOPS) == 2 * (2 * 2 * 2 * 2 * 5) * 3 * 3 * 3 * 3
        assert sizes.variant(index[name]) == STRIDED


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
    ("weights", "variant", "counted"),
    [
        ((3, 3, 5, 7), "", 3 * 3 * 5),
        ((1, 1, 5, 7), POINTWISE, 5),
        ((1, 3, 5, 7), "", 3 * 5),
        ((None, 3, 5, 7), "", UNKNOWN_DIMENSION * 3 * 5),
        (None, "", None),
    ],
)
def test_a_convolution_sums_over_a_window(weights, variant, counted):
    def function(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        strides = [1, 1, 1, 1]
        return tf.raw_ops.Conv2D(input=x, filter=w, strides=strides, padding="SAME", name="y")

    sizes, index = sizes_of(function, (2, 8, 8, 5), weights)
    assert sizes.variant(index["y"]) == variant
    made = 2 * 8 * 8 * 7
    assert sizes.size(index["y"], FLOPS) == (None if counted is None else 2 * made * counted)
    assert sizes.sides(index["y"]) == (() if counted is None else (5, 7))


def test_a_depthwise_convolution_sums_over_one_channel():
    def function(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.DepthwiseConv2dNative(
            input=x, filter=w, strides=[1, 1, 1, 1], padding="SAME", name="y"
        )

    sizes, index = sizes_of(function, (2, 8, 8, 5), (3, 3, 5, 2))
    assert sizes.size(index["y"], FLOPS) == 2 * (2 * 8 * 8 * 10) * 3 * 3


def convolution_and_gradients(op, weights, stride=1, *, side=8, data_format="NHWC"):
    """The sizes of the three ops of a convolution of 8 x 8 pixels, and the number of each."""
    depthwise = op.startswith("Depthwise")

    def image(count: int, length: int, channels: int) -> tuple[int, ...]:
        if data_format == "NCHW":
            return (count, channels, length, length)
        return (count, length, length, channels)

    common = {
        "strides": image(1, stride, 1),
        "padding": "SAME",
        "data_format": data_format,
        "name": "y",
    }
    shape = image(2, side, weights[2] if depthwise else 32)
    made = image(2, -(-side // stride), weights[2] if depthwise else weights[3])
    forward, to_input, to_filter = (
        functools.partial(getattr(tf.raw_ops, op + end), **common)
        for end in ("", "BackpropInput", "BackpropFilter")
    )
    for function, one, other in (
        (lambda x, w: forward(input=x, filter=w), shape, weights),
        (lambda w, dy: to_input(input_sizes=shape, filter=w, out_backprop=dy), weights, made),
        (lambda x, dy: to_filter(input=x, filter_sizes=weights, out_backprop=dy), shape, made),
    ):
        sizes, index = sizes_of(function, one, other)
        yield sizes, index["y"]


@pytest.mark.parametrize(
    ("side", "stride", "variant"),
    [(1, 1, POINTWISE), (3, 1, ""), (3, 2, STRIDED), (5, 1, WIDE), (7, 2, WIDE_STRIDED)],
)
def test_wide_filters_make_depthwise_convolutions_others(side, stride, variant):
    op, weights = "DepthwiseConv2dNative", (side, side, 5, 1)
    for sizes, number in convolution_and_gradients(op, weights, stride):
        assert sizes.variant(number) == variant


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
        assert sizes.variant(number) == variant
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
        assert sizes.variant(number, by_layout=True) == variant
        assert sizes.variant(number) not in {
            CHANNELS_FIRST,
            CHANNELS_FIRST_DEEP,
            CHANNELS_FIRST_POINTWISE,
        }
    for sizes, number in convolution_and_gradients(op, weights, stride, side=side):
        assert sizes.variant(number, by_layout=True) == sizes.variant(number)


def test_an_image_of_unknown_sides_is_not_taken_for_a_large_one():
    def function(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        common = {"strides": [1] * 4, "padding": "SAME", "data_format": "NCHW", "name": "y"}
        return tf.raw_ops.Conv2D(input=x, filter=w, **common)

    for shape in ((2, 32, None, None), None):
        sizes, index = sizes_of(function, shape, (3, 3, 32, 128))
        assert sizes.variant(index["y"], by_layout=True) == CHANNELS_FIRST


@pytest.mark.parametrize("data_format", ["NDHWC", "NCDHW"])
def test_volumes_have_a_layout_as_well(data_format):
    def function(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        common = {"strides": [1] * 5, "padding": "SAME", "data_format": data_format, "name": "y"}
        return tf.raw_ops.Conv3D(input=x, filter=w, **common)

    sizes, index = sizes_of(function, (2, 8, 8, 8, 8), (1, 1, 1, 8, 8))
    variant = CHANNELS_FIRST if data_format == "NCDHW" else POINTWISE
    assert sizes.variant(index["y"], by_layout=True) == variant
    assert sizes.variant(index["y"]) == POINTWISE


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
    assert sizes.variant(index["y"]) == variant


def test_what_makes_a_tensor_of_unknown_rank_has_no_variant():
    sizes, index = sizes_of(lambda x, y: tf.add(x, y, name="z"), None, (8,))
    assert sizes.variant(index["z"]) == ""


def test_outputs_that_no_shape_is_given_for_have_no_size():
    view = view_graph(graph("x = Placeholder(dtype=float32, shape=[8])"), lambda _: ())
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
    views = {tree: view_graph(graph_def, node_types=node_types_with(library.get))}
    (layer,) = tree.calls[0].callees
    view = inlined.view(views, {tree: inferred_shapes(graph_def), layer: None})
    sizes = WorkSizes(view)
    assert sizes.elements(view.index["layer@1/a"]) == 64
    assert sizes.elements(view.index["layer@1/b"]) is None
