"""Squared distances: float32 where a product meets the squares of its own operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from decisions import decisions_of
from traced_graphs import Traced, of_op, trace

from graph_passes import PrecisionConfig, Reason
from tf_amp.hosts.function_shapes import static_shapes

CONFIGS = {
    "CPU": PrecisionConfig(target_dtype="bfloat16", device="CPU"),
    "GPU": PrecisionConfig(target_dtype="float16", device="GPU"),
}
CPU = CONFIGS["CPU"]
POINTS, CODES, WIDTH = 48, 32, 64
HALF = (tf.bfloat16.as_datatype_enum, tf.half.as_datatype_enum)
PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")


def rows(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(x), -1)


def distances(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    return rows(a)[:, None] + rows(b)[None] - 2.0 * tf.matmul(a, b, transpose_b=True)


def traced(function: Callable[..., tf.Tensor], columns: int = WIDTH) -> Traced:
    return trace(function, tf.TensorSpec((POINTS, WIDTH)), tf.TensorSpec((CODES, columns)))


def products(found: Traced, config: PrecisionConfig = CPU) -> tuple[int, int]:
    """How many products are low, and how many are kept as a part of a distance."""
    report = found.rewrite(config).report
    decisions = [d for d in decisions_of(report) if d.op in PRODUCTS]
    kept = sum(d.reason is Reason.DISTANCE for d in decisions)
    return sum(d.converted for d in decisions), kept


def near(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    a = rng.normal(0, 1, (POINTS, WIDTH)).astype(np.float32)
    return [a, a[:CODES] + 0.02 * rng.normal(0, 1, (CODES, WIDTH)).astype(np.float32)]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_distances_and_gradients_are_those_of_float32(config):
    def step(a, b):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            value = tf.reduce_sum(tf.sqrt(tf.linalg.diag_part(distances(a, b))))
        return value, *tape.gradient(value, [a, b])

    found = traced(step)
    expected = found.run(found.graph_def, *near())
    for old, new in zip(expected, found.run(found.rewrite(config).graph_def, *near()), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-3, atol=1e-3 * np.abs(old).max())
    off = dataclasses.replace(config, disabled_rules=frozenset(("distance",)))
    # What the rule is for.
    rounded = found.run(found.rewrite(off).graph_def, *near())[0]
    assert not abs(rounded - expected[0]) < 0.1 * expected[0]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_network_in_front_goes_low_with_its_gradients(config):
    def step(a, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            hidden = tf.nn.relu(tf.matmul(a, w, transpose_b=True))
            value = tf.reduce_sum(tf.sqrt(distances(hidden, hidden[:8]) + 1.0))
        return value, tape.gradient(value, w)

    # The network's product and that for its weights; the distance's and two for its operands.
    assert products(traced(step), config) == (2, 3)


def norms_times_two(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    return (
        tf.norm(a, axis=1, keepdims=True) ** 2 + tf.norm(b, axis=1) ** 2 - 2 * (a @ tf.transpose(b))
    )


def of_batches(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    a, b = tf.reshape(a, [4, -1, WIDTH]), tf.reshape(b, [4, -1, WIDTH])
    dot = tf.matmul(a, b, transpose_b=True)
    return rows(a)[:, :, None] - 2.0 * dot + rows(b)[:, None, :]


def by_einsum(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    squares = tf.einsum("id,id->i", a, a)[:, None] + tf.einsum("jd,jd->j", b, b)[None]
    return squares - 2.0 * tf.einsum("id,jd->ij", a, b)


def of_codes(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Those of a VQ-VAE in the examples of Keras."""
    codes = tf.transpose(b)
    similarity = tf.matmul(a, codes)
    return (
        tf.reduce_sum(a**2, axis=1, keepdims=True)
        + tf.reduce_sum(codes**2, axis=0)
        - 2 * similarity
    )


