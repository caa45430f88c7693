"""Biases and activations behind matrix products: one kernel with the product, and where not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from free_casts import FREE_CASTS
from traced_graphs import Traced, node_types, of_op, trace

from graph_passes import PrecisionConfig
from graph_passes.units.product.product_tail import RULE

CPU = PrecisionConfig(
    target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("cast-cut",))
)
WIDTH, CHANNELS = 32, 64
ROOT = np.float32(np.sqrt(0.5))
random = np.random.default_rng(0)
Activation = Callable[[tf.Tensor], tf.Tensor]

GELUS: dict[str, Activation] = {
    "tf.nn.gelu": lambda x: tf.nn.gelu(x, approximate=False),
    # As TensorFlow 2.21 writes it; 2.17 has an Erf.
    "Erfc": lambda x: 0.5 * x * tf.math.erfc(-x * ROOT),
    "by hand": lambda x: 0.5 * x * (1.0 + tf.math.erf(x / np.float32(np.sqrt(2.0)))),
    "other side": lambda x: x * (1.0 - 0.5 * tf.math.erfc(x * ROOT)),
    "half the difference": lambda x: (x - x * tf.math.erf(-x * ROOT)) * 0.5,
}
OTHERS: dict[str, Activation] = {
    "none": lambda x: x,
    "Relu": tf.nn.relu,
    "Relu6": tf.nn.relu6,
    "Elu": tf.nn.elu,
    "Sigmoid": tf.sigmoid,
    "Tanh": tf.tanh,
    "LeakyRelu": tf.nn.leaky_relu,
}


def dense(activation: Activation, reshaped: bool = True) -> Callable[..., tf.Tensor]:
    """A layer as Keras writes it for tensors with three axes, and a product behind it."""

    def layer(x: tf.Tensor, w: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        made = tf.tensordot(x, w, 1) if reshaped else tf.matmul(tf.reshape(x, [-1, WIDTH]), w)
        made = activation(tf.nn.bias_add(made, b))
        return tf.matmul(tf.reshape(made, [-1, CHANNELS]), w, transpose_b=True)

    return layer


def traced_layer(function: Callable[..., object], batch: int | None = 4) -> Traced:
    specs = (batch, 16, WIDTH), (WIDTH, CHANNELS), (CHANNELS,)
    return trace(function, *map(tf.TensorSpec, specs))


def given() -> list[np.ndarray]:
    shapes = (4, 16, WIDTH), (WIDTH, CHANNELS), (CHANNELS,)
    x, w, b = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    return [x, w / 4, b]


def ran(traced: Traced, graph_def: object, inputs: list[np.ndarray]) -> set[str]:
    """The op types that TensorFlow's own optimizers leave of a graph."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        tf.import_graph_def(graph_def, name="")
        metadata = v1.RunMetadata()
        options = v1.RunOptions(output_partition_graphs=True)
        fed = dict(zip(traced.arguments, inputs, strict=True))
        session.run(list(traced.results), fed, options=options, run_metadata=metadata)
    return {node.op for graph in metadata.partition_graphs for node in graph.node}


@pytest.mark.parametrize("activation", [*OTHERS, *GELUS])
@pytest.mark.parametrize("batch", [4, None])
def test_one_kernel_does_all_and_gives_the_same(activation: str, batch: int | None) -> None:
    function = (OTHERS | GELUS)[activation]
    traced, inputs = traced_layer(dense(function), batch), given()
    fusion = traced.find(CPU)
    assert RULE in node_types(fusion)
    (before,) = traced.run(traced.graph_def, *inputs)
    (after,) = traced.run(fusion.proto, *inputs)
    np.testing.assert_allclose(after, before, atol=1e-5 * np.abs(before).max())

    low = traced.rewrite(CPU).graph_def
    left = ran(traced, low, inputs)
    if any(op.startswith("_Mkl") for op in left):  # without oneDNN, TensorFlow fuses less
        assert left.isdisjoint(("BiasAdd", "Erf", "Erfc", activation))
    (rounded,) = traced.run(low, *inputs)
    np.testing.assert_allclose(rounded, before, atol=0.03 * np.abs(before).max())
    if activation in ("none", "Relu", "tf.nn.gelu"):
        assert "BiasAdd" in ran(traced, traced.graph_def, inputs)


