"""SiLUs with a gradient where times are known: how they are written, and how exact they are."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from activation_graphs import CPU, UNIT, WIDTH, Activation, numbers, traced_activation
from traced_graphs import node_types, of_op, trace

from graph_passes import PrecisionConfig
from graph_passes.units.activation.local_derivative import RULE

FLOAT = tf.float32.as_datatype_enum


def exact(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Value and gradient in float64."""
    sigmoid = 1 / (1 + np.exp(-np.float64(x)))
    return x * sigmoid, sigmoid + x * sigmoid * (1 - sigmoid)


@pytest.mark.parametrize("form", [tf.nn.silu, keras.activations.silu, tf.nn.swish])
@pytest.mark.parametrize("rows", [2048, None])
def test_one_sigmoid_in_float32_and_a_derivative_that_is_kept(
    form: Activation, rows: int | None
) -> None:
    traced = traced_activation(form, rows)
    results = [name.partition(":")[0] for name in traced.results]
    assert len(of_op(traced.graph_def, "Sigmoid")) == 2
    after = tf.compat.v1.graph_util.extract_sub_graph(traced.rewrite(CPU).graph_def, results)
    for op in ("Sigmoid", "SigmoidGrad"):
        assert [node.attr["T"].type for node in of_op(after, op)] == [FLOAT]
    (dx,) = [node for node in of_op(after, "Mul") if node.name.endswith("/dx")]
    assert dx.attr["T"].type == CPU.target
    makers = {node.name: node for node in after.node}
    lowered = [c.input[0] for c in of_op(after, "Cast") if c.attr["DstT"].type == CPU.target]
    ends = [name.rpartition("/")[2] for name in lowered if "local_derivative" in makers[name].name]
    assert sorted(ends) == ["derivative", "silu"]
    pending, behind = [name for name in lowered if name.endswith("derivative")], set()
    while pending:
        name = pending.pop().partition(":")[0]
        behind.add(name)
        pending += [i for i in makers[name].input if not i.startswith("^")]
    assert not {name for name in behind if "gradient_tape" in name}  # it waits for no gradient


def test_value_and_gradient_are_rounded_once() -> None:
    traced, x = traced_activation(tf.nn.silu), numbers(20)
    value, gradient = traced.run(traced.rewrite(CPU).graph_def, x)
    true_value, true_gradient = exact(x)
    assert (np.abs(value - true_value) / np.maximum(np.abs(true_value), 1e-3)).max() < 2.1 * UNIT
    assert np.abs(gradient - true_gradient).max() < 2.1 * UNIT


def test_in_float32_it_is_as_before() -> None:
    traced, x = traced_activation(tf.nn.silu), numbers(20)
    fusion = traced.find(CPU)
    assert RULE in node_types(fusion)
    before, after = (traced.run(graph, x) for graph in (traced.graph_def, fusion.proto))
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new, old, atol=2e-6)


def test_large_numbers_are_as_before() -> None:
    traced = traced_activation(tf.nn.silu, rows=None)
    sizes = np.geomspace(80, 3e38, WIDTH).astype(np.float32)
    x = np.stack([sizes, -sizes, np.full_like(sizes, np.nan)])
    fusion = traced.find(CPU)
    before, after = (traced.run(graph, x) for graph in (traced.graph_def, fusion.proto))
    np.testing.assert_allclose(after[0], before[0], atol=1e-30)
    np.testing.assert_allclose(after[1], before[1], atol=1e-30)


@pytest.mark.parametrize(
    "form",
    [
        lambda x: tf.nn.silu(x, beta=1.702),
        lambda x: tf.nn.silu(x) + tf.stop_gradient(x),
        lambda x: x * tf.stop_gradient(tf.sigmoid(x)),
        lambda x: tf.sigmoid(x),
    ],
    ids=["another slope", "and more", "half a gradient", "a sigmoid"],
)
def test_what_is_another_function_computes_the_same(form: Activation) -> None:
    traced, x = traced_activation(form), numbers(20)
    fusion = traced.find(CPU)
    before, after = (traced.run(graph, x) for graph in (traced.graph_def, fusion.proto))
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new, old, atol=2e-6 * max(1, np.abs(old).max()))


def test_a_derivative_that_is_squared_is_no_gradient() -> None:
    def network(x: tf.Tensor) -> tf.Tensor:
        before = tf.matmul(x, tf.eye(WIDTH))
        sigmoid = tf.sigmoid(before)
        derivative = sigmoid * (1.0 + before * (1.0 - sigmoid))
        return tf.matmul(before * sigmoid + derivative * derivative, tf.eye(WIDTH))

    traced, x = trace(network, tf.TensorSpec((2048, WIDTH))), numbers(20)
    fusion = traced.find(CPU)
    assert "does not join" in " ".join(miss.why for miss in fusion.misses)
    (before,), (after,) = (traced.run(each, x) for each in (traced.graph_def, fusion.proto))
    np.testing.assert_allclose(after, before, atol=2e-6)


def test_another_slope_stays() -> None:
    fusion = traced_activation(lambda x: tf.nn.silu(x, beta=1.702)).find(CPU)
    assert len(of_op(fusion.proto, "Sigmoid")) == 2


def test_without_a_gradient_it_stays() -> None:
    traced = trace(lambda x: tf.matmul(tf.nn.silu(x), tf.eye(WIDTH)), tf.TensorSpec((64, WIDTH)))
    assert RULE not in node_types(traced.find(CPU))


def test_what_is_preserved_inside_stays() -> None:
    traced = traced_activation(tf.nn.silu)
    for sigmoid in of_op(traced.graph_def, "Sigmoid"):
        fusion = traced.find(CPU, preserve=[sigmoid.name])
        assert RULE not in node_types(fusion)
        assert [miss for miss in fusion.misses if "preserved" in miss.why]


OTHER_CONFIGS = {
    "a compiler fuses it": dataclasses.replace(CPU, fused=True),
    "no times": dataclasses.replace(CPU, cost_table=None),
    "switched off": dataclasses.replace(CPU, disabled_rules=frozenset((RULE,))),
    "a GPU": PrecisionConfig(target_dtype="float16", device="GPU"),
}


@pytest.mark.parametrize("case", OTHER_CONFIGS)
def test_it_is_for_kernels_whose_times_are_known(case: str) -> None:
    assert RULE not in node_types(traced_activation(tf.nn.silu).find(OTHER_CONFIGS[case]))
