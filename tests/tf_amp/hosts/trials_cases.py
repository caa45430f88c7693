"""A script for `test_function_trials`: a step that counts its calls, under a trial."""

from __future__ import annotations

import logging
import types

import numpy as np
import tensorflow as tf
from function_harness import report, switch_on, weights
from sizes_cases import WIDTH, ran

from tf_amp.hosts import function_trials


def main() -> None:
    switch_on(trial_steps=2)
    weight, count = tf.Variable(weights()), tf.Variable(0)

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, weight)

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        count.assign_add(1)
        return inner(x)

    x = tf.constant(weights(1))
    exact = tf.matmul(x, weight)
    dtypes = [ran(lambda: step(x)) for _ in range(8)]
    report("arguments", types=dtypes, count=int(count), error=float(np.abs(step(x) - exact).max()))

    data = tf.data.Dataset.from_tensor_slices(weights(2, (20, 64))).repeat().batch(3)
    batches = iter(data)

    @tf.function
    def pull(batches: tf.data.Iterator) -> tf.Tensor:
        count.assign_add(1)
        return tf.matmul(next(batches), weight)

    count.assign(0)
    dtypes = [ran(lambda: pull(batches)) for _ in range(8)]
    report("iterator", types=dtypes, count=int(count), shape=pull(batches).shape.as_list())


def lost(batched: bool) -> None:
    """A function that is slower by every clock, and then is part of another one."""
    installed = switch_on(trial_steps=1)
    weight, x = tf.Variable(weights()), tf.constant(weights(1))
    # Rounds begin with the rewritten one and with the original in turns.
    ticks = iter([0, 1, 1, 2, 2, 3, 3, 9, 9, 10])
    function_trials.time = types.SimpleNamespace(perf_counter=lambda: next(ticks))

    @tf.function(input_signature=[tf.TensorSpec((None if batched else 64, 64))])
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, weight)

    def converted() -> list[int]:
        status = installed.status()
        return [status["graphs_rewritten"], status["nodes_converted"]]

    step(x)
    report("planned", converted=converted())
    for _ in range(3):
        step(x)
    report("lost", converted=converted(), types=ran(lambda: step(x)))

    @tf.function
    def caller(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(step(x), weight)

    caller(x)
    report("called by another", converted=converted())


def kept(table: str) -> None:
    """A function that stays float32 for one size of its batch, and is slower low for others."""
    installed = switch_on(trial_steps=1, cost_table=table)
    function_trials._Outcomes.find = lambda *_: (2.0, 1.0)  # type: ignore[method-assign]
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tf_amp").addHandler(handler)
    weight = tf.Variable(weights(0, (WIDTH, WIDTH)))

    @tf.function(input_signature=[tf.TensorSpec((None, WIDTH))])
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, weight)

    for rows in (1, 3000, 20_000):
        for _ in range(2):
            step(tf.ones((rows, WIDTH)))
        counted = [(row.name, row.products_low) for row in installed.status().functions]
        tried = sum("a call takes" in line for line in said)
        report(f"{rows} rows", tried=tried, counted=counted)
