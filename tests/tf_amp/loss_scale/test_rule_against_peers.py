"""The rule beside TensorFlow's and Keras's, step by step on 1,000 random sequences."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_amp.loss_scale.manager import LossScaleManager
from tf_amp.loss_scale.rule import FLOAT32_MAX, DynamicLossScale

LENGTH = 40
# (growth interval, sequences); 1,000 in all.
GROUPS = [(1, 250), (2, 250), (5, 250), (17, 250)]


def sequences(interval: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(interval)
    finite_share = rng.choice([0.05, 0.3, 0.5, 0.8, 0.95, 1.0], size=(count, 1))
    return rng.random((count, LENGTH)) < finite_share


def run_rule(rule: DynamicLossScale, finite: np.ndarray) -> np.ndarray:
    out = np.zeros((*finite.shape, 2))
    for i, sequence in enumerate(finite):
        state = rule.initial_state()
        for j, flag in enumerate(sequence):
            state = rule.update(state, bool(flag))
            out[i, j] = state.scale, state.good_steps
    return out


def run_in_graph(finite: np.ndarray, reset, step, read) -> np.ndarray:
    """Runs a stateful implementation on all sequences within one function."""

    @tf.function
    def run(flags):
        def one_step(flag):
            step(tf.where(flag, 1.0, np.float32("nan")))
            return tf.stack([tf.cast(value, tf.float32) for value in read()])

        def one_sequence(sequence):
            with tf.control_dependencies(reset()):
                return tf.map_fn(
                    one_step, sequence, fn_output_signature=tf.float32, parallel_iterations=1
                )

        return tf.map_fn(one_sequence, flags, fn_output_signature=tf.float32, parallel_iterations=1)

    return run(tf.constant(finite)).numpy()


@pytest.mark.parametrize(("interval", "count"), GROUPS)
def test_equals_tensorflow(interval: int, count: int) -> None:
    finite = sequences(interval, count)
    peer = tf.compat.v1.mixed_precision.DynamicLossScale(
        initial_loss_scale=2.0**15, increment_period=interval
    )
    theirs = run_in_graph(
        finite,
        lambda: [
            peer._current_loss_scale.assign(2.0**15),
            peer._num_good_steps.assign(0),
        ],
        lambda gradient: peer.update([gradient]),
        lambda: [peer._current_loss_scale, peer._num_good_steps],
    )
    ours = run_rule(DynamicLossScale(growth_interval=interval, ceiling=FLOAT32_MAX), finite)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("interval", "count"), GROUPS)
def test_equals_keras(interval: int, count: int) -> None:
    finite = sequences(interval, count)
    variable = keras.Variable(0.0)
    peer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.0), initial_scale=2.0**15, dynamic_growth_steps=interval
    )
    peer.build([variable])
    theirs = run_in_graph(
        finite,
        lambda: [
            peer.dynamic_scale.value.assign(2.0**15),
            peer.step_counter.value.assign(0),
        ],
        lambda gradient: peer.apply([gradient], [variable]),
        lambda: [peer.dynamic_scale.value, peer.step_counter.value],
    )
    # Keras has no bounds; ours are moved out of the way.
    rule = DynamicLossScale(growth_interval=interval, floor=2.0**-100, ceiling=FLOAT32_MAX)
    np.testing.assert_array_equal(run_rule(rule, finite), theirs)


@pytest.mark.parametrize(("interval", "count"), GROUPS)
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_the_manager_equals_the_rule(interval: int, count: int, hysteresis: int) -> None:
    finite = sequences(interval, count)
    rule = DynamicLossScale(growth_interval=interval, hysteresis=hysteresis)
    manager = LossScaleManager(rule)
    scale, good_steps, *others = manager.variables
    theirs = run_in_graph(
        finite,
        lambda: [scale.assign(2.0**15), *(v.assign(0) for v in (good_steps, *others))],
        lambda gradient: manager.assign(manager.plan(tf.math.is_finite(gradient))),
        lambda: [scale, good_steps],
    )
    np.testing.assert_array_equal(run_rule(rule, finite), theirs)


def test_at_the_bounds_ours_stays_finite_and_keras_does_not() -> None:
    def keras_scale(initial: float, gradient: float, steps: int) -> tuple[float, float]:
        variable = keras.Variable(1.0)
        peer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=initial, dynamic_growth_steps=1
        )
        peer.build([variable])

        @tf.function
        def run(value):
            for _ in tf.range(steps):
                peer.apply([value], [variable])

        run(tf.constant(gradient))
        scale = float(peer.dynamic_scale.numpy())
        # One more step, with the gradient of a loss of 1 * variable.
        peer.apply([peer.scale_loss(tf.constant(1.0))], [variable])
        return scale, float(variable.numpy())

    collapsed, weight = keras_scale(2.0**15, float("nan"), 200)
    assert collapsed == 0.0
    assert np.isnan(weight)
    grown, _ = keras_scale(2.0**120, 0.0, 20)
    assert np.isinf(grown)

    rule = DynamicLossScale(growth_interval=1)
    state = rule.initial_state()
    for _ in range(200):
        state = rule.update(state, False)
    assert state.scale == 1.0
    rule = DynamicLossScale(initial=2.0**120, growth_interval=1, ceiling=FLOAT32_MAX)
    state = rule.initial_state()
    for _ in range(20):
        state = rule.update(state, True)
    assert state.scale == FLOAT32_MAX
