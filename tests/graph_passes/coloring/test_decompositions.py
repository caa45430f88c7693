"""Matrix decompositions: float32 from the last products on, and for products with the result."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from decisions import decisions_of
from traced_graphs import Traced, of_op, trace

from graph_passes import PrecisionConfig, Reason, rewrite_function_def
from graph_passes.coloring.decompositions import DECOMPOSITIONS

CONFIGS = {
    "CPU": PrecisionConfig(target_dtype="bfloat16", device="CPU"),
    "GPU": PrecisionConfig(target_dtype="float16", device="GPU"),
}
POINTS, WIDTH = 48, 16
HALF = {"bfloat16": tf.bfloat16.as_datatype_enum, "float16": tf.half.as_datatype_enum}


def kernel(x: tf.Tensor) -> tf.Tensor:
    squares = tf.reduce_sum(tf.square(x), -1)
    distances = squares[:, None] + squares[None, :] - 2.0 * tf.matmul(x, x, transpose_b=True)
    return tf.exp(-0.5 * distances / WIDTH) + 1e-4 * tf.eye(POINTS)


def evidence(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """That of a Gaussian process, as GPflow writes it."""
    factor = tf.linalg.cholesky(kernel(x))
    solved = tf.linalg.triangular_solve(factor, y)
    return tf.reduce_sum(tf.square(solved)) + tf.reduce_sum(
        tf.math.log(tf.linalg.diag_part(factor))
    )


def trained(network: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Traced:
    """The evidence and its gradients for the inputs and the weights."""

    def step(x, weights, y):
        with tf.GradientTape() as tape:
            tape.watch([x, weights])
            value = evidence(network(x, weights), y)
        return value, *tape.gradient(value, [x, weights], unconnected_gradients="zero")

    return trace(
        step,
        tf.TensorSpec((POINTS, WIDTH)),
        tf.TensorSpec((WIDTH, WIDTH)),
        tf.TensorSpec((POINTS, 1)),
    )


def inputs() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (POINTS, WIDTH)).astype(np.float32)
    x[1:8] = x[0] + 0.01 * x[1:8]  # near to one another, so that their rows are almost the same
    weights = (np.eye(WIDTH) + rng.normal(0, 0.1, (WIDTH, WIDTH))).astype(np.float32)
    return [x, weights, rng.normal(size=(POINTS, 1)).astype(np.float32)]


def low_products(traced: Traced, config: PrecisionConfig) -> set[str]:
    nodes = of_op(traced.rewrite(config).graph_def, "MatMul")
    return {n.name for n in nodes if n.attr["T"].type == HALF[config.target_dtype]}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_gaussian_process_is_that_of_float32(config):
    traced = trained(lambda x, _: x)
    expected = traced.run(traced.graph_def, *inputs())
    assert np.isfinite(expected[0])
    found = traced.run(traced.rewrite(config).graph_def, *inputs())
    for old, new in zip(expected, found, strict=True):
        np.testing.assert_allclose(new, old, rtol=0.02, atol=0.02 * np.abs(old).max())
    rules = frozenset(("decomposition", "distance"))
    off = dataclasses.replace(config, disabled_rules=rules)
    # What the rules are for.
    assert not np.isfinite(traced.run(traced.rewrite(off).graph_def, *inputs())[0])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_network_in_front_goes_low_but_for_its_last_product(config):
    def network(x, weights):
        return tf.matmul(tf.nn.relu(tf.matmul(x, weights, name="first")), weights, name="last")

    low = low_products(trained(network), config)
    assert "first" in low and "last" not in low
    # And so do the gradients of its weights.
    assert len(low) >= 3


MADE: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "Cholesky": tf.linalg.cholesky,
    "MatrixDeterminant": tf.linalg.det,
    "LogMatrixDeterminant": lambda a: tf.linalg.slogdet(a)[1],
    "MatrixInverse": tf.linalg.inv,
    "MatrixSolve": lambda a: tf.linalg.solve(tf.eye(WIDTH), a),
    "MatrixSolveLs": lambda a: tf.linalg.lstsq(tf.eye(WIDTH), a, fast=False),
    "MatrixTriangularSolve": lambda a: tf.linalg.triangular_solve(tf.eye(WIDTH), a),
    "MatrixSquareRoot": tf.linalg.sqrtm,
    "Qr": lambda a: tf.linalg.qr(a)[0],
    "Lu": lambda a: tf.linalg.lu(a)[0],
    "Svd": lambda a: tf.linalg.svd(a, compute_uv=False),
    "SelfAdjointEigV2": tf.linalg.eigvalsh,
}


@pytest.mark.parametrize("op", MADE)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_products_on_both_sides_of_each(op, config):
    def made(x, w):
        matrix = tf.tanh(tf.matmul(tf.matmul(x, w, name="far"), w, name="near"))
        given = tf.reshape(MADE[op](matrix), [-1])
        if given.shape[0] != WIDTH**2:
            return given
        return tf.matmul(
            tf.matmul(tf.reshape(given, [WIDTH] * 2), w, name="with"), w, name="behind"
        )

    traced = trace(made, tf.TensorSpec((WIDTH, WIDTH)), tf.TensorSpec((WIDTH, WIDTH)))
    assert op in DECOMPOSITIONS and of_op(traced.graph_def, op)
    low = low_products(traced, config)
    assert low <= {"far", "behind"} and "far" in low
    report = traced.rewrite(config).report
    kept = {d.node: d.reason for d in decisions_of(report) if not d.converted}
    assert kept["near"] is Reason.DECOMPOSITION


def updated(p: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """The covariance of a Kalman filter after a step."""
    one = tf.eye(WIDTH)
    p = tf.matmul(tf.matmul(w, p, name="forward"), w, transpose_b=True) + 0.01 * one
    gain = tf.matmul(p, tf.linalg.inv(p + 0.1 * one))
    return tf.matmul(one - gain, p)


def covariance(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """What a Kalman filter hands on from round to round."""
    loop = (0, 100.0 * tf.eye(WIDTH) + 0.0 * x)
    return tf.while_loop(lambda i, _: i < 30, lambda i, p: (i + 1, updated(p, w)), loop)[1]


def unrolled(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    p = 100.0 * tf.eye(WIDTH) + 0.0 * x
    for _ in range(30):
        p = updated(p, w)
    return p


@pytest.mark.parametrize("steps", [covariance, unrolled])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_one_step_hands_on_to_a_solver_is_that_of_float32(config, steps):
    traced = trace(steps, tf.TensorSpec((WIDTH, WIDTH)), tf.TensorSpec((WIDTH, WIDTH)))
    given = [np.zeros((WIDTH, WIDTH), np.float32), inputs()[1]]
    (expected,) = traced.run(traced.graph_def, *given)
    (found,) = traced.run(traced.rewrite(config).graph_def, *given)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    off = dataclasses.replace(config, disabled_rules=frozenset(("decomposition", "recurrence")))
    (wrong,) = traced.run(traced.rewrite(off).graph_def, *given)
    assert np.abs(wrong - expected).max() > 2e-5


def filtered(seen: tf.Tensor, h: tf.Tensor, divide: Callable[..., tf.Tensor]) -> tf.Tensor:
    """Minus the log-likelihood of a Kalman filter of a local trend, one observation a step."""
    move, one = tf.constant([[1.0, 1.0], [0.0, 1.0]]), tf.eye(2)

    def step(i, mean, p, total):
        gained = tf.matmul(h, p, name="gained")
        spread = tf.matmul(gained, h, transpose_b=True) + 0.1
        error = seen[i] - tf.matmul(h, mean)
        gain = tf.transpose(divide(gained, spread))
        mean = tf.matmul(move, mean + tf.matmul(gain, error))
        p = tf.matmul(one - tf.matmul(gain, h), p)
        p = tf.matmul(tf.matmul(move, p), move, transpose_b=True) + 0.01 * one
        return i + 1, mean, p, total + tf.square(error) / spread + tf.math.log(spread)

    loop = (0, tf.zeros((2, 1)), 10.0 * one, tf.zeros((1, 1)))
    return tf.while_loop(lambda i, *_: i < POINTS, step, loop)[3]


@pytest.mark.parametrize("divide", [tf.divide, tf.math.divide_no_nan])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_one_equation_is_solved_by_a_division(config, divide):
    def step(seen, h):
        with tf.GradientTape() as tape:
            tape.watch(h)
            value = filtered(seen, h, divide)
        return value, tape.gradient(value, h)

    traced = trace(step, tf.TensorSpec((POINTS, 1, 1)), tf.TensorSpec((1, 2)))
    seen = 0.3 * np.arange(POINTS, dtype=np.float32) + np.sin(np.arange(POINTS))
    given = [seen.astype(np.float32).reshape(POINTS, 1, 1), np.array([[1, 0.1]], np.float32)]
    expected = traced.run(traced.graph_def, *given)
    found = traced.run(traced.rewrite(config).graph_def, *given)
    for old, new in zip(expected, found, strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-4)
    off = dataclasses.replace(config, disabled_rules=frozenset(("decomposition", "recurrence")))
    wrong = traced.run(traced.rewrite(off).graph_def, *given)
    assert np.abs(wrong[0] - expected[0]).max() > 0.05 * np.abs(expected[0]).max()


def by_sums(a: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """The inverse of a matrix to which `x x'` is added, a recursive least squares."""
    moved = tf.matmul(a, x)
    return a - moved / (1.0 + tf.reduce_sum(x * moved)) * tf.transpose(moved)


def by_products(a: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    change = tf.matmul(tf.matmul(tf.matmul(a, x), x, transpose_b=True), a)
    return a - change / (1.0 + tf.matmul(x, tf.matmul(a, x), transpose_a=True))


def by_reciprocal(a: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    moved = tf.einsum("ij,jk->ik", a, x)
    scale = tf.math.reciprocal(1.0 + tf.einsum("ij,ij->", x, moved))
    return a - scale * tf.einsum("ij,kj->ik", moved, moved)


@pytest.mark.parametrize("update", [by_sums, by_products, by_reciprocal])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_an_inverse_that_one_row_after_another_changes_is_that_of_float32(config, update):
    rows = np.random.default_rng(0).normal(size=(40, 8, 1)).astype(np.float32)
    traced = trace(update, tf.TensorSpec((8, 8)), tf.TensorSpec((8, 1)))
    function = traced.rewrite(config).graph_def
    inverse = 100.0 * np.eye(8, dtype=np.float32)
    for row in rows:
        (inverse,) = traced.run(function, inverse, row)
    expected = np.linalg.inv(0.01 * np.eye(8) + np.sum(rows @ rows.transpose(0, 2, 1), 0))
    np.testing.assert_allclose(inverse, expected, atol=0.01 * expected.max())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_conjugate_gradients_end_where_those_of_float32_do(config):
    def solved(a, b):
        x, rest, step, size = tf.zeros_like(b), b, b, tf.reduce_sum(b * b)
        for _ in range(8):
            moved = tf.matmul(a, step)
            length = size / tf.reduce_sum(step * moved)
            x, rest = x + length * step, rest - length * moved
            step, size = rest + tf.reduce_sum(rest * rest) / size * step, tf.reduce_sum(rest * rest)
        return x

    traced = trace(solved, tf.TensorSpec((8, 8)), tf.TensorSpec((8, 1)))
    root = inputs()[1][:8, :8]
    given = [root @ root.T, inputs()[2][:8]]
    (found,) = traced.run(traced.rewrite(config).graph_def, *given)
    np.testing.assert_allclose(given[0] @ found, given[1], atol=1e-4)


def test_a_length_that_is_divided_by_solves_nothing():
    def squashed(x, w):
        capsules = tf.matmul(x, w, name="capsules")
        squared = tf.reduce_sum(capsules * capsules, -1, keepdims=True)
        return tf.matmul(capsules * squared / (1.0 + squared), w, name="next")

    traced = trace(squashed, tf.TensorSpec((POINTS, WIDTH)), tf.TensorSpec((WIDTH, WIDTH)))
    assert low_products(traced, CONFIGS["GPU"]) == {"capsules", "next"}


def test_a_quotient_of_products_that_solves_nothing_goes_low():
    def attended(queries, keys, values):
        queries, keys = tf.nn.relu(queries), tf.nn.relu(keys)
        kept = tf.matmul(keys, values, transpose_a=True, name="kept")
        total = tf.reduce_sum(keys, 0)[:, None]
        given = tf.matmul(queries, kept, name="given")
        return given / (tf.matmul(queries, total, name="total") + 1.0)

    traced = trace(attended, *[tf.TensorSpec((POINTS, WIDTH))] * 3)
    assert low_products(traced, CONFIGS["GPU"]) == {"kept", "given", "total"}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_loop_without_a_solver_goes_low(config):
    def made(x, w):
        def body(i, h):
            return i + 1, tf.tanh(tf.matmul(h, w, name="inside"))

        h = tf.while_loop(lambda i, _: i < 4, body, (0, x))[1]
        return tf.linalg.inv(tf.matmul(h, w, name="near")), covariance(h, w)

    traced = trace(made, tf.TensorSpec((WIDTH, WIDTH)), tf.TensorSpec((WIDTH, WIDTH)))
    report = traced.rewrite(config).report
    low = {d.node.rpartition("/")[2] for d in decisions_of(report) if d.converted}
    assert "inside" in low and not low & {"near", "forward"}


def test_what_an_inverse_is_multiplied_with_is_not_rounded_either():
    def ridge(x, y, w):
        spread = tf.matmul(x, x, transpose_a=True) + tf.eye(WIDTH)
        inverse = tf.linalg.inv(spread)
        weights = tf.matmul(tf.matmul(inverse, x, transpose_b=True), y)
        hidden = tf.nn.relu(tf.matmul(x, weights) + y)
        return tf.matmul(hidden, w, name="far")

    shapes = (POINTS, WIDTH), (POINTS, WIDTH), (WIDTH, WIDTH)
    traced = trace(ridge, *map(tf.TensorSpec, shapes))
    assert low_products(traced, CONFIGS["CPU"]) == {"far"}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_normal_equations_by_an_inverse_are_those_of_float32(config):
    def fitted(x, y):
        inverse = tf.linalg.inv(tf.matmul(x, x, transpose_a=True))
        return tf.matmul(inverse, tf.matmul(x, y, transpose_a=True) / POINTS)

    traced = trace(fitted, tf.TensorSpec((POINTS, 4)), tf.TensorSpec((POINTS, 1)))
    t = np.linspace(0, 3, POINTS, dtype=np.float32)[:, None]
    given = [t ** np.arange(4, dtype=np.float32), np.sin(t)]
    assert not low_products(traced, config)
    (expected,) = traced.run(traced.graph_def, *given)
    (found,) = traced.run(traced.rewrite(config).graph_def, *given)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_a_layer_in_front_of_an_orthogonal_one_goes_low():
    def layers(x, w):
        hidden = tf.nn.relu(tf.matmul(x, w, name="far"))
        return tf.matmul(hidden, tf.linalg.qr(w)[0])

    traced = trace(layers, tf.TensorSpec((POINTS, WIDTH)), tf.TensorSpec((WIDTH, WIDTH)))
    assert low_products(traced, CONFIGS["GPU"]) == {"far"}


@pytest.mark.parametrize("activation", [tf.nn.relu, tf.nn.swish, tf.tanh])
def test_layers_of_a_network_that_whitens_go_low(activation):
    def whitened(x):
        centred = x - tf.reduce_mean(x, 0)
        spread = tf.matmul(centred, centred, transpose_a=True) / POINTS + 0.1 * tf.eye(WIDTH)
        factor = tf.linalg.cholesky(spread)
        return tf.transpose(tf.linalg.triangular_solve(factor, tf.transpose(centred)))

    def step(x, *weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            for i in range(0, 9, 3):
                x = activation(tf.matmul(whitened(x), weights[i]) + 1.0)
                x = activation(tf.matmul(x, weights[i + 1], name="far") + x)
                x = activation(tf.matmul(x, weights[i + 2]) + 1.0)
            value = tf.reduce_sum(x)
        return tape.gradient(value, weights)

    specs = [tf.TensorSpec((POINTS, WIDTH)), *[tf.TensorSpec((WIDTH, WIDTH))] * 9]
    low = low_products(trace(step, *specs), CONFIGS["CPU"])
    assert {"far", "far_1", "far_2"} <= low
    assert len(low) == 12  # all but what is next to a whitening


def test_across_calls_the_gradient_is_that_of_float32():
    def covariance(x):
        return tf.matmul(x, x, transpose_b=True) / WIDTH

    def step(made, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            matrix = made(tf.tanh(x)) + 1e-3 * tf.eye(POINTS)
            value = tf.linalg.slogdet(matrix)[1]
        return tape.gradient(value, x)

    x = inputs()[0]
    called = trace(functools.partial(step, tf.function(covariance)), tf.TensorSpec(x.shape))
    expected = called.run(called.graph_def, x)
    found = called.run(called.rewrite(CONFIGS["CPU"]).graph_def, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_function_of_the_gradient_alone_keeps_what_it_is_given():
    """A tape outside of a `tf.function` runs such a one."""

    def gradient(x, factor, dy):
        solved = tf.linalg.triangular_solve(factor, dy, name="solve")
        return tf.matmul(2.0 * solved, x, name="first") @ tf.ones([WIDTH, WIDTH])

    specs = [tf.TensorSpec(shape) for shape in ((POINTS, WIDTH), (POINTS,) * 2, (POINTS,) * 2)]
    body = tf.function(gradient, autograph=False).get_concrete_function(*specs)
    result = rewrite_function_def(body.function_def, CONFIGS["CPU"])
    kept = {d.node: d.reason for d in decisions_of(result.report) if not d.converted}
    assert kept["first"] is Reason.DECOMPOSITION
