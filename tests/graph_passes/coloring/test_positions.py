"""Positions that indices are made of, and boxes: float32 back to the last product."""

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

# Bytes would keep so little arithmetic float32, and so would what is a result.
LARGE = frozenset(("cast-cut", "result"))
CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU", disabled_rules=LARGE)
GPU = PrecisionConfig(target_dtype="float16", device="GPU", disabled_rules=LARGE)
OFF = dataclasses.replace(CPU, disabled_rules=LARGE | {"position"})
SIDE = 300

Function = Callable[[Any, Any], Any]


def positions(x: Any, w: Any) -> Any:
    """Places in a row, moved by a prediction, that may not leave it."""
    moved = tf.range(float(SIDE)) + x @ w
    return tf.clip_by_value(moved, 0.0, SIDE - 1.001)


def warped(x: Any, w: Any) -> Any:
    """Between two pixels."""
    places = positions(x, w)
    left = tf.floor(places)
    part, index = places - left, tf.cast(left, tf.int32)
    pick = [tf.gather(x, tf.clip_by_value(index + i, 0, SIDE - 1), batch_dims=1) for i in (0, 1)]
    return (1 - part) * pick[0] + part * pick[1]


def nearest(x: Any, w: Any) -> Any:
    index = tf.cast(tf.round(positions(x, w)), tf.int64)
    rows = tf.range(index.shape[0], dtype=tf.int64)[:, None] + 0 * index
    return tf.gather_nd(x, tf.stack([rows, index], -1))


def bins(x: Any, w: Any) -> Any:
    return tf.one_hot(tf.cast(positions(x, w), tf.int32), SIDE)


def row() -> Any:
    """An image each of whose pixels tells its place."""
    return tf.tile(tf.range(float(SIDE))[None, None, :, None], [1, 2, 1, 1])


def cropped(x: Any, w: Any) -> Any:
    left = tf.reshape(positions(x, w)[:, 250:], [-1]) / (SIDE - 1)
    boxes = tf.stack([0 * left, left, 0 * left, left], -1)
    return tf.image.crop_and_resize(row(), boxes, tf.zeros(left.shape, tf.int32), [1, 1])


def transformed(x: Any, w: Any) -> Any:
    shift = positions(x, w)[0, 250:, None]
    one, zero = tf.ones_like(shift), tf.zeros_like(shift)
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=tf.tile(row(), [50, 1, 1, 1]),
        transforms=tf.concat([one, zero, shift, zero, one, zero, zero, zero], 1),
        output_shape=[1, 1],
        fill_value=0.0,
        interpolation="BILINEAR",
    )


def values() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(4, SIDE)).astype(np.float32)
    return [x, 0.05 * draw.normal(size=(SIDE, SIDE)).astype(np.float32)]


def far_off(function: Function, config: PrecisionConfig) -> float:
    """The share of elements that are not what float32 gives."""
    found = trace(function, tf.TensorSpec((4, SIDE)), tf.TensorSpec((SIDE, SIDE)))
    result = found.rewrite(config)
    assert any(d.converted for d in decisions_of(result.report) if d.op == "MatMul")
    (true,) = found.run(found.graph_def, *values())
    (made,) = found.run(result.graph_def, *values())
    return float((np.abs(made - true) > 0.1).mean())


@pytest.mark.parametrize("function", [warped, nearest, bins, cropped, transformed])
def test_indices_are_those_of_float32(function: Function) -> None:
    wrong = {name: far_off(function, c) for name, c in {"on": CPU, "half": GPU, "off": OFF}.items()}
    assert max(wrong["on"], wrong["half"]) < 0.01
    assert wrong["off"] > 3 * wrong["on"] and wrong["off"] > 0.001


def quantized(x: Any, w: Any) -> Any:
    """Training for integers: rounded values with the gradient of those that were not."""
    for _ in range(2):
        x = tf.nn.relu(x @ w)
        x = x + tf.stop_gradient(tf.round(x * 16.0) / 16.0 - x)
    return x @ w


def dropped_out(x: Any, w: Any) -> Any:
    x = tf.nn.relu(x @ w)
    return (x / 0.5 * tf.floor(0.5 + tf.random.uniform((4, SIDE)))) @ w


def an_image(x: Any, w: Any) -> Any:
    image = tf.sigmoid(x @ w)
    return tf.cast(tf.cast(image * 255.0, tf.uint8), tf.float32) + image @ w


def counted(x: Any, w: Any) -> Any:
    """Integers that pick nothing, beside some that do."""
    logits = x @ w
    found = tf.cast(logits > 0.5, tf.int32) + tf.cast(tf.round(logits), tf.int32)
    return tf.cast(found, tf.float32) @ w + tf.gather(w, tf.argmax(logits, -1))


def found_by_levels(x: Any, w: Any) -> Any:
    """What picks is made of scores, which are made of integers."""
    levels = tf.cast(tf.cast(8.0 * tf.nn.relu(x @ w), tf.int32), tf.float32)
    return tf.gather(w, tf.argmax(tf.nn.relu(levels @ w), -1))


def truncated(x: Any, w: Any) -> Any:
    """Of a product nothing is computed before it picks."""
    return tf.gather(w, tf.cast(x @ w, tf.int32)[:, 0] % SIDE) @ w


NO_POSITIONS = [quantized, dropped_out, an_image, counted, found_by_levels, truncated]


@pytest.mark.parametrize("function", NO_POSITIONS)
def test_what_only_rounds_is_planned_as_ever(function: Function) -> None:
    found = trace(function, tf.TensorSpec((4, SIDE)), tf.TensorSpec((SIDE, SIDE)))
    assert found.rewrite(CPU).graph_def == found.rewrite(OFF).graph_def


def test_the_reason_is_told_but_in_parity() -> None:
    found = trace(warped, tf.TensorSpec((4, SIDE)), tf.TensorSpec((SIDE, SIDE)))
    reasons = {d.op: d.reason for d in decisions_of(found.rewrite(CPU).report)}
    assert reasons["Floor"] is Reason.POSITION
    parity = decisions_of(found.rewrite(dataclasses.replace(CPU, parity=True)).report)
    assert Reason.POSITION not in {d.reason for d in parity}
