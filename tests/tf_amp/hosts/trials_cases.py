"""A script for `test_function_trials`: a step that counts its calls, under a trial."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from function_harness import report, switch_on, weights
from sizes_cases import ran


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
    types = [ran(lambda: step(x)) for _ in range(8)]
    report("arguments", types=types, count=int(count), error=float(np.abs(step(x) - exact).max()))

    data = tf.data.Dataset.from_tensor_slices(weights(2, (20, 64))).repeat().batch(3)
    batches = iter(data)

    @tf.function
    def pull(batches: tf.data.Iterator) -> tf.Tensor:
        count.assign_add(1)
        return tf.matmul(next(batches), weight)

    count.assign(0)
    types = [ran(lambda: pull(batches)) for _ in range(8)]
    report("iterator", types=types, count=int(count), shape=pull(batches).shape.as_list())
