from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras import layers
from layer_graphs import assert_near, low_statistics, trace_layer, whole_numbers
from tensorflow.core.framework import graph_pb2
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2
from traced_graphs import trace

from graph_passes import PrecisionConfig, RewriteResult, rewrite_graph_def
from tf_amp.hosts.function_shapes import static_shapes

CONFIGS = {
    "bfloat16": PrecisionConfig(target_dtype="bfloat16", device="CPU"),
    "float16": PrecisionConfig(target_dtype="float16", device="GPU"),
}
FORMS = {
    "both": {},
    "no scale": {"scale": False},
    "no offset": {"center": False},
    "neither": {"scale": False, "center": False},
    "axis by number": {"axis": 3},
    "axis by number, no scale": {"axis": 3, "scale": False},
}


def network(kind: str = "plain", **options: object) -> keras.Model:
    """A convolution and a batch normalization with statistics that are not 0 and 1."""
    keras.utils.set_random_seed(1)
    normalization = layers.BatchNormalization(**options)
    convolution = {
        "bias": lambda: layers.Conv2D(4, 3),
        "depthwise": lambda: layers.DepthwiseConv2D(3, depth_multiplier=2, use_bias=False),
    }.get(kind, lambda: layers.Conv2D(4, 3, use_bias=False))()
    model = keras.Sequential([keras.Input((6, 6, 3)), convolution, normalization, layers.ReLU()])
    rng = np.random.default_rng(2)
    for weight in (*normalization.weights, *convolution.weights[1:]):
        weight.assign(rng.uniform(0.5, 2.0, weight.shape))
    return model


def traced(model: keras.Model, batch: int | None) -> ConcreteFunction:
    function = tf.function(lambda x: model(x, training=False), autograph=False)
    return function.get_concrete_function(tf.TensorSpec((batch, 6, 6, 3)))


def rewritten(function: ConcreteFunction, config: PrecisionConfig) -> RewriteResult:
    graph = function.graph
    return rewrite_graph_def(
        graph.as_graph_def(),
        config,
        preserve=[t.op.name for t in (*function.inputs, *function.outputs)],
        shapes=static_shapes(graph),
    )


def run(function: ConcreteFunction, graph_def: object, x: np.ndarray) -> np.ndarray:
    names = [tensor.name for tensor in function.inputs]
    pruned = tf.compat.v1.wrap_function(lambda: tf.import_graph_def(graph_def, name=""), []).prune(
        names, function.outputs[0].name
    )
    return pruned(tf.constant(x), *function.captured_inputs).numpy()


def dtypes_of(result: RewriteResult, op: str) -> list[str]:
    nodes = (node for node in result.proto.node if node.op == op)
    return [tf.as_dtype(node.attr["T"].type).name for node in nodes]


def example() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((2, 6, 6, 3), np.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [2, None])
def test_stored_statistics_go_into_one_op(form: str, batch: int | None) -> None:
    function = traced(network(**FORMS[form]), batch)
    result = rewritten(function, CONFIGS["float16"])
    ops = Counter(node.op for node in result.proto.node)
    assert not ops.keys() & {"Rsqrt", "Sub", "AddV2", "Neg"}
    assert dtypes_of(result, "FusedBatchNormV3") == ["float16"]
    (fused,) = (node for node in result.proto.node if node.op == "FusedBatchNormV3")
    assert tf.as_dtype(fused.attr["U"].type).name == "float32"
    assert not fused.attr["is_training"].b
    expected = run(function, function.graph.as_graph_def(), example())
    np.testing.assert_allclose(run(function, result.proto, example()), expected, rtol=0, atol=0.004)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [2, None])
@pytest.mark.parametrize("kind", ["plain", "bias", "depthwise", "frozen"])
def test_stored_statistics_go_into_the_convolution(form: str, batch: int | None, kind: str) -> None:
    function = traced(network(kind, **FORMS[form]), batch)
    if kind == "bias" and not any(op.type == "BiasAdd" for op in function.graph.get_operations()):
        pytest.skip("this Keras adds a bias by a plain addition, which is not folded into")
    if kind == "frozen":
        function = convert_variables_to_constants_v2(function, lower_control_flow=False)
    result = rewritten(function, CONFIGS["bfloat16"])
    convolution = "DepthwiseConv2dNative" if kind == "depthwise" else "Conv2D"
    assert dtypes_of(result, convolution) == dtypes_of(result, "BiasAdd") == ["bfloat16"]
    gone = {"FusedBatchNormV3", "Rsqrt"} if kind == "frozen" else {"FusedBatchNormV3"}
    assert not gone & {node.op for node in result.proto.node}
    expected = run(function, function.graph.as_graph_def(), example())
    np.testing.assert_allclose(run(function, result.proto, example()), expected, rtol=0, atol=0.03)
    unrounded = dataclasses.replace(
        CONFIGS["bfloat16"], disabled_rules=frozenset(("constant-folding",))
    )
    exact = run(function, in_float32(rewritten(function, unrounded)), example())
    np.testing.assert_allclose(exact, expected, rtol=0, atol=1e-5)


