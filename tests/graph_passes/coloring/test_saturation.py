"""Distances to the bound of a saturating op, of which a logarithm or the like is taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from decisions import decisions_of
from traced_graphs import trace

from graph_passes import PrecisionConfig, Reason

CPU = PrecisionConfig(
    target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("cast-cut",))
)
GPU = dataclasses.replace(CPU, target_dtype="float16", device="GPU")
OFF = dataclasses.replace(CPU, disabled_rules=CPU.disabled_rules | {"saturation"})
SIZE = 16

Function = Callable[[Any], Any]


def clipped(z: Any) -> Any:
    """A cross entropy of each element, as it is written by hand."""
    p = tf.clip_by_value(tf.sigmoid(z), 1e-7, 1 - 1e-7)
    return -0.5 * tf.math.log(p) - 0.5 * tf.math.log(1 - p)


def of_a_hard_sigmoid(z: Any) -> Any:
    p = tf.clip_by_value(tf.nn.relu6(z + 3) / 6, 1e-7, 1 - 1e-7)
    return -tf.math.log(1 - p)


def of_what_is_clipped(z: Any) -> Any:
    return -tf.math.log(1 - tf.clip_by_value(z, 1e-7, 1 - 1e-7))


def focal(z: Any) -> Any:
    p = tf.sigmoid(z)
    return -(p**2) * tf.math.log(1.0 - p + 1e-7)


def by_log1p(z: Any) -> Any:
    return tf.math.log1p(-tf.sigmoid(z) * 0.9999)


def of_squashed_actions(z: Any) -> Any:
    return tf.math.log(1 - tf.tanh(z) ** 2 + 1e-6)


def inverted(z: Any) -> Any:
    return tf.atanh(tf.tanh(z) * 0.9999)


def of_two(z: Any) -> Any:
    """The probability of a bin, as of a discretized logistic."""
    return tf.math.log(tf.maximum(tf.sigmoid(z + 0.25) - tf.sigmoid(z - 0.25), 1e-12))


def other_classes(z: Any) -> Any:
    return tf.math.log(1 - tf.nn.softmax(z) + 1e-7)


def of_what_a_layer_reads(z: Any) -> Any:
    """Between two products the gradient of the sigmoid, y * (1 - y), would go low."""
    p = tf.sigmoid(z)
    return tf.math.log(1 - p) + p @ z


POLES: dict[str, Function] = {
    "odds": lambda z: tf.sigmoid(z) / (1 - tf.sigmoid(z)),
    "reciprocal": lambda z: tf.math.reciprocal(1 - tf.tanh(z / 2) ** 2),
    "correlation": lambda z: tf.tanh(z / 2) * tf.math.rsqrt(1 - tf.tanh(z / 2) ** 2),
    "sine": lambda z: tf.sqrt(1 - tf.clip_by_value(z / 6, -1 + 1e-6, 1 - 1e-6) ** 2),
    "angle": lambda z: tf.acos(tf.clip_by_value(z / 6, -1 + 1e-6, 1 - 1e-6)),
    "other angle": lambda z: tf.asin(tf.clip_by_value(z / 6, -1 + 1e-6, 1 - 1e-6)),
    "hyperbolic": lambda z: tf.acosh(tf.maximum(z, 1 + 1e-6)),
    "clipped": lambda z: tf.atanh(tf.clip_by_value(z / 6, -1 + 1e-6, 1 - 1e-6)),
    "error function": lambda z: tf.math.erfinv(2 * tf.sigmoid(z) - 1),
    "quantile": lambda z: tf.math.ndtri(tf.clip_by_value(tf.sigmoid(z), 1e-6, 1 - 1e-6)),
}


def values() -> list[np.ndarray]:
    """Numbers that bfloat16 has, so that the product rounds none, and what takes each once."""
    x = np.linspace(-6, 6, SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)
    return [np.round(x * 8) / 8, np.eye(SIZE, dtype=np.float32)]


def with_gradient(function: Function) -> Callable[[Any, Any], Any]:
    def of_product(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x @ w)
        return [y, tape.gradient(y, x)]

    return of_product


def traced(function: Callable[[Any, Any], Any]) -> Any:
    return trace(function, tf.TensorSpec((SIZE, SIZE)), tf.TensorSpec((SIZE, SIZE)))


@pytest.mark.parametrize(
    "function",
    [
        clipped,
        of_a_hard_sigmoid,
        of_what_is_clipped,
        focal,
        by_log1p,
        of_squashed_actions,
        inverted,
        of_two,
        other_classes,
        of_what_a_layer_reads,
        *POLES.values(),
    ],
)
@pytest.mark.parametrize("config", [CPU, GPU], ids=["bfloat16", "float16"])
def test_values_and_gradients(function: Function, config: PrecisionConfig) -> None:
    found = traced(with_gradient(function))
    result = found.rewrite(config)
    assert result.report.converted_nodes
    true, low = (found.run(g, *values()) for g in (found.graph_def, result.graph_def))
    for one, other in zip(low, true, strict=True):
        np.testing.assert_allclose(one, other, rtol=0.02, atol=0.01 * np.abs(other).max())


def gated(x: Any, w: Any) -> Any:
    z = x @ w
    return (tf.sigmoid(z) * tf.tanh(z) + (1 - tf.sigmoid(z)) * z) @ w


def of_entropy(x: Any, w: Any) -> Any:
    """No distance is taken: small probabilities are as exact as large ones."""
    p = tf.nn.softmax(x @ w)
    return p @ w, tf.reduce_sum(p * tf.math.log(p + 1e-9), -1)


def of_energy(x: Any, w: Any) -> Any:
    return tf.math.log((x @ w) ** 2 - 0.5 * x + 2.0)


def of_differences(x: Any, w: Any) -> Any:
    """Nothing bounds them."""
    return tf.sqrt(x @ w - x + 8.0) / (x @ w - x) @ w


def normalized(x: Any, w: Any) -> Any:
    """What a mean was taken of is behind it: an activation is part of the network."""
    z = tf.nn.silu(x @ w) - x
    scale = tf.sqrt(tf.reduce_mean(tf.square(z - tf.reduce_mean(z, -1, keepdims=True)), -1) + 1e-5)
    return (tf.sigmoid(z - 1.0) / scale[:, None]) @ w


def by_the_range(x: Any, w: Any) -> Any:
    """No bound is asked for the distance to it: it is put behind a difference."""
    z = tf.nn.silu(x @ w)
    least, most = tf.reduce_min(z, -1, keepdims=True), tf.reduce_max(z, -1, keepdims=True)
    return ((z - least) / tf.maximum(most - least, 1e-6)) @ w


@pytest.mark.parametrize(
    "function", [gated, of_entropy, of_energy, of_differences, normalized, by_the_range]
)
def test_networks_are_planned_as_ever(function: Callable[[Any, Any], Any]) -> None:
    found = traced(function)
    assert found.rewrite(CPU).graph_def == found.rewrite(OFF).graph_def


def test_what_is_before_the_saturating_op_goes_low() -> None:
    found = traced(lambda x, w: tf.math.log(1 - tf.sigmoid(tf.nn.relu(x @ w))))
    reasons = {d.op: d.converted for d in decisions_of(found.rewrite(CPU).report)}
    assert (reasons["Relu"], reasons["Sigmoid"]) == (True, False)


def one_of(values: Any) -> Any:
    return values[:, 0]


LAST: dict[str, Function] = {
    "softmax": lambda z: one_of(tf.nn.softmax(z)),
    "sigmoid": lambda z: one_of(tf.sigmoid(z)),
    "tanh": lambda z: one_of(tf.tanh(z / 2)),
    "scaled": lambda z: 2.0 * tf.reshape(tf.sigmoid(z), [-1])[::SIZE] + 1.0,
}
HIDDEN: dict[str, Function] = {
    "attention": lambda z: tf.nn.softmax(z) @ z,
    "gate": lambda z: (tf.sigmoid(z) * z) @ z,
    "layer": lambda z: tf.reshape(tf.tanh(z), [-1, SIZE]) @ z,
}


@pytest.mark.parametrize("function", LAST.values(), ids=[*LAST])
def test_what_a_certain_class_depends_on(function: Function) -> None:
    """A probability that is rounded to 1 depends on nothing."""
    found = traced(with_gradient(function))
    x, w = values()
    x[:, 0] = 12 - np.arange(SIZE) / 4
    true, low, off = (
        found.run(found.rewrite(config).graph_def if config else found.graph_def, x, w)[1]
        for config in (None, CPU, OFF)
    )
    certain = np.abs(true).max(-1) < 2**-9
    assert certain.sum() > SIZE // 4
    np.testing.assert_allclose(low[certain], true[certain], rtol=0.02, atol=1e-7)
    assert np.abs(off[certain] - true[certain]).max() > 0.2 * np.abs(true[certain]).max()


def test_what_is_not_float32_is_no_hindrance() -> None:
    def of_doubles(x: Any, w: Any) -> Any:
        z = tf.cast(x, tf.float64)
        return tf.raw_ops.TanhGrad(y=tf.tanh(z), dy=z), x @ w

    assert traced(of_doubles).rewrite(CPU).report.converted_nodes


@pytest.mark.parametrize("function", HIDDEN.values(), ids=[*HIDDEN])
def test_gradients_inside_a_network_are_planned_as_ever(function: Function) -> None:
    found = traced(with_gradient(function))
    assert found.rewrite(CPU).graph_def == found.rewrite(OFF).graph_def


def test_the_reason_is_told_but_in_parity() -> None:
    found = traced(with_gradient(focal))
    reasons = {d.op: d.reason for d in decisions_of(found.rewrite(CPU).report)}
    assert reasons["Sigmoid"] is Reason.SATURATION
    parity = decisions_of(found.rewrite(dataclasses.replace(CPU, parity=True)).report)
    assert Reason.SATURATION not in {d.reason for d in parity}
