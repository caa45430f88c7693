"""Sums over the axes that broadcasting added: gone or low where it added none, kept elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from traced_graphs import Traced, node_types, of_op, trace

from graph_passes import PrecisionConfig

CONFIGS = (
    PrecisionConfig(target_dtype="float16", device="GPU"),
    PrecisionConfig(target_dtype="bfloat16", device="CPU"),
)
GPU, CPU = CONFIGS


def product(value: tf.Tensor) -> tf.Tensor:
    """A matrix product of what a tensor holds, without batches."""
    width = value.shape[-1]
    return tf.matmul(tf.reshape(value, [-1, width]), tf.eye(width))


def gradient_of(function: Callable[..., tf.Tensor], *shapes: tuple[int | None, ...]) -> Traced:
    """The gradients of a function, each read by a product."""

    def step(*values: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(values)
            made = function(*values)
            loss = tf.reduce_sum(product(made) ** 2, name="loss")
        gradients = tape.gradient(loss, values)
        return [product(gradient) * 1.0 for gradient in gradients]

    return trace(step, *(tf.TensorSpec(shape) for shape in shapes))


def broadcast_sums(graph_def):
    """The sums over axes that are worked out when the graph runs."""
    nodes = {node.name: node for node in graph_def.node}
    return [
        node
        for node in of_op(graph_def, "Sum")
        if nodes[node.input[1].partition(":")[0]].op == "BroadcastGradientArgs"
    ]


def values(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("config", CONFIGS, ids=["gpu", "cpu"])
@pytest.mark.parametrize("batch", [3, None])
def test_the_gradient_of_what_meets_a_matrix_is_not_summed(config, batch):
    traced = gradient_of(tf.matmul, (batch, 4, 8), (8, 8))
    found = traced.find(config)
    assert "idle-sum" in node_types(found)
    # What is left is the sum of the matrix's own gradient, which repeats over the batch.
    assert len(broadcast_sums(traced.graph_def)) == 2
    after = traced.rewrite(config).graph_def
    assert not broadcast_sums(after)
    given = values((3, 4, 8), (8, 8))
    for new, old in zip(
        traced.run(found.proto, *given), traced.run(traced.graph_def, *given), strict=True
    ):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)
    down = [cast for cast in of_op(after, "Cast") if cast.attr["DstT"].type == config.target]
    assert not any("Sum" in cast.input[0] for cast in down)


@pytest.mark.parametrize("config", CONFIGS, ids=["gpu", "cpu"])
def test_gradients_of_several_products_are_added_in_the_target_dtype(config):
    def projections(x: tf.Tensor, query: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, query) * tf.matmul(x, key)

    traced = gradient_of(projections, (None, 4, 8), (8, 8), (8, 8))
    (total,) = of_op(traced.rewrite(config).graph_def, "AddN")
    assert total.attr["T"].type == config.target


@pytest.mark.parametrize("config", CONFIGS, ids=["gpu", "cpu"])
@pytest.mark.parametrize("batches", [(3, 3), (1, 3), (3, 1)])
def test_sums_over_a_batch_that_is_not_known_go_low_and_stay_right(config, batches):
    traced = gradient_of(lambda x, y: tf.nn.relu(x) + tf.nn.relu(y), (None, 4, 8), (None, 4, 8))
    before, found = broadcast_sums(traced.graph_def), traced.find(config)
    assert len(before) == len(broadcast_sums(found.proto)) == 2
    after = traced.rewrite(config).graph_def
    assert [node.attr["T"].type for node in broadcast_sums(after)] == [config.target] * 2
    if config is GPU:
        after = found.proto  # float16 on a GPU cannot be run here
    given = values(*((batch, 4, 8) for batch in batches))
    for new, old in zip(
        traced.run(after, *given), traced.run(traced.graph_def, *given), strict=True
    ):
        np.testing.assert_allclose(new, old, rtol=0.03, atol=0.1)


@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 4, 8), (1, 4, 8)),
        ((None, 4, 8), (1, 4, 8)),
        ((3, 4, 8), (8,)),
        ((None, 4, 8), (4, 8)),
    ],
)
def test_what_is_repeated_is_summed_in_float32(shapes):
    traced = gradient_of(lambda x, y: tf.nn.relu(x) + tf.nn.relu(y), *shapes)
    found = traced.find(GPU)
    idle = [unit for unit in found.units if unit.startswith("idle-sum")]
    assert len(idle) <= 1  # the gradient of x, which is not repeated
    after = traced.rewrite(GPU).graph_def
    kept = [n for n in of_op(after, "Sum") if n.name != "loss"] + of_op(after, "BiasAddGrad")
    assert kept
    float32 = tf.float32.as_datatype_enum
    assert all(node.attr["T"].type == float32 for node in kept if node.op == "Sum")


def test_a_sum_that_is_kept_or_waited_for_stays():
    traced = gradient_of(tf.matmul, (3, 4, 8), (8, 8))
    names = [node.name for node in broadcast_sums(traced.graph_def)]
    assert "idle-sum" not in node_types(traced.find(GPU, names))
    copy = type(traced.graph_def).FromString(traced.graph_def.SerializeToString())
    for name in names:
        copy.node.add(name=f"{name}_waiting", op="NoOp", input=[f"^{name}"])
    waited = dataclasses.replace(traced, graph_def=copy)
    assert len(broadcast_sums(waited.find(GPU).proto)) == 2


def test_it_can_be_switched_off():
    traced = gradient_of(tf.matmul, (3, 4, 8), (8, 8))
    off = dataclasses.replace(GPU, disabled_rules=frozenset(("idle-sum",)))
    assert "idle-sum" not in node_types(traced.find(off))
    assert not traced.find(dataclasses.replace(GPU, parity=True)).units
