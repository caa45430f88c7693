"""Products of data over a handful of terms: geometry, and first layers that take coordinates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from decisions import Decision, decisions_of
from traced_graphs import Traced, trace

from graph_passes import PrecisionConfig, Reason

CPU = PrecisionConfig(
    target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("cast-cut",))
)
CONFIGS = {
    "bfloat16": CPU,
    "float16": dataclasses.replace(CPU, target_dtype="float16"),
    "GPU": PrecisionConfig(target_dtype="float16", device="GPU"),
}
OFF = dataclasses.replace(CPU, disabled_rules=CPU.disabled_rules | {"coordinate"})
ROWS, WIDTH = 512, 64
Function = Callable[[Any, Any], Any]


def drawn() -> list[np.ndarray]:
    """Points in a room of ten units, and a matrix for their coordinates."""
    random = np.random.default_rng(0)
    matrix = np.eye(3) + 0.3 * random.normal(size=(3, 3))
    return [random.uniform(-5, 5, (ROWS, 3)).astype("f4"), matrix.astype("f4")]


def moved(points: Any, matrix: Any) -> Any:
    return points @ matrix + 1.0


def turned(points: Any, matrix: Any) -> Any:
    return tf.matmul(matrix, points, transpose_a=True, transpose_b=True)


def seen(points: Any, matrix: Any) -> Any:
    """By a camera behind another one: one product is made of another."""
    focus, away = tf.linalg.diag([500.0, 500.0, 1.0]), tf.constant([0.0, 0.0, 40.0])
    image = tf.linalg.matvec(focus, tf.linalg.matvec(matrix @ matrix, points) + away)
    return image[:, :2] / image[:, 2:]


def homography(points: Any, matrix: Any) -> Any:
    places = tf.concat([points[:, :2], tf.ones_like(points[:, :1])], -1)
    image = tf.einsum("ij,...j->...i", matrix + tf.constant([[0.0], [0.0], [20.0]]), places)
    return image[:, :2] / image[:, 2:]


def colours(points: Any, matrix: Any) -> Any:
    pixels = tf.reshape(points, [2, 16, 16, 3])
    return tf.tensordot(pixels, matrix, [[3], [0]]) + tf.einsum("bhwc,cd->bhwd", pixels, matrix)


def angles(points: Any, matrix: Any) -> Any:
    first, second = (tf.math.l2_normalize(p, -1) for p in (points, points @ matrix))
    return tf.acos(0.999 * tf.einsum("ni,ni->n", first, second))


def form(points: Any, matrix: Any) -> Any:
    return tf.einsum("ni,ij,nj->n", points, matrix, points)


def traced(function: Function) -> Traced:
    return trace(function, tf.TensorSpec((ROWS, 3)), tf.TensorSpec((3, 3)))


def products(found: Traced, config: PrecisionConfig = CPU) -> list[Decision]:
    decisions = decisions_of(found.rewrite(config).report)
    return [d for d in decisions if d.op in ("MatMul", "BatchMatMulV2", "Einsum")]


@pytest.mark.parametrize("function", [moved, turned, seen, homography, colours, angles, form])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_geometry_is_as_in_float32(function: Function, config: PrecisionConfig) -> None:
    found = traced(function)
    (true,), (made,) = (
        found.run(g, *drawn()) for g in (found.graph_def, found.rewrite(config).graph_def)
    )
    np.testing.assert_allclose(made, true, rtol=1e-5, atol=1e-5 * np.abs(true).max())
    (low,) = found.run(found.rewrite(OFF).graph_def, *drawn())
    assert np.abs(low - true).max() > 1e-3 * np.abs(true).max()


def test_so_is_a_chain_of_turns() -> None:
    def chain(points: Any, matrix: Any) -> Any:
        for angle in range(300):
            points = points @ (matrix + 0.01 * angle)
        return points

    found = products(traced(chain))
    assert len(found) == 300 and not any(d.converted for d in found)


def second_derivative(points: Any, matrix: Any) -> Any:
    """Of a network by one of its coordinates, as the loss of a physics-informed one has it."""
    hidden, last = tf.repeat(matrix, WIDTH, 1)[:, :WIDTH], tf.ones((WIDTH, 1)) * points[0, 0]
    with tf.GradientTape() as outer:
        outer.watch(points)
        with tf.GradientTape() as inner:
            inner.watch(points)
            value = tf.sin(tf.sin(points @ hidden) @ tf.repeat(hidden, WIDTH // 3 + 1, 0)[:WIDTH])
            value = value @ last
        slope = inner.gradient(value, points)[:, :1]
    return outer.gradient(slope, points)[:, :1]


def test_of_a_network_what_coordinates_enter_stays_float32_and_all_else_goes_low() -> None:
    found = products(traced(second_derivative))
    kept = [d.node for d in found if d.reason is Reason.COORDINATES]
    assert {"matmul", "gradient_tape/gradient_tape/matmul/MatMul"} <= {*kept}  # one layer, twice
    assert not {"matmul_1", "matmul_2"} & {*kept}
    assert sum(d.converted for d in found) > len(kept)


def hidden_layers(x: Any, w: Any) -> Any:
    """A bottleneck of two units, and the gradient of an output of one."""
    with tf.GradientTape() as tape:
        tape.watch(w)
        loss = tf.reduce_sum(tf.tanh(tf.nn.relu(x @ w) @ w[:, :2] @ w[:2]) @ w[:, :1]) ** 2
    return tape.gradient(loss, w)


def experts(x: Any, w: Any) -> Any:
    """Whose masks are outer products of data, which are large and add up nothing."""
    one = tf.one_hot(tf.argmax(x, -1), WIDTH)
    return tf.einsum("sec,sd->ecd", tf.einsum("se,sc->sec", one, one), x @ w)


def picked(x: Any, w: Any) -> Any:
    """A row of a small table for each token, as BERT has one for each of two sentences."""
    return tf.nn.relu(tf.one_hot(tf.argmax(x, -1) % 2, 2) @ w[:2]) @ w


def few_rows(x: Any, w: Any) -> Any:
    """The gradient of weights adds up as many terms as there are rows."""
    with tf.GradientTape() as tape:
        tape.watch(w)
        loss = tf.reduce_sum(tf.nn.relu(x[:4] @ w) @ w) ** 2
    return tape.gradient(loss, w)


@pytest.mark.parametrize("function", [hidden_layers, experts, picked, few_rows])
def test_layers_are_planned_as_ever(function: Function) -> None:
    found = trace(function, tf.TensorSpec((ROWS, WIDTH)), tf.TensorSpec((WIDTH, WIDTH)))
    decisions = products(found)
    assert decisions and all(d.converted for d in decisions)


@pytest.mark.parametrize(("width", "stays"), [(1, True), (4, True), (5, False), (None, False)])
def test_a_layer_takes_at_most_four_coordinates_that_are_known(
    width: int | None, stays: bool
) -> None:
    specs = tf.TensorSpec((ROWS, width)), tf.TensorSpec((width, WIDTH))
    (product,) = products(trace(lambda x, w: tf.nn.relu(x @ w), *specs))
    assert product.converted != stays


def test_the_reason_is_told_but_in_parity() -> None:
    found = traced(moved)
    (product,) = products(found)
    assert product.reason is Reason.COORDINATES
    parity = PrecisionConfig(target_dtype="bfloat16", device="CPU", parity=True)
    assert all(d.converted for d in products(found, parity))
