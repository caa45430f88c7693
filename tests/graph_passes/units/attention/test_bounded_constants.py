"""Constants between bfloat16's largest number and float32's, as masks are made with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from traced_graphs import Traced, of_op, trace

from graph_passes import PrecisionConfig

CPU = PrecisionConfig(
    target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("cast-cut",))
)
RULE = "bounded-constant"
LEAST = float(tf.float32.min)
BFLOAT16 = float(tf.bfloat16.max)
LENGTH, WIDTH = 8, 16
Masked = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

FORMS: dict[str, Masked] = {
    "added": lambda scores, mask: scores + (1.0 - mask) * LEAST,
    "multiplied": lambda scores, mask: scores * mask + (1.0 - mask) * scores.dtype.min,
    "replaced": lambda scores, mask: tf.where(mask > 0, scores, LEAST),
    "filled": lambda scores, mask: tf.where(
        tf.broadcast_to(mask, tf.shape(scores)) > 0, scores, tf.fill(tf.shape(scores), LEAST)
    ),
    "of an array": lambda scores, mask: tf.minimum(
        scores, np.float32([[0.0] * (LENGTH - 1) + [LEAST]]) + (1.0 - mask) * 1e30
    ),
    "subtracted": lambda scores, mask: scores - (1.0 - mask) * tf.float32.max,
}


def attention(masked: Masked) -> Callable[..., list[tf.Tensor]]:
    def step(x: tf.Tensor, mask: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            scores = tf.matmul(x, x, transpose_b=True) / WIDTH
            y = tf.matmul(tf.nn.softmax(masked(scores, mask)), x)
        return [y, tape.gradient(y, x)]

    return step


def traced(masked: Masked) -> Traced:
    return trace(
        attention(masked), tf.TensorSpec((None, LENGTH, WIDTH)), tf.TensorSpec((None, 1, LENGTH))
    )


def given() -> list[np.ndarray]:
    """Examples of which one is masked wholly."""
    x = np.random.default_rng(0).normal(size=(3, LENGTH, WIDTH)).astype(np.float32)
    mask = np.ones((3, 1, LENGTH), np.float32)
    mask[0], mask[1, 0, 3:] = 0, 0
    return [x, mask]


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_stays_finite(form: str) -> None:
    graph, inputs = traced(FORMS[form]), given()
    before = graph.run(graph.graph_def, *inputs)
    after = graph.run(graph.rewrite(CPU).graph_def, *inputs)
    for old, new in zip(before, after, strict=True):
        assert np.isfinite(old).all()
        np.testing.assert_allclose(new, old, atol=0.03 * np.abs(old).max())


def test_without_the_rule_a_row_that_is_masked_wholly_is_no_number() -> None:
    off = dataclasses.replace(CPU, disabled_rules=CPU.disabled_rules | {RULE})
    graph = traced(FORMS["added"])
    assert np.isnan(graph.run(graph.rewrite(off).graph_def, *given())[0]).any()


@pytest.mark.parametrize(
    ("value", "becomes"),
    [
        (LEAST, -BFLOAT16),
        (-LEAST, BFLOAT16),
        ([1.0, LEAST, -np.inf, np.nan], [1.0, -BFLOAT16, -np.inf, np.nan]),
        (-BFLOAT16, None),
        (-1e9, None),
        (-np.inf, None),
        (np.nan, None),
    ],
)
def test_what_becomes_of_a_constant(value: object, becomes: object) -> None:
    def added(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, x)[0] + tf.constant(value, tf.float32)

    fusion = trace(added, tf.TensorSpec((4, 4))).find(CPU)
    found = [node for node in of_op(fusion.proto, "Const") if node.name.endswith("/bounded")]
    assert len(found) == (becomes is not None)
    if found:
        np.testing.assert_array_equal(tf.make_ndarray(found[0].attr["value"].tensor), becomes)


def test_one_that_is_fetched_stays() -> None:
    def added(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, x) + tf.constant(LEAST, name="kept")

    graph = trace(added, tf.TensorSpec((4, 4)))
    assert graph.find(CPU).units
    assert not graph.find(CPU, preserve=["kept"]).units


@pytest.mark.parametrize(
    "config",
    [
        PrecisionConfig(target_dtype="float16", device="GPU"),
        dataclasses.replace(CPU, parity=True),
        dataclasses.replace(CPU, disabled_rules=frozenset((RULE,))),
    ],
    ids=["float16", "parity", "switched off"],
)
def test_where_it_is_not_for(config: PrecisionConfig) -> None:
    fusion = traced(FORMS["added"]).find(config)
    assert not [unit for unit in fusion.units if unit.startswith(RULE)]


LARGEST = float(tf.float32.max)
MARKS: dict[str, Callable[[tf.Tensor, tf.Tensor], object]] = {
    "compared": lambda x, _: tf.where(tf.equal(x, LARGEST), 0.0, x),
    "spread and compared": lambda x, _: tf.cast(x < tf.fill(tf.shape(x), LARGEST), tf.float32),
    "a limit that is compared": lambda x, y: tf.cast(tf.minimum(x, LARGEST) < LARGEST, y.dtype),
    "picked and compared": lambda x, y: tf.cast(
        tf.equal(tf.where(y > 0, LARGEST, y), LARGEST), y.dtype
    ),
    "a branch": lambda x, y: tf.equal(
        tf.cond(y[0, 0] > 0, lambda: tf.fill([4, 4], LARGEST), lambda: x), LARGEST
    ),
}


@pytest.mark.parametrize("form", MARKS)
def test_what_marks_a_missing_value_stays(form: str) -> None:
    """As files of measurements mark it: what comes from outside is no bounded constant."""

    def marked(x: tf.Tensor) -> list[tf.Tensor]:
        y = tf.matmul(tf.clip_by_value(x, -4.0, 4.0), tf.eye(4))
        return [y, MARKS[form](x, y)]

    graph = trace(marked, tf.TensorSpec((4, 4)))
    x = np.float32([[1.0, LARGEST, -1.0, LARGEST]] * 4)
    wanted, found = (graph.run(g, x)[1] for g in (graph.graph_def, graph.rewrite(CPU).graph_def))
    np.testing.assert_array_equal(found, wanted)