def in_float32(result: RewriteResult) -> graph_pb2.GraphDef:
    """The rewritten graph with all its dtypes back in float32: only the ops differ."""
    graph_def = graph_pb2.GraphDef()
    graph_def.CopyFrom(result.proto)
    for node in graph_def.node:
        for attr in node.attr.values():
            if attr.type in (tf.bfloat16.as_datatype_enum, tf.float16.as_datatype_enum):
                attr.type = tf.float32.as_datatype_enum
    return graph_def


@pytest.mark.parametrize(("batch", "counted"), [(4, 32), (None, 4)])
def test_a_weight_that_is_large_beside_the_activations_is_not_scaled(
    batch: int | None, counted: int
) -> None:
    """A batch that is not known has the rows that it is planned for."""
    normalization = layers.BatchNormalization()
    model = keras.Sequential([keras.Input((1, 1, 64)), layers.Conv2D(512, 1), normalization])
    function = tf.function(lambda x: model(x, training=False), autograph=False)
    config = dataclasses.replace(CONFIGS["bfloat16"], unknown_dimension=counted)
    result = rewritten(function.get_concrete_function(tf.TensorSpec((batch, 1, 1, 64))), config)
    assert dtypes_of(result, "FusedBatchNormV3") == ["bfloat16"]


def test_the_fused_op_computes_what_the_primitives_compute() -> None:
    function = traced(network(), 2)
    result = rewritten(function, CONFIGS["float16"])
    expected = run(function, function.graph.as_graph_def(), example())
    np.testing.assert_allclose(run(function, in_float32(result), example()), expected, rtol=2e-5)


def test_a_frozen_layer_keeps_its_gradient() -> None:
    model = network()
    kernel = model.trainable_variables[0]

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=False) ** 2)
        return tape.gradient(loss, kernel.value)

    function = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec((2, 6, 6, 3)))
    result = rewritten(function, CONFIGS["bfloat16"])
    assert [unit.partition(":")[0] for unit in result.report.fused_units].count("batch-norm") == 1
    expected = run(function, function.graph.as_graph_def(), example())
    scale = np.abs(expected).max()
    np.testing.assert_allclose(run(function, result.proto, example()), expected, atol=0.03 * scale)


OTHER_LAYOUTS = {
    "rank 2": (layers.BatchNormalization, (32, 16), "NHWC"),
    "rank 3": (lambda: layers.BatchNormalization(scale=False), (8, 6, 16), "NHWC"),
    "rank 5": (lambda: layers.BatchNormalization(center=False), (2, 3, 3, 2, 16), "NHWC"),
    "channels first": (lambda: layers.BatchNormalization(axis=1), (8, 4, 6, 16), "NCHW"),
    "channels between": (lambda: layers.BatchNormalization(axis=2), (4, 3, 5, 16), "NCHW"),
    "tf_keras, rank 3": (
        lambda: tf_keras.layers.BatchNormalization(axis=1, scale=False),
        (8, 6, 16),
        "NCHW",
    ),
}


@pytest.mark.parametrize("dtype", CONFIGS)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_any_rank_and_layout_is_one_op(name: str, known: bool, dtype: str) -> None:
    """With a mean far from 0, x * scale and what is added to it cancel, and must not be rounded."""
    make, shape, data_format = OTHER_LAYOUTS[name]
    seen = shape if known else (None, *shape[1:])
    layer = trace_layer(make(), seen, training=False, stored=(127.0, 50.0))
    result = layer.rewrite(CONFIGS[dtype])
    (fused,) = (n for n in result.graph_def.node if n.op == "FusedBatchNormV3")
    assert tf.as_dtype(fused.attr["T"].type).name == dtype
    assert fused.attr["data_format"].s.decode() == data_format
    given = whole_numbers(shape)
    wanted, found = (layer.run(g, *given)[:2] for g in (layer.graph_def, result.graph_def))
    assert_near(found[:1], wanted[:1], {"float16": 2**-11, "bfloat16": 2**-8}[dtype])
    assert_near(found, wanted, {"float16": 2**-10, "bfloat16": 2**-7}[dtype])


