"""What products alone lead on from step to step: in loops, in variables and unrolled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from decisions import decisions_of
from traced_steps import traced

from graph_passes import PrecisionConfig, Reason

CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU")
GPU = PrecisionConfig(target_dtype="float16", device="GPU")
SIZE, ROUNDS = 32, 60
Program = Callable[[Any, Any], Any]


def matrix() -> np.ndarray:
    """One whose rows add up to 1, as of a Markov chain that mostly stays where it is."""
    drawn = np.random.default_rng(0).random((SIZE, SIZE)).astype(np.float32) ** 8
    return 0.05 * drawn / drawn.sum(1, keepdims=True) + 0.95 * np.eye(SIZE, dtype=np.float32)


def rounds(start: Any, body: Callable[[Any], Any], count: int = ROUNDS) -> Any:
    return tf.while_loop(lambda i, _: i < count, lambda i, p: (i + 1, body(p)), (0, start))[1]


def chain(p: Any, m: Any) -> Any:
    return rounds(p, lambda p: p @ m)


def ranks(p: Any, m: Any) -> Any:
    return rounds(p, lambda p: 0.99 * tf.matmul(m, p, transpose_a=True) + 0.01)


def predicted(p: Any, m: Any) -> Any:
    """The covariance of a Kalman filter that sees nothing."""
    return rounds(p, lambda p: m @ p @ tf.transpose(m) + 0.01 * tf.eye(SIZE))


def folded(p: Any, m: Any) -> Any:
    return tf.foldl(lambda p, _: tf.einsum("ij,jk,lk->il", m, p, m), tf.range(ROUNDS), p)


def unrolled(p: Any, m: Any) -> Any:
    for _ in range(ROUNDS):
        p = 0.5 * tf.transpose(p @ m + p @ m)
    return p


def squared(p: Any, m: Any) -> Any:
    for _ in range(6):
        m = m @ m
    return p @ m


def stepped(p: Any, m: Any) -> Any:
    """By one product and with itself as a term, as a step of a differential equation."""
    return rounds(p, lambda p: p + 0.1 * (p @ m))


def inverted(p: Any, m: Any) -> Any:
    """Newton and Schulz' iterations."""
    near = p
    for _ in range(5):
        near = near @ (2.0 * p - m @ near)
    return near


LED_ON = [inverted, chain, ranks, predicted, folded, unrolled, squared, stepped]


def results(program: Program, config: PrecisionConfig) -> tuple[np.ndarray, list[Any]]:
    """What a rewritten program gives, and the decisions on its products."""
    spec = tf.TensorSpec((SIZE, SIZE))
    step = traced(lambda p, m: [program(p, m)], spec, spec)
    found = decisions_of(step.result(config).report)
    products = [d for d in found if d.op in ("MatMul", "BatchMatMulV2", "Einsum")]
    (made,) = step.run(step.rewritten(config), np.eye(SIZE, dtype=np.float32), matrix())
    return made, products


@pytest.mark.parametrize("config", [CPU, GPU], ids=lambda config: config.target_dtype)
@pytest.mark.parametrize("program", LED_ON)
def test_it_is_that_of_float32(program: Program, config: PrecisionConfig) -> None:
    true = program(tf.eye(SIZE), tf.constant(matrix())).numpy()
    found, products = results(program, config)
    np.testing.assert_allclose(found, true, rtol=1e-4, atol=1e-6)
    assert products and all(d.reason is Reason.RECURRENCE for d in products)
    if config is CPU:  # what the rule is for
        off = dataclasses.replace(config, disabled_rules=frozenset(("recurrence",)))
        lost, products = results(program, off)
        assert any(d.converted for d in products)
        assert np.linalg.norm(lost - true) > 0.002 * np.linalg.norm(true)


