"""What is added little by little: in loops, and by small constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cpu_units import bfloat16_product_error
from decisions import decisions_of
from tensorflow.core.framework import graph_pb2
from traced_graphs import Traced, trace
from traced_steps import traced as traced_call

from graph_passes import PrecisionConfig, Reason

CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU")
GPU = PrecisionConfig(target_dtype="float16", device="GPU")
LOW = {"CPU": tf.bfloat16.as_datatype_enum, "GPU": tf.half.as_datatype_enum}
ROWS, WIDTH, ROUNDS = 16, 32, 200
STEP = 1e-3
Body = Callable[[Any, Any], Any]


def rounds(x: Any, body: Callable[[Any], Any], count: int = ROUNDS) -> Any:
    return tf.while_loop(lambda i, _: i < count, lambda i, h: (i + 1, body(h)), (0, x))[1]


def euler(x: Any, w: Any) -> Any:
    return rounds(x, lambda h: h + STEP * tf.tanh(h @ w)) - x


def euler_to_the_left(x: Any, w: Any) -> Any:
    return rounds(x, lambda h: tf.tanh(h @ w) * -STEP + h) - x


def scan(x: Any, w: Any) -> Any:
    steps = tf.scan(lambda h, _: h + STEP * tf.tanh(h @ w), tf.range(ROUNDS), initializer=x)
    return steps[-1] - x


def unrolled(x: Any, w: Any) -> Any:
    h = x
    for _ in range(20):
        h = h + tf.reshape(STEP * tf.tanh(h @ w), tf.shape(h))
    return h - x


def divided(x: Any, w: Any) -> Any:
    h = x
    for _ in range(20):
        h = h + tf.tanh(h @ w) / 1000.0
    return h - x


def decay(x: Any, w: Any) -> Any:
    return rounds(x, lambda h: h - STEP * h + 1e-5 * tf.tanh(h @ w)) - x


def moving_average(x: Any, w: Any) -> Any:
    return rounds(x @ w, lambda mean: 0.999 * mean + 0.001 * tf.tanh(mean @ w)) - x @ w


def accumulated(x: Any, w: Any) -> Any:
    """Gradients of a loss, added up in a loop."""

    def body(total: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = tf.reduce_sum(tf.square(tf.tanh(x @ w)))
        return total + tape.gradient(loss, w)

    return rounds(tf.zeros_like(w), body, 600) @ w


def trained_inside(x: Any, w: Any) -> Any:
    """A few steps of training for one task, as of meta-learning."""

    def body(weights: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_sum(tf.square(x @ weights - x))
        return weights - 1e-5 * tape.gradient(loss, weights)

    return rounds(w, body) - w


def kept_within(x: Any, w: Any) -> Any:
    """Steps that are projected back, and taken in half of the rows alone."""
    taken = tf.range(ROWS)[:, None] % 2 == 0

    def body(h: Any) -> Any:
        moved = tf.clip_by_value(h + STEP * tf.tanh(h @ w), -4.0, 4.0)
        return tf.where(taken, moved, h)

    return rounds(x, body) - x


def in_a_branch(x: Any, w: Any) -> Any:
    def body(h: Any) -> Any:
        return tf.cond(h[0, 0] < 1e9, lambda: h + STEP * tf.tanh(h @ w), lambda: h)

    return rounds(x, body) - x


def in_two_loops(x: Any, w: Any) -> Any:
    def body(h: Any) -> Any:
        return rounds(h, lambda inner: inner + STEP * tf.tanh(inner @ w), 20)

    return rounds(x, body, 10) - x


def leapfrog(x: Any, w: Any) -> Any:
    def body(i: Any, q: Any, p: Any) -> Any:
        p = p - STEP * (q - tf.tanh(q @ w))
        return i + 1, q + STEP * p, p

    return tf.while_loop(lambda i, *_: i < ROUNDS, body, (0, x, x))[1] - x


def counted(x: Any, w: Any) -> Any:
    """A state that a matrix of the caller hands on."""
    one = tf.reshape(w[:, 0] * 0.0 + 1.0, [1, WIDTH])
    stays = tf.linalg.diag(w[0] * 0.0 + 1.0)
    by_scan = tf.scan(
        lambda h, z: tf.matmul(h, stays) + z * one, tf.ones([300, ROWS, 1]), tf.zeros_like(x)
    )
    by_loop = rounds(tf.zeros_like(x), lambda h: tf.einsum("ij,jk->ik", h, stays) + one, 300)
    return by_scan[-1] + by_loop + tf.nn.relu(x @ w) @ w


LITTLE_BY_LITTLE = [
    euler,
    euler_to_the_left,
    scan,
    unrolled,
    divided,
    decay,
    moving_average,
    accumulated,
    trained_inside,
    kept_within,
    in_a_branch,
    in_two_loops,
    leapfrog,
    counted,
]


def values() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    x, w = draw.normal(size=(ROWS, WIDTH)), draw.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
    return [x.astype(np.float32), w.astype(np.float32)]


def traced(body: Body) -> Traced:
    return trace(body, tf.TensorSpec((ROWS, WIDTH)), tf.TensorSpec((WIDTH, WIDTH)))


def error(body: Body, config: PrecisionConfig) -> float:
    """The distance of what a rewritten program gives from float32, by the length of that."""
    program = traced(body)
    result = program.rewrite(config)
    assert products(result.graph_def, LOW[config.device]) > 0
    (true,) = program.run(program.graph_def, *values())
    (found,) = program.run(result.graph_def, *values())
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


def products(graph_def: graph_pb2.GraphDef, dtype: int) -> int:
    bodies = [graph_def.node, *(function.node_def for function in graph_def.library.function)]
    return sum(n.op == "MatMul" and n.attr["T"].type == dtype for nodes in bodies for n in nodes)


@pytest.mark.parametrize("config", [CPU, GPU], ids=lambda config: config.target_dtype)
@pytest.mark.parametrize("body", LITTLE_BY_LITTLE)
def test_it_adds_up_as_in_float32(body: Body, config: PrecisionConfig) -> None:
    assert error(body, config) < 0.03
    if config is CPU:  # what the rule is for
        rules = frozenset(("small-step", "recurrence", "result"))
        off = dataclasses.replace(config, disabled_rules=rules)
        assert error(body, off) > 0.05


def unrolled_training(rate: Any) -> Callable[[Any], Any]:
    """A few steps of training for one task, without a loop; a layer beside them."""
    weights = tf.Variable(values()[1])

    def steps(x: Any) -> Any:
        new = tf.identity(weights)
        for _ in range(20):
            with tf.GradientTape() as tape:
                tape.watch(new)
                loss = tf.reduce_sum(tf.square(x @ new - x))
            new = new - rate * tape.gradient(loss, new)
        return new - weights

    return steps


def captured_step(step: Any) -> Callable[[Any], Any]:
    layer = tf.Variable(values()[1])

    def steps(h: Any) -> Any:
        start = h
        for _ in range(20):
            h = h + step * tf.tanh(h @ layer)
        return h - start

    return steps


def off_by(function: Callable[[Any], Any], config: PrecisionConfig) -> float:
    step = traced_call(lambda x: [function(x)], tf.TensorSpec((ROWS, WIDTH)))
    rewritten = step.rewritten(config)
    assert products(graph_pb2.GraphDef(node=rewritten.step.node_def), LOW[config.device]) > 0
    x = values()[0]
    true = step.concrete(tf.constant(x))[0].numpy()
    return float(np.linalg.norm(step.run(rewritten, x)[0] - true) / np.linalg.norm(true))


@pytest.mark.parametrize("config", [CPU, GPU], ids=lambda config: config.target_dtype)
@pytest.mark.parametrize(
    "program",
    [
        lambda: unrolled_training(tf.Variable(1e-4)),
        lambda: captured_step(tf.constant(STEP)),
    ],
    ids=["steps of weights", "a step that is captured"],
)
def test_steps_that_no_constant_tells_of_add_up(program: Any, config: PrecisionConfig) -> None:
    off = dataclasses.replace(config, disabled_rules=frozenset(("small-step",)))
    assert off_by(program(), config) < 0.05
    assert config is GPU or off_by(program(), off) > 0.1


@pytest.mark.parametrize("off", [20000.0, np.float32([20000.0, -300.0] * (WIDTH // 2))])
@pytest.mark.parametrize("config", [CPU, GPU], ids=lambda config: config.target_dtype)
def test_what_a_network_tells_beside_a_large_constant_is_not_lost(
    off: Any, config: PrecisionConfig
) -> None:
    """As of prices, or degrees above zero."""

    def network(x: Any, w: Any) -> Any:
        return 10.0 * (tf.nn.relu(x @ w) @ w) + off

    program = traced(network)
    after = program.rewrite(config).graph_def
    assert products(after, LOW[config.device]) == 2
    (true,), (found,) = (program.run(g, *values()) for g in (program.graph_def, after))
    assert np.abs(found - true).max() < 0.05 * np.abs(true - off).max()


def masked(x: Any, w: Any) -> Any:
    """A mask has zeros as well."""
    mask = np.float32(-1e4) * np.triu(np.ones((ROWS, ROWS), np.float32), 1)
    return tf.nn.softmax(tf.matmul(x @ w, x, transpose_b=True) + mask) @ x


def fixed_point(x: Any, w: Any) -> Any:
    def body(i: Any, h: Any, _: Any) -> Any:
        new = tf.tanh(0.5 * (h @ w)) + x
        return i + 1, new, tf.reduce_max(tf.abs(new - h))

    return tf.while_loop(lambda i, _, change: (change > 1e-5) & (i < 500), body, (0, x, 1.0))


def fixed_point_of_two(x: Any, w: Any) -> Any:
    """Both rounds are carried, and compared by the condition."""

    def goes_on(i: Any, new: Any, old: Any) -> Any:
        return (tf.norm(new - old) > 1e-4) & (i < 500)

    def body(i: Any, h: Any, _: Any) -> Any:
        return i + 1, tf.tanh(0.5 * (h @ w)) + x, h

    return tf.while_loop(goes_on, body, (0, x, tf.zeros_like(x)))


def fixed_point_by_rows(x: Any, w: Any) -> Any:
    """Rows that are at their end stay as they are."""

    def body(i: Any, h: Any, change: Any) -> Any:
        new = tf.where(change[:, None] > 1e-10, tf.tanh(0.5 * (h @ w)) + x, h)
        return i + 1, new, tf.reduce_max(tf.math.squared_difference(new, h), 1)

    start = (0, x, tf.ones(ROWS))
    return tf.while_loop(lambda i, _, c: (tf.reduce_max(c) > 1e-10) & (i < 500), body, start)


@pytest.mark.parametrize("body", [fixed_point, fixed_point_of_two, fixed_point_by_rows])
def test_a_loop_to_a_fixed_point_ends(body: Body) -> None:
    def beside_a_layer(x: Any, w: Any) -> Any:
        return body(x, w)[0], tf.nn.relu(x @ w) @ w

    program = traced(beside_a_layer)
    after = program.rewrite(CPU).graph_def
    assert products(after, LOW["CPU"]) == 2
    (rounds_before, _), (rounds_after, _) = (
        program.run(graph_def, *values()) for graph_def in (program.graph_def, after)
    )
    assert rounds_after == rounds_before < 100
    off = dataclasses.replace(CPU, disabled_rules=frozenset(("small-step",)))
    rounds_in_bfloat16, _ = program.run(program.rewrite(off).graph_def, *values())
    assert rounds_in_bfloat16 == 500


def residual(x: Any, w: Any) -> Any:
    for _ in range(3):
        x = x + tf.nn.relu(x @ w) * 0.1
    return x @ w


def divided_little(x: Any, w: Any) -> Any:
    return (x @ w / 8.0 + 1000.0 / (2.0 + tf.tanh(x @ w))) @ w


def pooled(x: Any, w: Any) -> Any:
    """The gradient of a mean over many is added to that of a second branch."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        h = tf.nn.relu(x @ w)
        loss = tf.reduce_mean(h) + tf.reduce_sum(h @ w)
    return tape.gradient(loss, x)


