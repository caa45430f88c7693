"""Sums of gradients over their leading axes: what takes their place, and what they come to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
import training_steps
from cpu_units import bfloat16_product_error
from keras import layers
from traced_graphs import Traced, node_types, of_op, trace

from graph_passes import PrecisionConfig, rewrite_function_def, rewrite_graph_def
from graph_passes.policy.config import ListEdit
from graph_passes.policy.cost_table_files import shipped_table
from tf_amp.hosts.function_shapes import static_shapes

FLOAT = tf.float32.as_datatype_enum
BFLOAT16 = tf.bfloat16.as_datatype_enum
# Graphs as small as these are not worth their Casts.
PAINTED = frozenset(("cast-cut",))
CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU", disabled_rules=PAINTED)
GPU = PrecisionConfig(target_dtype="float16", device="GPU")


def product_of(dy: tf.Tensor) -> tf.Tensor:
    """A product that reads a gradient, as that for the weights does."""
    channels = dy.shape[-1] if dy.shape.rank and dy.shape[-1] else 8
    rows = tf.reshape(dy, [-1, channels])
    return tf.matmul(tf.ones([channels, 4]), rows, transpose_a=True, transpose_b=True)


def gradients(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """What a layer with a bias makes of its gradient: a product, and a sum for the bias."""
    return product_of(dy), tf.raw_ops.BiasAddGrad(out_backprop=dy, name="bias") * 1.0


def spec(*shape: int | None) -> tf.TensorSpec:
    return tf.TensorSpec(shape)


SHAPES = {
    "rank 4": (spec(16, 16, 32, 8), (16, 16, 32, 8)),
    "rank 4, unknown batch": (spec(None, 16, 16, 8), (9, 16, 16, 8)),
    "rank 4, many channels": (spec(None, 16, 16, 64), (9, 16, 16, 64)),
    "rank 2": (spec(4096, 8), (4096, 8)),
    "rank 2, unknown batch": (spec(None, 512), (48, 512)),
    "rank 3, unknown batch and length": (spec(None, None, 8), (40, 100, 8)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_product_with_ones_adds_up_in_float32(name):
    shape, size = SHAPES[name]
    traced = trace(gradients, shape)
    assert node_types(traced.find(CPU)) == ["ones-product"]
    result = traced.rewrite(CPU)
    after = result.graph_def
    assert not of_op(after, "BiasAddGrad")
    assert result.report.products.total() == 1  # the program's own
    assert sum(remark.is_product for remark in result.remarks().remarks) == 1
    products = of_op(after, "MatMul")
    assert len(products) == 2
    assert all(product.attr["T"].type == BFLOAT16 for product in products)
    argument = traced.arguments[0].partition(":")[0]
    casts = [(cast.input[0], cast.attr["DstT"].type) for cast in of_op(after, "Cast")]
    sums = {"MatMul", *(f"bias/ones_product/{each}" for each in ("MatMul", "parts", "channels"))}
    assert {maker for maker, dtype in casts if dtype == FLOAT} <= sums
    assert casts.count((argument, BFLOAT16)) == 1

    dy = np.random.default_rng(0).normal(0.2, 1.0, size).astype(np.float32)
    found = traced.run(after, dy)[1]
    exact = np.float64(tf.cast(dy, tf.bfloat16)).reshape(-1, size[-1])
    # One rounding of the result, and 0.1 % of what BiasAddGrad of bfloat16 may be off by.
    allowed = bfloat16_product_error() * 2**-8 * np.abs(exact.sum(0)) + 1e-3 * np.abs(exact).sum(0)
    assert found.shape == (size[-1],)
    assert (np.abs(found - exact.sum(0)) <= allowed).all()


@pytest.mark.parametrize(
    ("shape", "rows_in_one"),
    [
        ((None, 64, 32, 32), 32),
        ((16, 64, 26, 16), 26),
        ((16, 400, 8), 100),
        ((64, 127, 16), 127),
        ((64, 131, 16), 1),
        ((None, 64, 32, 33), 1),
        ((None, 64, None, 8), 1),
        ((1 << 14, 8), 1),
    ],
)
def test_several_rows_of_few_channels_are_one(
    shape: tuple[int | None, ...], rows_in_one: int
) -> None:
    traced = trace(gradients, spec(*shape))
    found = traced.find(CPU)
    assert node_types(found) == ["ones-product"]
    sizes = [16 if size is None else size for size in shape]
    dy = np.random.default_rng(1).normal(0.2, 1.0, sizes).astype(np.float32)
    np.testing.assert_allclose(
        traced.run(found.proto, dy)[1], traced.run(traced.graph_def, dy)[1], rtol=1e-3
    )
    nodes = {node.name: node for node in found.proto.node}
    (product,) = [node for node in of_op(found.proto, "MatMul") if "ones_product" in node.name]
    if len(shape) > 2:
        length = tf.make_ndarray(nodes[nodes[product.input[1]].input[1]].attr["value"].tensor)
        assert length.tolist() == [-1, rows_in_one * shape[-1]]
    assert ("bias/ones_product/parts" in nodes) is (rows_in_one > 1)


def test_the_replacement_computes_the_same_in_float32():
    for shape, size in SHAPES.values():
        traced = trace(gradients, shape)
        dy = np.random.default_rng(1).normal(0.2, 1.0, size).astype(np.float32)
        before = traced.run(traced.graph_def, dy)
        after = traced.run(traced.find(CPU).proto, dy)
        np.testing.assert_allclose(after[1], before[1], rtol=1e-4)


OTHER_CONFIGS = {
    "on a GPU BiasAddGrad itself goes low": GPU,
    "parity": dataclasses.replace(CPU, parity=True),
    "float16": dataclasses.replace(CPU, target_dtype="float16"),
    "bfloat16 on a GPU": dataclasses.replace(CPU, device="GPU"),
    "switched off": dataclasses.replace(CPU, disabled_rules=frozenset(("ones-product",))),
    "a compiler fuses the Cast": dataclasses.replace(CPU, fused=True),
    "products stay float32": dataclasses.replace(
        CPU, list_edits=(ListEdit(list_name="allow", action="remove", op="MatMul"),)
    ),
    "told to deny": dataclasses.replace(
        CPU, list_edits=(ListEdit(list_name="deny", action="add", op="BiasAddGrad"),)
    ),
}


@pytest.mark.parametrize("case", OTHER_CONFIGS)
def test_a_product_with_ones_is_for_bfloat16_on_a_cpu(case):
    assert not trace(gradients, spec(4096, 8)).find(OTHER_CONFIGS[case]).units


def test_a_product_with_ones_is_none_where_convolutions_alone_go_low():
    def convolution(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x = tf.ones([2, 64, 64, 3])
        filters = tf.raw_ops.Conv2DBackpropFilter(
            input=x, filter_sizes=[1, 1, 3, 8], out_backprop=dy, strides=[1] * 4, padding="SAME"
        )
        return filters, tf.raw_ops.BiasAddGrad(out_backprop=dy) * 1.0

    traced = trace(convolution, spec(2, 64, 64, 8))
    assert traced.find(CPU).units
    assert not traced.find(OTHER_CONFIGS["products stay float32"]).units


def no_product(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.matmul(tf.ones([8, 8]), tf.ones([8, 8])), tf.raw_ops.BiasAddGrad(out_backprop=dy) + dy


def other_layout(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return product_of(dy), tf.raw_ops.BiasAddGrad(out_backprop=dy, data_format="NCHW") * 1.0


def product_elsewhere(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    with tf.device("/GPU:0"):
        weight = tf.matmul(dy, dy, transpose_a=True)
    return weight, tf.raw_ops.BiasAddGrad(out_backprop=dy) * 1.0


def sum_elsewhere(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    weight = tf.matmul(dy, dy, transpose_a=True)
    with tf.device("/GPU:0"):
        return weight, tf.raw_ops.BiasAddGrad(out_backprop=dy) * 1.0


def waited_for(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    total = tf.raw_ops.BiasAddGrad(out_backprop=dy)
    with tf.control_dependencies([total]):
        return product_of(dy) * 1.0, total * 1.0


def double(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return product_of(dy), tf.raw_ops.BiasAddGrad(out_backprop=tf.cast(dy, tf.float64)) * 1.0


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (no_product, (4096, 8)),
        (gradients, (4095, 8)),
        (gradients, (None, 248)),
        (gradients, (None, None)),
        (gradients, None),
        (other_layout, (64, 64, 8)),
        (product_elsewhere, (4096, 8)),
        (sum_elsewhere, (4096, 8)),
        (waited_for, (4096, 8)),
        (double, (4096, 8)),
    ],
)
def test_a_gradient_that_need_not_go_low_is_left_alone(function, shape):
    assert not trace(function, tf.TensorSpec(shape)).find(CPU).units


@pytest.mark.parametrize(("rows", "found"), [(32, []), (2048, ["ones-product"])])
def test_a_batch_that_was_seen_counts(rows: int, found: list[str]) -> None:
    traced = trace(gradients, spec(None, 16))
    assert node_types(traced.find(dataclasses.replace(CPU, unknown_dimension=rows))) == found


def test_a_preserved_sum_is_left_alone():
    traced = trace(gradients, spec(4096, 8))
    assert traced.find(CPU).units
    assert not traced.find(CPU, ["bias"]).units


def test_a_product_that_is_fetched_keeps_float32_and_lowers_nothing():
    traced = trace(lambda dy: (tf.matmul(dy, dy, transpose_a=True, name="w"), dy), spec(4096, 8))
    assert not traced.find(CPU, ["w"]).units


def heads(batch: int | None) -> Traced:
    """The gradient of a bias of 4 heads of 16 channels."""

    def step(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        flowing = tf.reshape(tf.matmul(rows, tf.eye(64)), [-1, 80, 4, 16])
        flowing.set_shape([batch, 80, 4, 16])
        dy = tf.raw_ops.ReluGrad(gradients=flowing, features=tf.ones_like(flowing))
        total = tf.reduce_sum(dy, [0, 1], keepdims=True)
        return product_of(dy), tf.reshape(total, [4, 16]) * 1.0

    return trace(step, spec(batch and 80 * batch, 64))


@pytest.mark.parametrize("batch", [8, None])
@pytest.mark.parametrize(
    ("config", "op", "kind"),
    [(CPU, "MatMul", "ones-product"), (GPU, "BiasAddGrad", "bias-gradient")],
)
def test_a_bias_of_heads_is_summed_in_the_target_dtype(batch, config, op, kind):
    traced = heads(batch)
    assert node_types(traced.find(config)) == [kind]
    after = traced.rewrite(config).graph_def
    assert not of_op(after, "Sum")
    added = [node for node in of_op(after, op) if "Sum" in node.name]
    assert [node.attr["T"].type for node in added] == [config.target]
    dy = np.random.default_rng(2).normal(0.2, 1.0, (640, 64)).astype(np.float32)
    found = traced.run(traced.find(config).proto, dy)[1]
    np.testing.assert_allclose(found, np.float64(dy).sum(0).reshape(4, 16), rtol=1e-4)


def summed(
    axes: list[int], target: list[int], *, keep: bool = True, make: Callable[..., tf.Tensor]
) -> Traced:
    """A sum of what is made of an argument, reshaped to some shape, beside a product."""

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        dy = make(x)
        flat = tf.reshape(dy, [-1, 64])
        total = tf.reduce_sum(dy, axes, keepdims=keep)
        return tf.matmul(flat, flat, transpose_a=True), tf.reshape(total, target) * 1.0

    return trace(step, spec(8, 80, 4, 16))


def relu_gradient(x: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.ReluGrad(gradients=x, features=x)


def convolution_gradient(x: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.Conv2DBackpropInput(
        input_sizes=[8, 80, 4, 16],
        filter=tf.ones([1, 1, 16, 16]),
        out_backprop=x,
        strides=[1, 1, 1, 1],
        padding="SAME",
    )


def norm_gradient(x: tf.Tensor) -> tf.Tensor:
    ones = tf.ones([16])
    return tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=x,
        x=x,
        scale=ones,
        reserve_space_1=ones,
        reserve_space_2=ones,
        reserve_space_3=0.0,
    ).x_backprop


def loss_gradient(x: tf.Tensor) -> tf.Tensor:
    labels = tf.zeros([8 * 80 * 4], tf.int32)
    loss = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(
        features=tf.reshape(x, [-1, 16]), labels=labels
    )
    return tf.reshape(loss.backprop, [8, 80, 4, 16])


def repeated_gradient(x: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(x)
    axes = tf.raw_ops.BroadcastGradientArgs(s0=shape, s1=shape).r0
    return tf.reshape(tf.reduce_sum(x, axes), [8, 80, 4, 16])


def loss(x: tf.Tensor) -> tf.Tensor:
    labels = tf.zeros([8 * 80, 4, 16])
    made = tf.nn.softmax_cross_entropy_with_logits(labels, tf.reshape(x, [8 * 80, 4, 16]))
    return tf.reshape(made, [8, 80, 4, 1]) * tf.ones([16])


@pytest.mark.parametrize(
    "make", [relu_gradient, convolution_gradient, norm_gradient, loss_gradient, repeated_gradient]
)
def test_what_differentiation_makes_shows_that_a_sum_is_a_gradient(make):
    assert "ones-product" in node_types(summed([0, 1], [4, 16], make=make).find(CPU))


@pytest.mark.parametrize(
    ("axes", "target", "is_bias"),
    [
        ([0, 1], [4, 16], True),
        ([1, 0], [1, 4, 16], True),
        ([0, 1, 2], [16], True),
        ([0, 2], [80, 16], False),  # not the leading axes
        ([1], [8, 4, 16], False),
        ([0, 1, 2, 3], [], False),
        ([0, 1], [16, 4], False),  # the shape of no bias of this gradient
        ([0, 1], [64], False),
        ([0, 1], [2, 2, 16], False),
    ],
)
def test_a_sum_over_leading_axes_to_the_shape_of_a_bias_is_replaced(axes, target, is_bias):
    traced = summed(axes, target, make=relu_gradient)
    assert bool(traced.find(CPU).units) is is_bias
    assert bool(traced.find(GPU).units) is is_bias


@pytest.mark.parametrize(
    ("keep", "make"),
    [(True, tf.nn.relu), (True, loss), (False, relu_gradient)],
    ids=["relu", "loss", "axes are not kept"],
)
def test_sums_that_may_be_a_models_own_are_left_alone(keep, make):
    traced = summed([0, 1], [4, 16], keep=keep, make=make)
    for config in (CPU, GPU):
        assert not {"ones-product", "bias-gradient"} & {*node_types(traced.find(config))}


def test_a_bias_of_one_channel_is_summed_low_as_others_are():
    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        dy = relu_gradient(x)
        total = tf.reduce_sum(dy, 0, keepdims=True)
        return product_of(dy), tf.reshape(total, [1]) * 1.0

    assert trace(step, spec(64, 1)).find(GPU).units == ("bias-gradient: Sum",)


def test_control_inputs_go_to_the_replacement():
    def step(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.control_dependencies([tf.debugging.check_numerics(dy, "dy", name="check")]):
            return gradients(dy)

    traced = trace(step, spec(4096, 8))
    after = traced.find(CPU).proto
    added = [node for node in after.node if "ones_product" in node.name]
    assert any("^check" in node.input for node in added)


def test_a_sum_in_a_loop_of_tensorflow_1_stays_in_its_frame():
    with tf.Graph().as_default() as graph:
        tf.compat.v1.disable_control_flow_v2()
        try:
            dy = tf.compat.v1.placeholder(tf.float32, [None, 16, 256], name="dy")

            def body(step: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                scaled = dy * 0.5
                flat = tf.reshape(scaled, [-1, 256])
                weight = tf.matmul(flat, flat, transpose_a=True)
                total += tf.raw_ops.BiasAddGrad(out_backprop=scaled) + 0.0 * weight[0]
                return step + 1, total

            start = [tf.constant(0), tf.zeros([256])]
            result = tf.compat.v1.while_loop(lambda step, _: step < 3, body, start)[1]
            result = tf.identity(result, "result")
        finally:
            tf.compat.v1.enable_control_flow_v2()
    traced = Traced(graph.as_graph_def(), ("dy:0",), ("result:0",), static_shapes(graph))
    assert of_op(traced.graph_def, "Enter")
    assert node_types(traced.find(CPU)) == ["ones-product"]
    value = np.random.default_rng(3).normal(0.5, 1.0, (20, 16, 256)).astype(np.float32)
    (found,) = traced.run(traced.rewrite(CPU).graph_def, value)
    np.testing.assert_allclose(found, 1.5 * np.float64(value).sum((0, 1)), rtol=2e-2)


@pytest.mark.parametrize("batch", [16, None])
def test_costs_leave_a_sum_with_the_products_beside_it(batch):
    """The batch is merged with other axes: the cost of the sum must not forget those."""

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        dy = tf.nn.conv2d(x, tf.ones([3, 3, 64, 64]) / 576, 1, "SAME")
        filters = tf.raw_ops.Conv2DBackpropFilter(
            input=x,
            filter_sizes=[3, 3, 64, 64],
            out_backprop=dy,
            strides=[1, 1, 1, 1],
            padding="SAME",
        )
        return filters * 1.0, tf.raw_ops.BiasAddGrad(out_backprop=dy) * 1.0

    traced = trace(step, spec(batch, 32, 32, 64))
    costs = shipped_table("cpu-avx512_bf16", "bfloat16")
    alone = frozenset(("cast-cut", "filter-gradient"))
    config = dataclasses.replace(CPU, cost_table=costs, disabled_rules=alone)
    after = traced.rewrite(config).graph_def
    ones = [node for node in of_op(after, "MatMul") if "ones_product" in node.name]
    assert [node.attr["T"].type for node in ones] == [BFLOAT16]
    assert of_op(after, "Conv2D")[0].attr["T"].type == BFLOAT16


def biased_cnn() -> keras.Model:
    inputs = keras.Input((32, 32, 4))
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(inputs)
    x = layers.Conv2D(16, 3, strides=2)(x)
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def dense_net() -> keras.Model:
    inputs = keras.Input((16,))
    x = layers.Dense(4096, activation="relu")(inputs)
    return keras.Model(inputs, layers.Dense(3)(layers.Dense(8)(x)))


@pytest.mark.parametrize("batch", [8, None])
@pytest.mark.parametrize("build", [biased_cnn, dense_net])
def test_training_steps_of_keras_sum_biases_in_bfloat16(build, batch):
    step = training_steps.trace(build, batch)
    result = rewrite_function_def(step.function_def, CPU, shapes=step.shapes)
    assert result.failure is None and result.changed
    nodes = {node.name: node for node in result.proto.node_def}
    ones = [n for n in nodes.values() if n.op == "MatMul" and "ones_product" in n.name]
    assert ones
    assert all(node.attr["T"].type == BFLOAT16 for node in ones)
    for node in ones:
        rows = nodes[node.input[1].partition(":")[0]]
        assert rows.op != "Cast"
    before, _ = step.train(step.graph_def, 4)
    low = rewrite_graph_def(step.graph_def, CPU, preserve=step.preserve, shapes=step.shapes)
    after, _ = step.train(low.graph_def, 4)
    np.testing.assert_allclose(after, before, rtol=0.02)