def captured(
    program: Callable[[Any, Any], Any], config: PrecisionConfig = CPU, calls: int = 1
) -> tuple[np.ndarray, list[bool]]:
    """What a variable holds behind some calls, and which of the program's products went low."""
    state = tf.Variable(np.eye(SIZE, dtype=np.float32))
    step = traced(lambda m: [program(state, m)], tf.TensorSpec((SIZE, SIZE)))
    rewritten = step.rewritten(config)
    for _ in range(calls):
        step.run(rewritten, matrix())
    found = decisions_of(step.result(config).report)
    return state.numpy(), [d.converted for d in found if d.op == "MatMul"]


def test_a_variable_that_is_given_its_next_value_is_that_of_float32() -> None:
    def steps(state: Any, m: Any) -> Any:
        state.assign(0.5 * (tf.transpose(m) @ state @ m))
        state.assign(2.0 * tf.identity(state))
        return tf.identity(state)

    true = np.eye(SIZE, dtype=np.float32)
    for _ in range(30):
        true = matrix().T @ true @ matrix()
    found, low = captured(steps, calls=30)
    np.testing.assert_allclose(found, true, rtol=1e-4, atol=1e-6)
    assert low == [False, False]
    lost, low = captured(steps, dataclasses.replace(CPU, disabled_rules=frozenset(("recurrence",))))
    assert low == [True, True] and not np.allclose(lost, matrix().T @ matrix(), rtol=1e-4)


def trained(weights: Any, x: Any) -> Any:
    """A step of training, whose gradient is linear in the weights."""
    gradient = tf.matmul(x, x @ weights - 1.0, transpose_a=True)
    return weights.assign(weights - 0.05 * gradient)


def normalized(weights: Any, x: Any) -> Any:
    """As of spectral normalization: what limits a state ends it."""
    return weights.assign(tf.math.l2_normalize(weights @ x, axis=1))


@pytest.mark.parametrize("program", [trained, normalized])
def test_what_is_assigned_else_goes_low(program: Callable[[Any, Any], Any]) -> None:
    assert all(captured(program)[1])


def test_in_a_loop_two_variables_are_two() -> None:
    """One op takes both."""
    average, kernel = tf.Variable(tf.zeros((SIZE, SIZE))), tf.Variable(matrix())

    def program(weights: Any, _: Any) -> Any:
        def body(i: Any) -> Any:
            average.assign(weights @ kernel)
            return (i + average[0, 0],)

        return tf.while_loop(lambda i: i < 3.0, body, (0.0,))[0]

    assert captured(program)[1] == [True]


def test_an_array_may_close_a_circle() -> None:
    """What a round reads another has written: the array itself is no loop variable."""

    def written(p: Any, m: Any) -> Any:
        array = tf.TensorArray(tf.float32, 8, clear_after_read=False, element_shape=(SIZE, SIZE))

        def body(i: Any, array: Any) -> Any:
            last = array.read(i - 1)
            for _ in range(4):
                last = last @ m
            return i + 1, array.write(i, last)

        return tf.while_loop(lambda i, _: i < 8, body, (1, array.write(0, p)))[1].read(7)

    assert results(written, CPU)[1]


def propagated(p: Any, m: Any) -> Any:
    """A graph network of eight linear layers."""
    for _ in range(8):
        p = m @ p
    return p


def deep(p: Any, m: Any) -> Any:
    """Linear layers without activations, each with weights of its own."""
    for layer in range(12):
        p = p @ tf.nn.relu(m + 0.1 * layer)
    return p


def orthogonalized(p: Any, m: Any) -> Any:
    """As the optimizer Muon does it, whose authors compute it in bfloat16."""
    for _ in range(5):
        gram = tf.matmul(p, p, transpose_b=True)
        p = 3.4445 * p + (-4.775 * gram + 2.0315 * (gram @ gram)) @ p
    return p @ m


def recurrent(p: Any, m: Any) -> Any:
    for _ in range(12):
        p = tf.tanh(p @ m)
    return rounds(p, lambda p: tf.nn.relu(p @ m @ m))


@pytest.mark.parametrize("program", [propagated, deep, orthogonalized, recurrent])
def test_networks_are_planned_as_ever(program: Program) -> None:
    _, products = results(program, CPU)
    assert products and all(d.converted for d in products)
