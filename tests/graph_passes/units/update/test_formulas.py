"""How far what the ops compute may be from what was written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

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
        (10.0 ** rng.uniform(-3, 1, 440) * sign).astype(np.float32)
        for sign in (rng.choice((-1, 1), 440), rng.choice((-1, 1), 440), 1)
    )
    w, m, v = tf.Variable(np.ones(440, np.float32)), tf.Variable(m0), tf.Variable(v0)

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


Held = Mapping[str, tf.Variable]


def of_adam(w: Held, g: tf.Tensor, *, second: Any = None, step: Any = None) -> None:
    """Adam's update, or one that differs in what `v` averages or in what `w` changes by."""
    w["m"].assign_add((g - w["m"]) * 0.1)
    w["v"].assign_add(((tf.square(g) if second is None else second) - w["v"]) * 0.01)
    m, v = w["m"], w["v"]
    w["w"].assign_sub(m * 0.05 / (tf.sqrt(v) + 1e-3) if step is None else step(m, v))


def of_rms(w: Held, g: tf.Tensor, *, below: Any, mean: float = 0.1, times: float = 1.0) -> None:
    """RMSprop's update with a momentum, or one that differs in what it divides by."""
    w["v"].assign_add((tf.square(g) - w["v"]) * 0.1)
    w["c"].assign_add((g - w["c"]) * mean)
    w["m"].assign(w["m"] * 0.9 + 0.01 * g / below(w["v"], w["c"]))
    w["w"].assign_sub(w["m"] * times)


def of_momentum(w: Held, kept: Any, change: Any) -> None:
    w["m"].assign(w["m"] * kept + change)
    w["w"].assign_add(w["m"])


def centred(v: tf.Variable, c: tf.Variable) -> tf.Tensor:
    return tf.sqrt(v - tf.square(c) + 1e-2)


def delayed(w: Held, g: tf.Tensor) -> None:
    """The step takes the average as it was before."""
    before = w["m"] * 0.1
    w["m"].assign(w["m"] * 0.9 + g)
    w["w"].assign_add(before)
    w["c"].assign_add(w["m"] * 0.5)


def shared(w: Held, g: tf.Tensor) -> None:
    of_momentum(w, 0.9, g)
    w["c"].assign_add(w["m"])


def read_in_turn(w: Held, g: tf.Tensor) -> None:
    handle = w["m"].handle
    first = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
    with tf.control_dependencies([first]):
        second = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
    w["m"].assign(0.9 * second + g + 0.0 * first)
    w["w"].assign_add(w["m"])