def gated(x: Any, w: Any) -> Any:
    """An LSTM's cell state, of which rows may be left as they were."""
    taken = tf.range(ROWS)[:, None] % 2 == 0

    def body(i: Any, h: Any, c: Any) -> Any:
        new = tf.sigmoid(h @ w) * c + tf.tanh(h @ w)
        return i + 1, tf.tanh(new) * tf.sigmoid(h @ w), tf.where(taken, new, c)

    return tf.while_loop(lambda i, *_: i < 4, body, (0, x, x))[1] @ w


def beside_what_stays(x: Any, w: Any) -> Any:
    """A state that is made anew in each round, of one that no round changes."""
    bias = tf.nn.relu(x @ w)

    def body(i: Any, h: Any, b: Any) -> Any:
        return i + 1, tf.nn.relu(h @ w + b), b

    return tf.while_loop(lambda i, *_: i < 4, body, (0, x @ w, bias))[1] @ w


def recurrent(x: Any, w: Any) -> Any:
    """Plain recurrent layers, and two linear ones in a round."""

    def body(i: Any, g: Any, h: Any, k: Any) -> Any:
        return i + 1, tf.nn.relu(g @ w + x), tf.tanh(h @ w + x), tf.maximum(k @ w @ w, 0.0)

    return sum(tf.while_loop(lambda i, *_: i < 4, body, (0, x, x, x))[1:]) @ w


