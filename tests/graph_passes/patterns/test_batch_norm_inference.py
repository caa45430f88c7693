from __future__ import annotations

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

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


def network(**options: object) -> keras.Model:
    """A convolution and a batch normalization with statistics that are not 0 and 1."""
    keras.utils.set_random_seed(1)
    normalization = layers.BatchNormalization(**options)
    model = keras.Sequential(
        [keras.Input((6, 6, 3)), layers.Conv2D(4, 3), normalization, layers.ReLU()]
    )
    rng = np.random.default_rng(2)
    for weight in normalization.weights:
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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [2, None])
@pytest.mark.parametrize("dtype", CONFIGS)
def test_stored_statistics_go_into_one_op(form: str, batch: int | None, dtype: str) -> None:
    function = traced(network(**FORMS[form]), batch)
    result = rewritten(function, CONFIGS[dtype])
    ops = Counter(node.op for node in result.proto.node)
    assert ops["FusedBatchNormV3"] == 1
    assert not ops.keys() & {"Rsqrt", "Sub", "AddV2", "Neg"}
    (fused,) = (node for node in result.proto.node if node.op == "FusedBatchNormV3")
    assert tf.as_dtype(fused.attr["T"].type).name == dtype
    assert tf.as_dtype(fused.attr["U"].type).name == "float32"
    assert not fused.attr["is_training"].b
    x = np.random.default_rng(3).standard_normal((2, 6, 6, 3), np.float32)
    expected = run(function, function.graph.as_graph_def(), x)
    tolerance = 0.03 if dtype == "bfloat16" else 0.004
    np.testing.assert_allclose(run(function, result.proto, x), expected, rtol=0, atol=tolerance)


def test_the_fused_op_computes_what_the_primitives_compute() -> None:
    function = traced(network(), 2)
    result = rewritten(function, CONFIGS["bfloat16"])
    for node in result.proto.node:  # everything back to float32, so that only the op differs
        for attr in node.attr.values():
            if attr.type == tf.bfloat16.as_datatype_enum:
                attr.type = tf.float32.as_datatype_enum
    x = np.random.default_rng(3).standard_normal((2, 6, 6, 3), np.float32)
    np.testing.assert_allclose(
        run(function, result.proto, x), run(function, function.graph.as_graph_def(), x), rtol=2e-5
    )


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
    x = np.random.default_rng(3).standard_normal((2, 6, 6, 3), np.float32)
    expected = run(function, function.graph.as_graph_def(), x)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(run(function, result.proto, x), expected, atol=0.03 * scale)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"epsilon": 1e-6}, "epsilon 1e-06 is below 1e-05")],
)
def test_near_misses_are_explained(options: dict[str, float], why: str) -> None:
    result = rewritten(traced(network(**options), None), CONFIGS["bfloat16"])
    assert [miss.why for miss in result.report.near_misses] == [why]
    assert "FusedBatchNormV3" not in {node.op for node in result.proto.node}


def test_the_rule_can_be_switched_off() -> None:
    config = PrecisionConfig(
        target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("batch-norm",))
    )
    result = rewritten(traced(network(), None), config)
    assert "FusedBatchNormV3" not in {node.op for node in result.proto.node}
    assert not result.report.near_misses