NEAR: dict[str, Callable[[Held, tf.Tensor, tf.Tensor, tf.Tensor], None]] = {
    "adam": lambda w, g, h, s: of_adam(w, g),
    "the square of another": lambda w, g, h, s: of_adam(w, g, second=tf.square(h)),
    "another": lambda w, g, h, s: of_adam(w, g, second=h),
    "an average of an average": lambda w, g, h, s: of_adam(w, g, second=w["m"]),
    "two steps": lambda w, g, h, s: of_adam(
        w, g, step=lambda m, v: m * 0.05 / (tf.sqrt(v) + 1e-3) + 0.1 * h
    ),
    "epsilon in the root": lambda w, g, h, s: of_adam(
        w, g, step=lambda m, v: m * 0.05 / tf.sqrt(v + 1e-3)
    ),
    "no epsilon": lambda w, g, h, s: of_adam(w, g, step=lambda m, v: m * 0.05 / tf.sqrt(v)),
    "a tensor for an epsilon": lambda w, g, h, s: of_adam(
        w, g, step=lambda m, v: m * 0.05 / (tf.sqrt(v) + h)
    ),
    "twice the root": lambda w, g, h, s: of_adam(
        w, g, step=lambda m, v: m * 0.05 / (2.0 * tf.sqrt(v) + 1e-3)
    ),
    "a root by a tensor": lambda w, g, h, s: of_adam(
        w, g, step=lambda m, v: m * 0.05 / (h * tf.sqrt(v) + 1e-3)
    ),
    "one by the root": lambda w, g, h, s: of_adam(
        w, g, step=lambda m, v: m * 0.05 / (tf.math.rsqrt(v) + 1e-3)
    ),
    "a root of more": lambda w, g, h, s: of_adam(
        w, g, step=lambda m, v: m * 0.05 / (tf.sqrt(v + h) + 1e-3)
    ),
    "divided by more": lambda w, g, h, s: of_adam(
        w, g, step=lambda m, v: m * 0.05 * h / (tf.sqrt(v) + 1e-3)
    ),
    "divided twice": lambda w, g, h, s: of_adam(
        w, g, step=lambda m, v: m * 0.05 / tf.square(tf.sqrt(v) + 1e-3)
    ),
    "divided by one tensor twice": lambda w, g, h, s: of_adam(
        w, g, step=lambda m, v: m * 0.05 / (d := tf.sqrt(v) + 1e-3) / d
    ),
    "one divided": lambda w, g, h, s: of_adam(
        w, g, step=lambda m, v: 0.05 / (tf.sqrt(v) + 1e-3) + 0.0 * m
    ),
    "a rate of two": lambda w, g, h, s: of_adam(
        w, g, step=lambda m, v: m * s / (d := tf.sqrt(v) + 1e-3) + m * 0.1 / d
    ),
    "one by the rate": lambda w, g, h, s: of_adam(
        w, g, step=lambda m, v: m / s / (tf.sqrt(v) + 1e-3)
    ),
    "an infinite rate": lambda w, g, h, s: of_adam(
        w, g, step=lambda m, v: m * np.inf / (tf.sqrt(v) + 1e-3)
    ),
    "rms": lambda w, g, h, s: of_rms(w, g, below=lambda v, c: tf.sqrt(v + 1e-2)),
    "no epsilon in rms": lambda w, g, h, s: of_rms(w, g, below=lambda v, c: tf.sqrt(v)),
    "no root": lambda w, g, h, s: of_rms(w, g, below=lambda v, c: v + 1e-2),
    "a root of two": lambda w, g, h, s: of_rms(w, g, below=lambda v, c: tf.sqrt(v + v + 1e-2)),
    "twice the momentum": lambda w, g, h, s: of_rms(
        w, g, below=lambda v, c: tf.sqrt(v + 1e-2), times=2.0
    ),
    "centred": lambda w, g, h, s: of_rms(w, g, below=centred),
    "centred by another rate": lambda w, g, h, s: of_rms(w, g, below=centred, mean=0.05),
    "momentum": lambda w, g, h, s: of_momentum(w, 0.9, -0.1 * g),
    "a rate in a tensor": lambda w, g, h, s: of_momentum(w, s, -s * g),
    "two gradients": lambda w, g, h, s: w["w"].assign_sub(0.1 * g + 0.2 * h),
    "a gradient twice": lambda w, g, h, s: w["w"].assign_sub(0.1 * g + s * g),
    "before": lambda w, g, h, s: delayed(w, g),
    "one average of two": lambda w, g, h, s: shared(w, g),
    "two reads in turn": lambda w, g, h, s: read_in_turn(w, g),
}
for kept, taken in ((0.9, 0.2), (1.1, -0.1), (None, 0.1), (0.9, None)):

    def averaged(w: Held, g: Any, h: Any, s: Any, kept: Any = kept, taken: Any = taken) -> None:
        w["m"].assign(w["m"] * (s if kept is None else kept) + g * (s if taken is None else taken))
        w["v"].assign_add((tf.square(g) - w["v"]) * 0.01)
        w["w"].assign_sub(w["m"] * 0.05 / (tf.sqrt(w["v"]) + 1e-3))

    NEAR[f"{kept} and {taken}"] = averaged
OPS = {
    **dict.fromkeys(("adam", "1.1 and -0.1", "an infinite rate"), "Adam"),
    **dict.fromkeys(
        ("momentum", "a rate in a tensor", "one average of two", "two reads in turn"),
        "KerasMomentum",
    ),
    **dict.fromkeys(("rms", "no epsilon in rms"), "RMSProp"),
    "centred": "CenteredRMSProp",
}
"""What becomes of them; the others are left, or their last step alone is an op."""


@pytest.mark.parametrize("name", NEAR)
def test_what_is_near_a_formula_is_computed_as_written(name: str) -> None:
    rng = np.random.default_rng(0)
    held = {each: tf.Variable(rng.uniform(1, 2, 5).astype("f")) for each in "wmvc"}

    def step(g: tf.Tensor, h: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
        NEAR[name](held, g, h, s)
        return tf.constant(0.0)

    given = (*rng.uniform(0.5, 1, (2, 5)).astype("f"), np.float32(0.25))
    program = dataclasses.replace(trace(step, *given), targets=())
    result = rewrite_graph(program, CPU)
    ops = {node.op.removeprefix("ResourceApply") for node in result.graph_def.node}
    assert ops & {*OPS.values()} == {OPS[each] for each in OPS if each == name}
    before, after = program.run(program.graph_def, 3), program.run(result.graph_def, 3)
    for key, old in before.items():
        np.testing.assert_allclose(after[key], old, rtol=1e-4, err_msg=key)
