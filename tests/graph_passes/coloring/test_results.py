"""What is behind the last product and leads to results alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from decisions import decisions_of
from traced_graphs import trace

from graph_passes import PrecisionConfig, Reason, Rule

CPU = PrecisionConfig(
    target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("cast-cut",))
)
GPU = dataclasses.replace(CPU, target_dtype="float16", device="GPU")
OFF = dataclasses.replace(CPU, disabled_rules=CPU.disabled_rules | {"result"})
SIZE = 16


def values() -> list[np.ndarray]:
    """Numbers that bfloat16 has, so that the product rounds none, and what takes each once."""
    x = np.linspace(-6, 6, SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)
    return [np.round(x * 8) / 8, np.eye(SIZE, dtype=np.float32)]


def traced(function: Callable[[Any, Any], Any]) -> Any:
    return trace(function, tf.TensorSpec((SIZE, SIZE)), tf.TensorSpec((SIZE, SIZE)))


@tf.function
def classifier(x: Any, w: Any) -> Any:
    return tf.nn.softmax(x @ w)


GIVEN_OUT: dict[str, Callable[[Any, Any], Any]] = {
    "softmax": lambda x, w: tf.nn.softmax(x @ w),
    "moved": lambda x, w: tf.reshape(tf.identity(tf.nn.softmax(x @ w)), [-1, 4, SIZE]),
    "with its class": lambda x, w: (p := tf.nn.softmax(x @ w), tf.argmax(p, -1), tf.shape(p)),
    "of two heads": lambda x, w: (tf.sigmoid(x @ w), tf.tanh(x @ (w + 1.0))),
    "of a function": classifier,
    "places": lambda x, w: (tf.sigmoid(x @ w) + tf.range(16.0)) * 32.0,
    "forecast": lambda x, w: 0.37 * x[:, -1:] + x @ w,
    "step of diffusion": lambda x, w: (0.6 * x - 0.3 * (x @ w)) / 0.7,
    "picture": lambda x, w: tf.clip_by_value((tf.tanh(x @ w) + 1.0) * 127.5, 0.0, 255.0),
}


@pytest.mark.parametrize("function", GIVEN_OUT.values(), ids=GIVEN_OUT)
@pytest.mark.parametrize("config", [CPU, GPU], ids=["bfloat16", "float16"])
def test_results_are_exact(function: Callable[[Any, Any], Any], config: PrecisionConfig) -> None:
    """Of what a product gives that rounds nothing, they are those of float32."""
    found = traced(function)
    off = found.rewrite(dataclasses.replace(config, disabled_rules=OFF.disabled_rules))
    result = found.rewrite(config)
    assert result.report.casts_to_float32 == off.report.casts_to_float32
    true, exact, rounded = (
        found.run(graph, *values()) for graph in (found.graph_def, result.graph_def, off.graph_def)
    )
    for one, other in zip(exact, true, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    assert np.abs(rounded[0] - true[0]).max() > 1e-5


def read_by_a_product(x: Any, w: Any) -> Any:
    weights = tf.nn.softmax(x @ w)
    return weights, weights @ x


def with_a_bias(x: Any, w: Any) -> Any:
    return tf.nn.bias_add(x @ w, w[0])


def of_a_loop(x: Any, w: Any) -> Any:
    return tf.while_loop(lambda _: True, lambda h: [tf.tanh(h @ w)], [x], maximum_iterations=3)


@pytest.mark.parametrize("function", [read_by_a_product, with_a_bias, of_a_loop])
def test_what_more_is_made_of_goes_low(function: Callable[[Any, Any], Any]) -> None:
    found = traced(function)
    result = found.rewrite(CPU)
    assert result.graph_def == found.rewrite(OFF).graph_def
    lows = {d.op for d in decisions_of(result.report) if d.converted}
    assert not lows.isdisjoint({"Softmax", "BiasAdd", "Tanh"})


def test_rules_of_the_user_decide() -> None:
    found = traced(lambda x, w: tf.sigmoid(x @ w))
    rule = Rule(action="allow", op="Sigmoid", why="it is a mask")
    result = found.rewrite(dataclasses.replace(CPU, rules=(rule,)))
    assert {d.op for d in decisions_of(result.report) if d.converted} >= {"MatMul", "Sigmoid"}


def test_a_node_that_is_fetched_is_an_end() -> None:
    """What is made of it besides does not count."""
    found = traced(lambda x, w: tf.identity(tf.nn.softmax(x @ w), "p") @ x)
    assert {d.op for d in decisions_of(found.rewrite(CPU).report) if d.converted} >= {"Softmax"}
    result = found.rewrite(CPU, preserve=["p"])
    reasons = {d.op: d.reason for d in decisions_of(result.report)}
    assert reasons["Softmax"] is Reason.RESULT