def gated_by_differences(x: Any, w: Any) -> Any:
    """A state that goes part of the way to another, in the rows that are not done."""

    def body(h: Any) -> Any:
        moved = tf.sigmoid(h @ w) * (tf.tanh(h @ w) - h)
        return tf.where(tf.range(ROWS)[:, None] % 2 == 0, moved, h)

    return rounds(x, body, 4) @ w


def until_sure(x: Any, w: Any) -> Any:
    """Rounds until a score is reached, of which no two are compared."""

    def body(h: Any, _: Any) -> Any:
        h = tf.nn.relu(h @ w)
        return h, tf.reduce_mean(tf.sigmoid(h))

    return tf.while_loop(lambda _, score: score > 0.51, body, (x, 1.0))[0] @ w


@pytest.mark.parametrize(
    "body",
    [
        *(residual, divided_little, pooled, gated, beside_what_stays),
        *(recurrent, gated_by_differences, until_sure, masked),
    ],
)
def test_networks_are_planned_as_ever(body: Body) -> None:
    program = traced(body)
    off = dataclasses.replace(CPU, disabled_rules=frozenset(("small-step",)))
    with_rule, without = (program.rewrite(config) for config in (CPU, off))
    assert with_rule.graph_def == without.graph_def
    assert with_rule.report.converted_nodes