def of_triplets(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    dot = tf.matmul(a, tf.transpose(a))
    squares = tf.linalg.diag_part(dot)
    return tf.maximum(tf.expand_dims(squares, 1) - 2.0 * dot + tf.expand_dims(squares, 0), 0.0)


FORMS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "squares": distances,
    "products": lambda a, b: (
        tf.reduce_sum(a * a, 1, keepdims=True)
        + tf.reduce_sum(b * b, 1)
        - 2 * tf.matmul(a, b, transpose_b=True)
    ),
    "the product first": lambda a, b: (
        -2.0 * tf.matmul(a, b, transpose_b=True) + rows(a)[:, None] + rows(b)
    ),
    "the product the other way round": lambda a, b: (
        rows(a) + rows(b)[:, None] - tf.transpose(2.0 * tf.matmul(a, b, transpose_b=True))
    ),
    "scaled before": lambda a, b: (
        rows(b) + tf.matmul(-2.0 * a, b, transpose_b=True) + rows(a)[:, None]
    ),
    "halves": lambda a, b: tf.matmul(a, b, transpose_b=True) - 0.5 * rows(b),
    "norms": norms_times_two,
    "a sum of many": lambda a, b: tf.add_n(
        [
            tf.repeat(rows(a)[:, None], CODES, 1),
            tf.repeat(rows(b)[None], POINTS, 0),
            -2.0 * tf.matmul(a, b, transpose_b=True),
        ]
    ),
    "batches": of_batches,
    "einsum": by_einsum,
    "codes": of_codes,
    "triplets": of_triplets,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_distance_is_known_however_it_is_written(form):
    def step(a, b):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            value = tf.reduce_sum(FORMS[form](a, b))
        gradients = tape.gradient(value, [a, b], unconnected_gradients="zero")
        return FORMS[form](a, b), *gradients

    found = traced(FORMS[form])
    low, kept = products(found)
    assert low == 0 and kept
    expected = found.run(found.graph_def, *near())[0]
    made = found.run(found.rewrite(CPU).graph_def, *near())[0]
    np.testing.assert_allclose(made, expected, atol=1e-3)
    # Without the squares of `a` there is nothing that its gradient is subtracted from.
    assert products(traced(step))[0] == (form == "halves")
    assert products(found, dataclasses.replace(CPU, parity=True))[1] == 0


def test_the_squares_of_a_variable_that_is_read_twice():
    codes = tf.Variable(tf.ones((WIDTH, CODES)))

    @tf.function(input_signature=[tf.TensorSpec((None, WIDTH))], autograph=False)
    def nearest(x):
        return tf.argmin(tf.reduce_sum(codes**2, axis=0) - 2 * tf.matmul(x, codes), axis=1)

    graph = nearest.get_concrete_function().graph
    definition = graph.as_graph_def()
    assert len(of_op(definition, "ReadVariableOp")) == 2
    found = Traced(definition, (), ("Identity",), static_shapes(graph))
    assert products(found) == (0, 1)


def decayed(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(b)
        value = tf.reduce_mean(tf.matmul(a, b, transpose_b=True)) + 0.01 * tf.reduce_sum(b**2)
    return tape.gradient(value, b) + 0.01 * b, tf.matmul(a, b, transpose_b=True) + value


def normalized(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    mean = tf.reduce_mean(a, -1, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(a, mean), -1, keepdims=True)
    return a + tf.matmul((a - mean) * tf.math.rsqrt(variance + 1e-3), b, transpose_b=True)[:, :1]


OTHERS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "attention": lambda a, b: tf.nn.softmax(tf.matmul(a, b, transpose_b=True)) @ b,
    "a weight decay": decayed,
    "a normalization": normalized,
    "squares of something else": lambda a, b: (
        tf.matmul(a, b, transpose_b=True) + rows(tf.exp(a))[:, None]
    ),
    "a polynomial": lambda a, b: a * a + tf.matmul(a, b, transpose_b=True)[:, :1],
    "a margin": lambda a, b: (
        tf.reduce_sum(a[:CODES] * b, -1)[:, None] - tf.matmul(a[:CODES], b, transpose_b=True)
    ),
    "a margin of halves": lambda a, b: (
        tf.reduce_sum(a[:24] * a[24:], -1)[:, None] - tf.matmul(a[:24], a[24:], transpose_b=True)
    ),
    "a margin by the diagonal": lambda a, b: (
        0.2
        + tf.matmul(a[:CODES], b, transpose_b=True)
        - tf.linalg.diag_part(tf.matmul(a[:CODES], b, transpose_b=True))[:, None]
    ),
    "a diagonal of an input": lambda a, b: (
        tf.matmul(a, b, transpose_b=True) + tf.linalg.diag_part(a)[:, None]
    ),
    "a squared error": lambda a, b: (tf.matmul(a, b, transpose_b=True) - 1.0) ** 2,
    "a transposition by einsum": lambda a, b: (tf.matmul(a, tf.einsum("ij->ji", b)) - 1.0) ** 2,
    "similarities by einsum beside a bias": lambda a, b: tf.einsum("ij,kj->ik", a, a) + b[0, 0],
    "a sum by einsum": lambda a, b: (
        tf.matmul(a, b, transpose_b=True) + tf.einsum("ij->i", a)[:, None]
    ),
    "squares behind an activation": lambda a, b: (
        tf.matmul(a, b, transpose_b=True) + tf.sigmoid(rows(a))[:, None]
    ),
    "a cosine": lambda a, b: (
        1.0 - tf.matmul(tf.nn.l2_normalize(a, 1), tf.nn.l2_normalize(b, 1), transpose_b=True)
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_only_looks_like_a_distance(other):
    low, kept = products(traced(OTHERS[other]))
    assert low and not kept


def test_other_readers_of_the_operands_go_low():
    """What classifies by the same tensor, and the gradient for its weights."""

    def step(a, b):
        weights = tf.ones((WIDTH, 10))
        with tf.GradientTape() as tape:
            tape.watch([a, b, weights])
            logits = tf.matmul(a, weights)
            value = tf.reduce_sum(tf.nn.softmax(logits) ** 3) + tf.reduce_sum(distances(a, b) ** 2)
        return tape.gradient(value, [a, b, weights])

    assert products(traced(step)) == (3, 3)


def grams(a: tf.Tensor) -> tf.Tensor:
    return tf.matmul(a, a, transpose_a=True) / POINTS


def kernel(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean((tf.matmul(a, b, transpose_b=True) / WIDTH + 1.0) ** 3.0)


DIFFERENCES: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "style": lambda a, b: tf.reduce_mean((grams(a) - grams(b)) ** 2, -1),
    "einsum": lambda a, b: tf.reduce_mean(
        tf.math.squared_difference(
            *[tf.einsum("bijc,bijd->bcd", x, x) for x in (a[None, None], b[None, None])]
        ),
        -1,
    ),
    "orthogonality": lambda a, b: tf.reduce_mean(tf.square(grams(a) - tf.eye(WIDTH)), -1),
    "two samples": lambda a, b: kernel(a, a) + kernel(b, b) - 2.0 * kernel(a, b),
}


@pytest.mark.parametrize("form", DIFFERENCES)
def test_differences_of_gram_matrices_are_those_of_float32(form):
    found = traced(DIFFERENCES[form])
    assert products(found)[0] == 0 < products(found)[1]
    assert products(found, dataclasses.replace(CPU, parity=True))[1] == 0


def test_similarities_of_a_tensor_with_itself_are_rounded():
    """Those of a contrastive loss: the diagonal and the largest are taken off."""

    def step(a, b):
        similar = tf.matmul(a, a, transpose_b=True) - 1e9 * tf.eye(POINTS)
        return tf.nn.softmax(similar - tf.reduce_max(similar, -1, keepdims=True)) @ a @ b

    found = trace(step, tf.TensorSpec((POINTS, WIDTH)), tf.TensorSpec((WIDTH, CODES)))
    assert products(found) == (3, 0)