def test_a_gelu_behind_a_product_without_a_reshape() -> None:
    traced = traced_layer(dense(GELUS["Erfc"], reshaped=False))
    after = traced.find(CPU)
    assert RULE in node_types(after)
    assert [node.op for node in after.proto.node].count("Erf") == 1
    assert not of_op(after.proto, "Erfc")


def test_the_bias_moves_in_training_and_the_gelu_stays() -> None:
    def step(x: tf.Tensor, w: tf.Tensor, b: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([x, w, b])
            y = dense(GELUS["Erfc"])(x, w, b)
        return [y, *tape.gradient(y, [x, w, b])]

    traced, inputs = traced_layer(step), given()
    fusion = traced.find(CPU)
    assert RULE in node_types(fusion)
    assert len(of_op(fusion.proto, "Erfc")) == 1
    (bias_add,) = of_op(fusion.proto, "BiasAdd")
    makers = {node.name: node.op for node in fusion.proto.node}
    assert makers[bias_add.input[0]] == "MatMul"
    before, after = (traced.run(g, *inputs) for g in (traced.graph_def, fusion.proto))
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new, old, atol=1e-5 * np.abs(old).max())


AMX = dataclasses.replace(CPU, cost_table=dataclasses.replace(FREE_CASTS, fused_tails=False))


# A Sigmoid beside another reader of the bias is not computed in the kernel.
SWISH: dict[str, Activation] = {"swish": lambda x: x * tf.sigmoid(x)}


@pytest.mark.parametrize("activation", [*OTHERS, *SWISH, "tf.nn.gelu"])
def test_where_the_kernel_is_slow_only_what_is_dear_goes_into_it(activation: str) -> None:
    found = traced_layer(dense((OTHERS | GELUS | SWISH)[activation])).find(AMX)
    is_dear = activation in ("Elu", "Sigmoid", "tf.nn.gelu")
    assert (RULE in node_types(found)) is is_dear


