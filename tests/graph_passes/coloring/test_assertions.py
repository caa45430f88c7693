"""What assertions compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from decisions import decisions_of
from traced_graphs import Traced, trace

from graph_passes import PrecisionConfig, Reason

CPU = PrecisionConfig(
    target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("cast-cut",))
)
GPU = dataclasses.replace(CPU, target_dtype="float16", device="GPU")
OFF = dataclasses.replace(CPU, disabled_rules=CPU.disabled_rules | {"assertion"})
SIZE = 16


def traced(function: Callable[[Any, Any], Any]) -> Traced:
    return trace(function, tf.TensorSpec((SIZE, SIZE)), tf.TensorSpec((SIZE, SIZE)))


def kept(found: Traced, config: PrecisionConfig) -> set[str]:
    """The ops that stay float32 for an assertion's sake."""
    decisions = decisions_of(found.rewrite(config).report)
    return {each.op for each in decisions if each.reason is Reason.ASSERTION}


def adds_up(x: Any, w: Any) -> Any:
    p = tf.nn.softmax(x @ w)
    tf.debugging.assert_near(tf.reduce_sum(p, -1), 1.0)
    return p @ w


def bounded(x: Any, w: Any) -> Any:
    gate = tf.sigmoid(tf.nn.relu(x @ w))
    tf.debugging.assert_less(gate, 1.0)
    return gate @ w


def beside_a_branch(x: Any, w: Any) -> Any:
    """With products in branches these are planned together with the caller."""
    gate = tf.cond(x[0, 0] > 0, lambda: tf.sigmoid(x @ w), lambda: x)
    tf.debugging.assert_less(gate, 1.0)
    return gate @ w


def by_the_op(x: Any, w: Any) -> Any:
    gate = tf.tanh(x @ w)
    tf.raw_ops.Assert(condition=tf.reduce_all(tf.reshape(gate, [-1]) < 1.0), data=[gate])
    return gate @ w


@pytest.mark.parametrize(
    ("function", "op"),
    [(adds_up, "Softmax"), (bounded, "Sigmoid"), (beside_a_branch, "Sigmoid"), (by_the_op, "Tanh")],
)
@pytest.mark.parametrize("config", [CPU, GPU], ids=["bfloat16", "float16"])
def test_what_is_asserted_is_float32(
    function: Callable[[Any, Any], Any], op: str, config: PrecisionConfig
) -> None:
    found = traced(function)
    assert op in kept(found, config)
    low = {d.op for d in decisions_of(found.rewrite(config).report) if d.converted}
    assert "MatMul" in low and op not in low
    off = dataclasses.replace(config, disabled_rules=OFF.disabled_rules)
    assert op in {d.op for d in decisions_of(found.rewrite(off).report) if d.converted}
    assert not kept(found, dataclasses.replace(config, parity=True))


def of_sizes(x: Any, w: Any) -> Any:
    p = tf.nn.softmax(x @ w)
    tf.debugging.assert_equal(tf.shape(p)[1], SIZE)
    return p @ w


def of_an_argument(x: Any, w: Any) -> Any:
    tf.debugging.assert_greater(x, -100.0)
    return tf.tanh(x @ w) @ w


def branching(x: Any, w: Any) -> Any:
    """What a branch without an effect decides by is rounded as ever."""
    gate = tf.tanh(x @ w)
    return tf.cond(tf.reduce_all(gate < 1.0), lambda: gate @ w, lambda: x)


def of_a_residual_stream(x: Any, w: Any) -> Any:
    for _ in range(40):
        x = x + tf.tanh(x @ w)
    tf.debugging.assert_less(tf.reduce_max(x), 1e6)
    return x @ w


@pytest.mark.parametrize("function", [of_sizes, of_an_argument, branching, of_a_residual_stream])
def test_networks_are_planned_as_ever(function: Callable[[Any, Any], Any]) -> None:
    found = traced(function)
    assert found.rewrite(CPU).graph_def == found.rewrite(OFF).graph_def
