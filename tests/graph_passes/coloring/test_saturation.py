"""Distances to the bound of a saturating op, of which a logarithm is taken."""

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


@pytest.mark.parametrize("function", [gated, of_entropy, of_energy])
def test_networks_are_planned_as_ever(function: Callable[[Any, Any], Any]) -> None:
    found = traced(function)
    assert found.rewrite(CPU).graph_def == found.rewrite(OFF).graph_def


def test_the_reason_is_told_but_in_parity() -> None:
    found = traced(with_gradient(focal))
    reasons = {d.op: d.reason for d in decisions_of(found.rewrite(CPU).report)}
    assert reasons["Sigmoid"] is Reason.SATURATION
    parity = decisions_of(found.rewrite(dataclasses.replace(CPU, parity=True)).report)
    assert Reason.SATURATION not in {d.reason for d in parity}