def test_the_reason_is_told() -> None:
    reasons = {
        d.reason for d in decisions_of(traced(unrolled).rewrite(CPU).report) if d.op == "AddV2"
    }
    assert reasons == {Reason.SMALL_STEP}


@pytest.mark.parametrize(("uses", "off"), [(32, None), (33, None), (400, 0.004)])
def test_the_gradients_of_a_weight_that_is_used_often_are_added_in_float32(
    uses: int, off: float | None
) -> None:
    def gradient(x: Any, w: Any) -> Any:
        products = [tf.matmul(x + i / 400, x, transpose_a=True) for i in range(uses)]
        return tf.add_n([tf.add_n(products), products[0]]) @ w  # TensorFlow adds in parts, too

    program = traced(gradient)
    config = dataclasses.replace(CPU, disabled_rules=frozenset(("cast-cut",)))
    result = program.rewrite(config)
    (reason,) = {d.reason for d in decisions_of(result.report) if d.op == "AddN"}
    assert (reason == Reason.SMALL_STEP) == (uses > 32)
    if off is not None:
        x, w = map(np.abs, values())
        (true,), (found,) = (program.run(g, x, w) for g in (program.graph_def, result.graph_def))
        most = off * bfloat16_product_error()
        assert np.linalg.norm(found - true) < most * np.linalg.norm(true)


def test_parity_has_none_of_it() -> None:
    decisions = decisions_of(traced(unrolled).rewrite(dataclasses.replace(CPU, parity=True)).report)
    assert Reason.SMALL_STEP not in {decision.reason for decision in decisions}