@pytest.mark.parametrize("dtype", CONFIGS)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", ["rank 2", "rank 5", "channels first", "channels between", "data"])
def test_gradients_of_a_trained_scale_are_those_of_float32(
    name: str, known: bool, dtype: str
) -> None:
    """The sums over x * dy are beyond float16 and cancel."""
    is_data = name == "data"
    make, shape, data_format = OTHER_LAYOUTS["rank 2" if is_data else name]
    seen = shape if known else (None, *shape[1:])
    data = {"is_data": is_data, "flows_back": not is_data}
    layer = trace_layer(make(), seen, training=False, stored=(127.0, 50.0), **data)
    result = layer.rewrite(CONFIGS[dtype])
    backward = [n for n in result.graph_def.node if n.op == "FusedBatchNormGradV3"]
    assert len(backward) == (data_format == "NHWC" and not is_data)
    for node in backward:
        assert not node.attr["is_training"].b
        assert tf.as_dtype(node.attr["T"].type).name == dtype
    in_float32 = [u for u in result.report.fused_units if u.startswith("batch-norm in float32")]
    assert len(in_float32) == 1 - len(backward)
    assert not low_statistics(result.graph_def)
    x, dy = whole_numbers(shape)
    given = (x + 0.01 if is_data else x), 16 * dy
    wanted, found = (layer.run(g, *given) for g in (layer.graph_def, result.graph_def))
    activations = 1 if is_data else 2
    rounding = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
    assert_near(found[:activations], wanted[:activations], rounding)
    assert_near(found[activations:], wanted[activations:], 1e-5)


def test_statistics_of_another_axis_are_a_near_miss() -> None:
    """[channels] is spread over the last axis, which here has another size."""

    def normalize(x: tf.Tensor) -> tf.Tensor:
        scale = tf.math.rsqrt(variance + 1e-3)
        return tf.matmul(x * scale + (0.0 - mean * scale), tf.ones((4, 4)))

    mean, variance = tf.Variable(tf.zeros(1)), tf.Variable(tf.ones(1))
    function = tf.function(normalize, autograph=False)
    result = rewritten(function.get_concrete_function(tf.TensorSpec((8, 4))), CONFIGS["float16"])
    assert "FusedBatchNormV3" not in {node.op for node in result.proto.node}
    (miss,) = result.report.near_misses
    assert "has not one element for each channel" in miss.why


def test_channels_may_come_first() -> None:
    rng = np.random.default_rng(3)
    stored = [rng.uniform(0.5, 2.0, (4, 1)).astype(np.float32) for _ in range(4)]
    eye = np.eye(8, dtype=np.float32)

    def normalize(x: tf.Tensor) -> list[tf.Tensor]:
        made = tf.nn.batch_normalization(tf.matmul(x, eye), *map(tf.constant, stored), 1e-3)
        return [tf.matmul(made, eye)]

    graph, x = trace(normalize, tf.TensorSpec((4, 8))), rng.normal(size=(4, 8)).astype(np.float32)
    fusion = graph.find(CONFIGS["float16"])
    assert any(unit.startswith("batch-norm: ") for unit in fusion.units)
    (wanted,), (found,) = (graph.run(g, x) for g in (graph.graph_def, fusion.proto))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


STRAYS = ("scale", "offset", "mean", "variance")


def channels_second(stray: str | None, is_stored: bool) -> Callable[[tf.Tensor], tf.Tensor]:
    """Channels on axis 1 of [batch, 8, height, 8]; one stored tensor lies along the last axis."""
    rng = np.random.default_rng(4)
    stored = {name: tf.Variable(rng.uniform(0.5, 2, 8).astype(np.float32)) for name in STRAYS}

    def normalize(x: tf.Tensor) -> tf.Tensor:
        scale, offset, mean, variance = (
            tf.reshape(stored[name], (1, 1, 1, 8) if name == stray else (1, 8, 1, 1))
            for name in STRAYS
        )
        if not is_stored:
            mean, variance = tf.nn.moments(x, (0, 2, 3), keepdims=True)
        factor = tf.math.rsqrt(variance + 1e-3) * scale
        return tf.matmul(x * factor + (offset - mean * factor), tf.eye(8))

    return normalize


@pytest.mark.parametrize(
    ("stray", "is_stored"),
    [*((name, True) for name in (None, *STRAYS)), *((n, False) for n in (None, *STRAYS[:2]))],
)
def test_sizes_that_agree_by_chance_make_no_unit(stray: str | None, is_stored: bool) -> None:
    function = tf.function(channels_second(stray, is_stored), autograph=False)
    concrete = function.get_concrete_function(tf.TensorSpec((2, 8, 3, 8)))
    result = rewritten(concrete, CONFIGS["float16"])
    fused = "FusedBatchNormV3" in {node.op for node in result.proto.node}
    assert fused == (stray is None)
    assert len(result.report.near_misses) == (stray is not None)
    x = np.random.default_rng(5).standard_normal((2, 8, 3, 8), np.float32)
    expected = run(concrete, concrete.graph.as_graph_def(), x)
    np.testing.assert_allclose(run(concrete, result.proto, x), expected, rtol=0, atol=0.01)


