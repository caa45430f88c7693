"""Moments about a mean that are made of raw ones: float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from decisions import decisions_of
from traced_graphs import Traced, trace

from graph_passes import PrecisionConfig, Reason

CONFIGS = {
    "CPU": PrecisionConfig(target_dtype="bfloat16", device="CPU"),
    "GPU": PrecisionConfig(target_dtype="float16", device="GPU"),
}
CPU = CONFIGS["CPU"]
OFF = dataclasses.replace(CPU, disabled_rules=frozenset(("distance",)))
ROWS, WIDTH, SIDE = 80, 64, 24
DRAW = np.random.default_rng(0)
PRODUCTS = ("Conv", "MatMul", "Einsum")

Function = Callable[..., Any]


def mean(x: Any) -> Any:
    return tf.reduce_mean(x, 0, keepdims=True)


def by_sums(x: Any, y: Any) -> Any:
    """Correlations, as statistics books write them."""
    s, t = tf.reduce_sum(x, 0), tf.reduce_sum(y, 0)
    squares = (ROWS * tf.reduce_sum(z * z, 0) - tf.reduce_sum(z, 0) ** 2 for z in (x, y))
    scale = tf.sqrt(next(squares)[:, None] * next(squares))
    return (ROWS * tf.transpose(x) @ y - tf.tensordot(s, t, 0)) / scale


def by_ones(x: Any, _: Any) -> Any:
    """Those of a loss for domains."""
    rows = tf.cast(tf.shape(x)[0], tf.float32)
    total = tf.ones([1, tf.shape(x)[0]]) @ x
    return (tf.transpose(x) @ x - tf.transpose(total) @ total / rows) / (rows - 1)


def of_channels(x: Any, _: Any) -> Any:
    z = tf.transpose(x)[None]
    middle = tf.reduce_mean(z, 2, keepdims=True)
    return tf.matmul(z, z, transpose_b=True) / ROWS - tf.matmul(middle, middle, transpose_b=True)


COVARIANCES: dict[str, Function] = {
    "product of means": lambda x, _: (
        tf.matmul(x, x, transpose_a=True) / ROWS - tf.matmul(mean(x), mean(x), transpose_a=True)
    ),
    "outer product": lambda x, y: (
        tf.matmul(x, y, transpose_a=True) / ROWS - tf.transpose(mean(x)) * mean(y)
    ),
    "einsum": lambda x, _: tf.einsum("ni,nj->ij", x, x) - ROWS * tf.transpose(mean(x)) @ mean(x),
    "by sums": by_sums,
    "by ones": by_ones,
    "of channels": of_channels,
}


def windowed(lay: Function, x: Any, y: Any) -> Any:
    """The similarity of images, whose window is no constant."""
    a, b = lay(x), lay(y)
    across, one, other = lay(x * y) - a * b, lay(x**2) - a**2, lay(tf.square(y)) - tf.square(b)
    return across / (tf.maximum(one + other, 0.0) + 1e-6)


def error(found: Traced, config: PrecisionConfig, *values: np.ndarray) -> float:
    (true,) = found.run(found.graph_def, *values)
    (made,) = found.run(found.rewrite(config).graph_def, *values)
    return float(np.nan_to_num(np.abs(made - true), nan=np.inf).max() / np.abs(true).max())


@pytest.mark.parametrize("form", COVARIANCES)
def test_covariances_are_those_of_float32(form: str) -> None:
    found = trace(COVARIANCES[form], *[tf.TensorSpec((ROWS, WIDTH))] * 2)
    values = [DRAW.normal(10, 0.5, (ROWS, WIDTH)).astype(np.float32) for _ in range(2)]
    for config in CONFIGS.values():
        assert error(found, config, *values) < 1e-4
    assert error(found, OFF, *values) > 0.1  # what the rule is for


@pytest.mark.parametrize("op", [tf.nn.conv2d, tf.nn.depthwise_conv2d])
def test_moments_in_windows_are_those_of_float32(op: Function) -> None:
    def step(x: Any, y: Any, window: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(y)
            value = windowed(lambda z: op(z, window, [1, 1, 1, 1], "VALID"), x, y)
        return value, tape.gradient(value, y)

    image, window = tf.TensorSpec((1, SIDE, SIDE, 1)), tf.TensorSpec((5, 5, 1, 1))
    report = trace(step, image, image, window).rewrite(CPU).report
    found = [d for d in decisions_of(report) if any(name in d.op for name in PRODUCTS)]
    kept = [d for d in found if "BackpropFilter" not in d.op]  # that of the window, unread
    assert {d.reason for d in kept} == {Reason.DISTANCE} and len(kept) > 5
    value = trace(lambda *z: step(*z)[0], image, image, window)
    x = (0.5 + 0.1 * np.sin(np.indices((1, SIDE, SIDE, 1)).sum(0) / 3)).astype(np.float32)
    values = x, x + 0.01, np.full((5, 5, 1, 1), 0.04, np.float32)
    assert error(value, CPU, *values) < 1e-4
    assert error(value, OFF, *values) > 0.1


def pooled(x: Any, w: Any) -> Any:
    """A local normalization between two layers."""
    y = tf.nn.conv2d(x, w, 1, "SAME") + 10.0
    mean = tf.nn.avg_pool2d(y, 5, 1, "VALID")
    scale = tf.sqrt(tf.nn.avg_pool2d(y * y, 5, 1, "VALID") - mean * mean + 1e-3)
    return tf.nn.conv2d((y[:, 2:-2, 2:-2] - mean) / scale, w, 1, "SAME")


def test_variances_in_pools_are_those_of_float32() -> None:
    shapes = (2, SIDE, SIDE, 8), (3, 3, 8, 8)
    found = trace(pooled, *map(tf.TensorSpec, shapes))
    values = [DRAW.normal(size=shape).astype(np.float32) / 8 for shape in shapes]
    for config in CONFIGS.values():
        assert any(d.converted for d in decisions_of(found.rewrite(config).report))
        assert error(found, config, values[0] * 8, values[1]) < 0.05
    assert error(found, OFF, values[0] * 8, values[1]) > 1.0


def test_a_square_that_is_added_up_may_be_beyond_float16() -> None:
    def energies(x: Any, w: Any) -> Any:
        y = x @ w
        return tf.reduce_mean(y * y, -1), y @ w

    found = trace(energies, tf.TensorSpec((ROWS, WIDTH)), tf.TensorSpec((WIDTH, WIDTH)))
    values = np.full((ROWS, WIDTH), 100, np.float32), np.eye(WIDTH, dtype=np.float32) * 8
    result = found.rewrite(CONFIGS["GPU"])
    assert sum(d.converted for d in decisions_of(result.report) if d.op == "MatMul") == 2
    np.testing.assert_allclose(found.run(result.graph_def, *values)[0], 640000.0)


def factorized(x: Any, w: Any) -> Any:
    """A factorization machine: the weights are squared too."""
    return tf.square(x @ w) - tf.square(x) @ tf.square(w)


def centered(x: Any, w: Any) -> Any:
    return (x - mean(x)) @ w - mean(x @ w)


def gated(x: Any, w: Any) -> Any:
    return (x * tf.sigmoid(x)) @ w + x @ w * mean(x @ w)


def attention(x: Any, w: Any) -> Any:
    return tf.nn.softmax(x @ tf.transpose(x @ w)) @ x - mean(x)


@pytest.mark.parametrize("function", [factorized, centered, gated, attention])
def test_layers_go_low(function: Function) -> None:
    weights = tf.Variable(tf.ones((WIDTH, WIDTH)))

    def network(x: Any) -> Any:
        return function(x, weights)

    report = trace(network, tf.TensorSpec((ROWS, WIDTH))).rewrite(CPU).report
    found = [d for d in decisions_of(report) if any(name in d.op for name in PRODUCTS)]
    assert found and all(d.converted for d in found)


def test_parity_has_none_of_it() -> None:
    found = trace(COVARIANCES["by ones"], *[tf.TensorSpec((ROWS, WIDTH))] * 2)
    report = found.rewrite(dataclasses.replace(CPU, parity=True)).report
    assert all(d.reason is not Reason.DISTANCE for d in decisions_of(report))