@pytest.mark.parametrize("batch", [64, None])
def test_where_the_kernel_is_slow_a_large_tail_is_kept_out_of_it(batch: int | None) -> None:
    def layer(x: tf.Tensor, w: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(tf.nn.bias_add(tf.matmul(x, w), b))

    specs = (batch, WIDTH), (WIDTH, 1 << 13), (1 << 13,)
    traced = trace(layer, *map(tf.TensorSpec, specs))
    config = dataclasses.replace(AMX, unknown_dimension=64)
    inputs = [random.normal(size=(64, *shape[1:])).astype(np.float32) for shape in specs[:1]]
    inputs += [random.normal(size=shape).astype(np.float32) for shape in specs[1:]]
    assert "BiasAdd" not in ran(traced, traced.graph_def, inputs)
    assert RULE in node_types(traced.find(config))
    after = traced.rewrite(config).graph_def
    left = ran(traced, after, inputs)
    assert "BiasAdd" in left
    assert not any("Fused" in op for op in left)
    (old,), (new,) = (traced.run(g, *inputs) for g in (traced.graph_def, after))
    np.testing.assert_allclose(new, old, atol=0.03 * np.abs(old).max())

    in_kernel = dataclasses.replace(config, cost_table=FREE_CASTS)
    assert RULE not in node_types(traced.find(in_kernel))
    few = dataclasses.replace(config, unknown_dimension=16)
    assert (RULE in node_types(traced.find(few))) is (batch is not None)


NO_GELUS: dict[str, Activation] = {
    "another factor": lambda x: 0.5 * x * (1.0 + tf.math.erf(x * 0.7)),
    "another half": lambda x: 0.4 * x * (1.0 + tf.math.erf(x * ROOT)),
    "another sign": lambda x: 0.5 * x * (1.0 - tf.math.erf(x * ROOT)),
    "more axes": lambda x: tf.constant([[[[0.5]]]]) * x * tf.math.erfc(-x * ROOT),
}


@pytest.mark.parametrize("activation", NO_GELUS)
def test_what_is_no_gelu_is_computed_as_it_is(activation: str) -> None:
    traced, inputs = traced_layer(dense(NO_GELUS[activation])), given()
    after = traced.find(CPU).proto
    old, new = (len(of_op(g, "Erf") + of_op(g, "Erfc")) for g in (traced.graph_def, after))
    assert (old, new) == (1, 1)
    (before,), (found,) = traced.run(traced.graph_def, *inputs), traced.run(after, *inputs)
    np.testing.assert_allclose(found, before, atol=1e-5 * np.abs(before).max())


def channels_first(x: tf.Tensor, w: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    made = tf.reshape(tf.matmul(tf.reshape(x, [-1, WIDTH]), w), [1, CHANNELS, CHANNELS])
    made = tf.nn.bias_add(made, b, data_format="NCHW")
    return tf.matmul(made[0], made[0])


def split_channels(x: tf.Tensor, w: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """The Reshape makes another last axis of which the bias has the length."""
    made = tf.reshape(tf.matmul(tf.reshape(x, [-1, WIDTH]), w), [-1, 2, CHANNELS // 2])
    made = tf.nn.bias_add(made, b[: CHANNELS // 2])
    return tf.matmul(made, made, transpose_b=True)


def read_twice(x: tf.Tensor, w: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    made = tf.reshape(tf.matmul(tf.reshape(x, [-1, WIDTH]), w), [4, 16, CHANNELS])
    return tf.matmul(tf.nn.bias_add(made, b), made, transpose_b=True)


@pytest.mark.parametrize("function", [channels_first, split_channels, read_twice])
def test_what_cannot_move_stays(function: Callable[..., tf.Tensor]) -> None:
    assert RULE not in node_types(traced_layer(function).find(CPU))


@pytest.mark.parametrize(
    "config",
    [dataclasses.replace(CPU, device="GPU"), dataclasses.replace(CPU, fused=True)],
    ids=["GPU", "compiled"],
)
def test_it_is_for_kernels_of_a_cpu(config: PrecisionConfig) -> None:
    assert RULE not in node_types(traced_layer(dense(tf.nn.relu)).find(config))


def awaited(x: tf.Tensor, w: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    made = GELUS["Erfc"](tf.nn.bias_add(tf.tensordot(x, w, 1), b))
    with tf.control_dependencies([made]):
        return tf.tensordot(made, w, [[2], [1]])


def awaiting(x: tf.Tensor, w: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    made = tf.nn.bias_add(tf.tensordot(x, w, 1), b)
    with tf.control_dependencies([tf.reduce_sum(x)]):
        made = GELUS["Erfc"](made)
    return tf.tensordot(made, w, [[2], [1]])


@pytest.mark.parametrize("function", [awaited, awaiting])
def test_a_gelu_that_tensorflow_will_not_fuse_keeps_its_form(
    function: Callable[..., tf.Tensor],
) -> None:
    """Near -1 nothing is left of 1 + Erf in bfloat16."""
    traced = traced_layer(function)
    assert of_op(traced.find(CPU).proto, "Erfc")
    x, w = np.full((4, 16, WIDTH), -3.5, np.float32), np.zeros((WIDTH, CHANNELS), np.float32)
    np.fill_diagonal(w, 1.0)
    inputs = [x, w, np.zeros(CHANNELS, np.float32)]
    (before,) = traced.run(traced.graph_def, *inputs)
    (after,) = traced.run(traced.rewrite(CPU).graph_def, *inputs)
    np.testing.assert_allclose(after, before, rtol=0.1)


def test_a_fed_tensor_inside_means_what_it_meant() -> None:
    traced = traced_layer(dense(GELUS["tf.nn.gelu"]))
    (bias_add,) = of_op(traced.graph_def, "BiasAdd")
    fusion = traced.find(CPU, preserve=[bias_add.name])
    assert RULE not in node_types(fusion)
