"""Products of which nothing but the rest by a period is used."""

from __future__ import annotations

import dataclasses
import math
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
OFF = dataclasses.replace(CPU, disabled_rules=CPU.disabled_rules | {"period"})
ROWS, TERMS, COLUMNS = 16, 2100, 24

Function = Callable[[Any, Any], Any]


def parities(bits: Any, generator: Any) -> Any:
    """Of a block code, whose numbers come as floats."""
    return tf.math.floormod(tf.abs(tf.round(bits @ generator)), 2.0)


def parities_of_integers(bits: Any, generator: Any) -> Any:
    return tf.cast(tf.cast(bits @ generator, tf.int32) % 2, tf.float32)


def wrapped(bits: Any, generator: Any) -> Any:
    return tf.math.floormod(bits @ generator + math.pi, 2 * math.pi) - math.pi


def truncated(bits: Any, generator: Any) -> Any:
    return tf.truncatemod(tf.reshape(bits @ generator, [-1]), 7.0)


def features(bits: Any, generator: Any) -> Any:
    """Of random frequencies, as of coordinates for a network that prompts segment images."""
    angles = 2 * math.pi * ((2 * bits - 1) @ (generator * 0.03))
    return tf.concat([tf.sin(angles), tf.cos(angles)], -1)


def scaled_features(bits: Any, generator: Any) -> Any:
    angles = bits @ generator
    both = tf.stack([tf.sin(angles) * 0.1, tf.reshape(tf.cos(angles), [ROWS, -1]) * 0.1], -1)
    return tf.reshape(both, [ROWS, -1])


def rotations(bits: Any, generator: Any) -> Any:
    angles = bits @ generator
    turned = tf.complex(tf.cos(angles), tf.sin(angles))
    return tf.math.real(turned * tf.complex(0.6, 0.8))


def fractions(bits: Any, generator: Any) -> Any:
    turns = bits @ (generator * 0.7)
    return tf.concat([turns - tf.floor(turns), turns - 3.0 * tf.floor(turns / 3.0)], -1)


def wrapped_by_sines(bits: Any, generator: Any) -> Any:
    angles = bits @ (generator * 0.7)
    return tf.atan2(tf.sin(angles), tf.cos(angles))


def values() -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.integers(0, 2, s).astype("f4") for s in ((ROWS, TERMS), (TERMS, COLUMNS))]


def traced(function: Function) -> Any:
    return trace(function, tf.TensorSpec((ROWS, TERMS)), tf.TensorSpec((TERMS, COLUMNS)))


@pytest.mark.parametrize(
    "function",
    [
        *(parities, parities_of_integers, wrapped, truncated),
        *(features, scaled_features, rotations, fractions, wrapped_by_sines),
    ],
)
@pytest.mark.parametrize("config", [CPU, GPU], ids=["bfloat16", "float16"])
def test_rests_are_as_in_float32(function: Function, config: PrecisionConfig) -> None:
    found = traced(function)
    true, low = (
        found.run(g, *values()) for g in (found.graph_def, found.rewrite(config).graph_def)
    )
    np.testing.assert_allclose(low[0], true[0], atol=1e-3)


def sines(bits: Any, generator: Any) -> Any:
    """Layers whose activation is a sine; its gradient is a cosine."""
    with tf.GradientTape() as tape:
        tape.watch(generator)
        low = tf.sin(bits @ generator)
        y = tf.sin(low @ generator[:COLUMNS])
    return tf.concat([y, tf.sin(y)], -1) @ generator[: 2 * COLUMNS], tape.gradient(y, generator)


def by_turns(bits: Any, generator: Any) -> Any:
    """Integers of data have periods, which concern no product."""
    even = tf.cast(tf.range(COLUMNS) % 2, tf.float32)
    return tf.nn.relu(bits @ generator) * even @ generator[:COLUMNS]


def rounded_layers(bits: Any, generator: Any) -> Any:
    """Of few bits, with the gradient of what was not rounded; and part of another layer."""
    z = bits @ generator
    z = z + tf.stop_gradient(tf.floor(z + 0.5) - z)
    return tf.nn.relu(z - tf.floor(z @ generator[:COLUMNS])) @ generator[:COLUMNS]


def between_pixels(bits: Any, generator: Any) -> Any:
    """Places that a flow moved, which are near whatever it is."""
    places = tf.range(float(COLUMNS)) + tf.nn.relu(bits @ generator) @ generator[:COLUMNS]
    return (places - tf.floor(places)) * places


@pytest.mark.parametrize("function", [sines, by_turns, rounded_layers, between_pixels])
def test_networks_are_planned_as_ever(function: Function) -> None:
    found = traced(function)
    assert found.rewrite(CPU).report.converted_nodes
    assert found.rewrite(CPU).graph_def == found.rewrite(OFF).graph_def


def test_products_before_that_of_a_period_go_low() -> None:
    found = traced(lambda bits, w: tf.math.floormod(tf.nn.relu(bits @ w) @ w[:COLUMNS], 2.0))
    products = [d.reason for d in decisions_of(found.rewrite(CPU).report) if d.op == "MatMul"]
    assert sorted(reason is Reason.PERIOD for reason in products) == [False, True]


def test_the_reason_is_told_but_in_parity() -> None:
    found = traced(parities)
    reasons = {d.op: d.reason for d in decisions_of(found.rewrite(CPU).report)}
    assert reasons["MatMul"] is Reason.PERIOD
    parity = decisions_of(found.rewrite(dataclasses.replace(CPU, parity=True)).report)
    assert Reason.PERIOD not in {d.reason for d in parity}
