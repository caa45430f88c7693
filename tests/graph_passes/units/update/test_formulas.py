"""How far what the ops compute may be from what was written."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import trace
from rewrite_checks import rewrite_graph

from graph_passes import PrecisionConfig

CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU")
RATES = st.sampled_from([0.5, 0.1, 0.05, 0.02, 0.01, 0.005, 0.001, 0.0005])
HALF_A_PLACE = 2.0**-25
"""Half the distance of floats just below 1: how far a rate is moved at most."""


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(rates=st.tuples(RATES, RATES), seed=st.integers(0, 99))
def test_slots_of_adam_are_off_by_the_rate(rates: tuple[float, float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    g, m0, v0 = (
        (10.0 ** rng.uniform(-3, 1, 500) * sign).astype(np.float32)
        for sign in (rng.choice((-1, 1), 500), rng.choice((-1, 1), 500), 1)
    )
    w, m, v = tf.Variable(np.ones(500, np.float32)), tf.Variable(m0), tf.Variable(v0)

    def step(gradient: tf.Tensor) -> tf.Tensor:
        m.assign_add((gradient - m) * rates[0])
        v.assign_add((tf.square(gradient) - v) * rates[1])
        w.assign_sub(m * 0.01 / (tf.sqrt(v) + 1e-7))
        return tf.constant(0.0)

    program = dataclasses.replace(trace(step, g), targets=())
    result = rewrite_graph(program, CPU)
    assert result.units == ("fused-update: AssignSubVariableOp",)
    before = program.run(program.graph_def, 1)
    after = program.run(result.graph_def, 1)
    start = {
        name: program.state[name.removeprefix("variable ")] for name in before if "var" in name
    }
    for name, old in start.items():
        if np.array_equal(old, m0):
            target, largest = g, np.maximum(np.abs(m0), np.abs(g))
        elif np.array_equal(old, v0):
            target, largest = g * g, np.maximum(v0, g * g)
        else:
            step_of = np.abs(before[name] - old)
            bound = 2.0**-14 * step_of + 1e-6 * np.maximum(np.abs(before[name]), 1)
            assert np.all(np.abs(after[name] - before[name]) <= bound)
            continue
        bound = HALF_A_PLACE * np.abs(target - old) + np.spacing(largest)
        assert np.all(np.abs(after[name] - before[name]) <= bound)


@pytest.mark.parametrize("rate", [1e-4, 3e-5, 1e-7])
def test_rates_that_would_be_far_off_are_left(rate: float) -> None:
    w, m, v = (tf.Variable(np.ones(3, np.float32)) for _ in range(3))

    def step(gradient: tf.Tensor) -> tf.Tensor:
        m.assign_add((gradient - m) * 0.1)
        v.assign_add((tf.square(gradient) - v) * rate)
        w.assign_sub(m * 0.01 / (tf.sqrt(v) + 1e-7))
        return tf.constant(0.0)

    program = dataclasses.replace(trace(step, np.ones(3, np.float32)), targets=())
    result = rewrite_graph(program, CPU)
    assert not any(node.op == "ResourceApplyAdam" for node in result.graph_def.node)