def test_a_stray_scale_is_not_folded_into_the_convolution() -> None:
    """[channels out, 1] scales along the width, as large as the channels are many."""
    mean, variance = tf.Variable(tf.zeros(4)), tf.Variable(tf.ones(4))
    gamma, beta = tf.Variable([1.0, 2.0, 3.0, 4.0]), tf.Variable(tf.zeros(4))

    def normalize(x: tf.Tensor) -> tf.Tensor:
        factor = tf.math.rsqrt(variance + 1e-3) * tf.reshape(gamma, (4, 1))
        return tf.nn.conv2d(x, kernel, 1, "VALID") * factor + (beta - mean * factor)

    kernel = tf.Variable(np.random.default_rng(6).standard_normal((3, 3, 3, 4), np.float32))
    function = tf.function(normalize, autograph=False)
    concrete = function.get_concrete_function(tf.TensorSpec((2, 6, 6, 3)))
    result = rewritten(concrete, CONFIGS["bfloat16"])
    assert not dtypes_of(result, "BiasAdd")
    assert len(result.report.near_misses) == 1
    expected = run(concrete, concrete.graph.as_graph_def(), example())
    found = run(concrete, in_float32(result), example())
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_an_offset_that_is_subtracted_is_not_added() -> None:
    mean, variance = tf.Variable([1.0, 2.0, 3.0, 4.0]), tf.Variable(tf.ones(4))
    gamma, beta = tf.Variable([1.0, 2.0, 3.0, 4.0]), tf.Variable(tf.zeros(4))

    def normalize(x: tf.Tensor) -> tf.Tensor:
        factor = tf.math.rsqrt(variance + 1e-3) * gamma
        return tf.nn.conv2d(x, kernel, 1, "VALID") * factor - (mean * factor - beta)

    kernel = tf.Variable(np.random.default_rng(6).standard_normal((3, 3, 3, 4), np.float32))
    function = tf.function(normalize, autograph=False)
    concrete = function.get_concrete_function(tf.TensorSpec((2, 6, 6, 3)))
    result = rewritten(concrete, CONFIGS["bfloat16"])
    assert result.report.fused_units
    expected = run(concrete, concrete.graph.as_graph_def(), example())
    found = run(concrete, in_float32(result), example())
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"epsilon": 1e-6}, "epsilon 1e-06 is below 1e-05")],
)
def test_near_misses_are_explained(options: dict[str, float], why: str) -> None:
    result = rewritten(traced(network(**options), None), CONFIGS["float16"])
    assert [miss.why for miss in result.report.near_misses] == [why]
    assert "FusedBatchNormV3" not in {node.op for node in result.proto.node}


def test_the_rule_can_be_switched_off() -> None:
    config = PrecisionConfig(
        target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("batch-norm",))
    )
    result = rewritten(traced(network(), None), config)
    assert "FusedBatchNormV3" not in {node.op for node in result.proto.node}
    assert not result.report.near_misses


def test_folding_is_for_the_cpu_where_it_was_measured() -> None:
    config = PrecisionConfig(target_dtype="bfloat16", device="GPU")
    result = rewritten(traced(network(), None), config)
    assert dtypes_of(result, "FusedBatchNormV3") == ["bfloat16"]


def test_statistics_of_more_channels_than_the_convolution_gives_are_not_folded() -> None:
    """What is written out to three channels by them; its constants fit no weight."""
    rng = np.random.default_rng(0)
    weight, *stored = (
        rng.uniform(0.5, 1.0, shape).astype(np.float32) for shape in ((3, 3, 3, 1), *[(3,)] * 4)
    )

    def spread(x: tf.Tensor) -> list[tf.Tensor]:
        made = tf.nn.conv2d(x, weight, 1, "SAME")
        return [tf.nn.batch_normalization(made, *map(tf.constant, stored), 1e-3)]

    graph = trace(spread, tf.TensorSpec((8, 6, 6, 3)))
    fusion = graph.find(CONFIGS["bfloat16"])
    assert not any("failed" in miss.why for miss in fusion.misses)
    assert any("may not fit the shape (1,)" in miss.why for miss in fusion.misses)
    x = rng.normal(size=(8, 6, 6, 3)).astype(np.float32)
    (wanted,), (found,) = (graph.run(g, x) for g in (graph.graph_def, fusion.proto))
    np.testing.assert_array_equal(found, wanted)
