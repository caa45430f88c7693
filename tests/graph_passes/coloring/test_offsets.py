"""Activations from which a constant near their value at 0 is taken: float32."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from decisions import decisions_of
from traced_graphs import Traced, trace

from graph_passes import PrecisionConfig, Reason

CONFIGS = {
    "bfloat16": PrecisionConfig(
        target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("cast-cut",))
    ),
    "float16": PrecisionConfig(target_dtype="float16", device="GPU"),
}
SIZE = 64

Function = Callable[[Any], Any]

OFFSETS: dict[str, Function] = {
    "shifted softplus": lambda z: tf.nn.softplus(z) - math.log(2),
    "logarithm in the graph": lambda z: tf.nn.softplus(z) - tf.math.log(2.0),
    "added": lambda z: -0.6931 + tf.nn.softplus(z),
    "scaled": lambda z: 2.0 * tf.sigmoid(z) - 1.0,
    "turned": lambda z: 1.0 - tf.reshape(tf.sigmoid(z), [-1, SIZE]) / 0.5,
    "negative": lambda z: -tf.sigmoid(z) + 0.5,
    "shrink": lambda z: z - tf.tanh(z),
    "soft sign": lambda z: tf.nn.softsign(z) - z,
    "arc tangent": lambda z: z - tf.atan(z),
}
OTHERS: dict[str, Function] = {
    "gate": lambda z: (1 - tf.sigmoid(z)) * z,
    "far": lambda z: tf.nn.softplus(z) - 1.0,
    "sum": lambda z: tf.nn.softplus(z) + math.log(2),
    "of another": lambda z: z - tf.tanh(z * z),
    "no number": lambda z: tf.sigmoid(z) - tf.fill([SIZE], 0.5) * z,
    "divisor": lambda z: 1.0 / tf.sigmoid(z) - 2.0,
}


def between_products(function: Function) -> Traced:
    spec = tf.TensorSpec((SIZE, SIZE))
    return trace(lambda x, w: function(x @ w) @ w, spec, spec)


def activations(found: Traced, config: PrecisionConfig) -> set[Reason]:
    decisions = decisions_of(found.rewrite(config).report)
    ops = "Atan", "Sigmoid", "Softplus", "Softsign", "Tanh"
    return {decision.reason for decision in decisions if decision.op in ops}


@pytest.mark.parametrize("form", OFFSETS)
def test_what_is_left_is_that_of_float32(form: str) -> None:
    """The arguments are numbers that bfloat16 has."""
    found = between_products(OFFSETS[form])
    x = np.random.default_rng(0).integers(-8, 8, (SIZE, SIZE)).astype(np.float32) / 64
    values = x, np.eye(SIZE, dtype=np.float32)
    (true,) = found.run(found.graph_def, *values)

    def error(config: PrecisionConfig) -> float:
        (made,) = found.run(found.rewrite(config).graph_def, *values)
        return float(np.abs(made - true).mean() / np.abs(true).mean())

    for config in CONFIGS.values():
        assert activations(found, config) == {Reason.DISTANCE}
        off = dataclasses.replace(config, disabled_rules=config.disabled_rules | {"distance"})
        assert error(config) < 0.005
        assert error(off) > 5 * error(config)  # what the rule is for


@pytest.mark.parametrize("form", OTHERS)
def test_other_differences_go_low(form: str) -> None:
    for config in CONFIGS.values():
        assert Reason.DISTANCE not in activations(between_products(OTHERS[form]), config)
