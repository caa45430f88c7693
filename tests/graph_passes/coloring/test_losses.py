"""Losses: float32 from the logits to the value, cast once, and with nothing else held back."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from decisions import decisions_of
from graph_text import graph, inferred_shapes
from traced_graphs import Traced, of_op, trace

from graph_passes import PrecisionConfig, Reason
from graph_passes.ir.view import view_body
from graph_passes.pipeline import paint
from graph_passes.policy.config import ListEdit

FLOAT = tf.float32.as_datatype_enum
CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU")
GPU = PrecisionConfig(target_dtype="float16", device="GPU")
ROWS, CLASSES = 32, 10
WITHOUT = frozenset(("loss",))
_keras, _tf_keras, _nn = keras.losses, tf_keras.losses, tf.nn

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
LOSSES: dict[str, tuple[str, Loss]] = {
    "sparse, keras": ("classes", _keras.SparseCategoricalCrossentropy(from_logits=True)),
    "categorical, keras": ("shares", _keras.CategoricalCrossentropy(from_logits=True)),
    "smoothed, keras": (
        "shares",
        _keras.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
    ),
    "binary, keras": ("shares", _keras.BinaryCrossentropy(from_logits=True)),
    "squares, keras": ("values", _keras.MeanSquaredError()),
    "absolute, keras": ("values", _keras.MeanAbsoluteError()),
    "huber, keras": ("values", _keras.Huber()),
    "log cosh, keras": ("values", _keras.LogCosh()),
    "hinge, keras": ("values", _keras.Hinge()),
    "sparse, tf_keras": ("classes", _tf_keras.SparseCategoricalCrossentropy(from_logits=True)),
    "categorical, tf_keras": ("shares", _tf_keras.CategoricalCrossentropy(from_logits=True)),
    "binary, tf_keras": ("shares", _tf_keras.BinaryCrossentropy(from_logits=True)),
    "squares, tf_keras": ("values", _tf_keras.MeanSquaredError()),
    "sparse, tf": (
        "classes",
        lambda y, z: tf.reduce_mean(_nn.sparse_softmax_cross_entropy_with_logits(y, z)),
    ),
    "softmax, tf": (
        "shares",
        lambda y, z: tf.reduce_mean(_nn.softmax_cross_entropy_with_logits(y, z)),
    ),
    "sigmoid, tf": (
        "shares",
        lambda y, z: tf.reduce_mean(_nn.sigmoid_cross_entropy_with_logits(y, z)),
    ),
    "weighted, tf": (
        "shares",
        lambda y, z: tf.reduce_mean(_nn.weighted_cross_entropy_with_logits(y, z, 2.0)),
    ),
    "half the squares, tf": ("values", lambda y, z: _nn.l2_loss(y - z)),
    "absolute, tf": ("values", lambda y, z: tf.reduce_mean(tf.abs(y - z))),
    "log softmax, by hand": (
        "shares",
        lambda y, z: -tf.reduce_mean(tf.reduce_sum(y * _nn.log_softmax(z), -1)),
    ),
    "log of softmax, by hand": (
        "shares",
        lambda y, z: -tf.reduce_mean(tf.reduce_sum(y * tf.math.log(_nn.softmax(z) + 1e-7), -1)),
    ),
    "sum of exponentials, by hand": (
        "shares",
        lambda y, z: tf.reduce_mean(tf.reduce_logsumexp(z, -1) - tf.reduce_sum(y * z, -1)),
    ),
}
PROBABILITIES: dict[str, tuple[str, Loss]] = {
    "sparse, keras": ("classes", _keras.SparseCategoricalCrossentropy()),
    "categorical, keras": ("shares", _keras.CategoricalCrossentropy()),
    "focal, keras": ("shares", _keras.CategoricalFocalCrossentropy()),
    "divergence, keras": ("shares", _keras.KLDivergence()),
    "sparse, tf_keras": ("classes", _tf_keras.SparseCategoricalCrossentropy()),
    "categorical, tf_keras": ("shares", _tf_keras.CategoricalCrossentropy()),
}


def labels(kind: str) -> tuple[tf.TensorSpec, np.ndarray]:
    """Labels that the target dtypes cannot hold, where they are not numbers of classes."""
    rng = np.random.default_rng(2)
    if kind == "classes":
        return tf.TensorSpec((ROWS,), tf.int32), rng.integers(0, CLASSES, ROWS).astype(np.int32)
    if kind == "shares":
        shares = rng.dirichlet(np.ones(CLASSES), ROWS).astype(np.float32)
    else:
        shares = rng.normal(100, 3, (ROWS, CLASSES)).astype(np.float32)
    return tf.TensorSpec((ROWS, CLASSES)), shares


def trace_step(kind: str, loss: Loss, activation=lambda logits: logits) -> Traced:
    """A layer with a bias, a loss, and the gradients of weights and bias."""

    def step(x, y, weights, bias):
        with tf.GradientTape() as tape:
            tape.watch([weights, bias])
            logits = tf.nn.bias_add(tf.matmul(x, weights), bias)
            value = loss(y, activation(logits))
        return value, *tape.gradient(value, [weights, bias])

    weights, bias = tf.TensorSpec((CLASSES, CLASSES)), tf.TensorSpec((CLASSES,))
    return trace(step, tf.TensorSpec((ROWS, CLASSES)), labels(kind)[0], weights, bias)


def exact_inputs(kind: str) -> tuple[np.ndarray, ...]:
    """Inputs whose logits are exact in both target dtypes; for values, near to the labels."""
    x = np.random.default_rng(0).normal(100 if kind == "values" else 0, 4, (ROWS, CLASSES))
    x = np.round(x.astype(np.float32) * 2) / 2
    unit = np.eye(CLASSES, dtype=np.float32)
    return x, labels(kind)[1], unit, np.zeros(CLASSES, np.float32)


def _without(config: PrecisionConfig) -> PrecisionConfig:
    return PrecisionConfig(
        target_dtype=config.target_dtype, device=config.device, disabled_rules=WITHOUT
    )


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_float32(name, config):
    traced = trace_step(*LOSSES[name])
    inputs = exact_inputs(LOSSES[name][0])
    expected = traced.run(traced.graph_def, *inputs)
    found = traced.run(traced.rewrite(config).graph_def, *inputs)
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-6)
    unit = 2.0**-8 if config is CPU else 2.0**-10
    for old, new in zip(expected[1:], found[1:], strict=True):
        # Sums over 32 rows of terms that are rounded at most three times.
        np.testing.assert_allclose(new, old, atol=3 * unit * np.abs(old).max())


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_logits_are_cast_once(name, config):
    traced = trace_step(*LOSSES[name])
    after = traced.rewrite(config).graph_def
    makers = {node.name: node.op for node in after.node}
    up = [cast for cast in of_op(after, "Cast") if cast.attr["SrcT"].type == config.target]
    assert [makers[cast.input[0]] for cast in up].count("BiasAdd") == 1
    low = {node.op for node in after.node if node.attr["T"].type == config.target}
    assert low.isdisjoint({"Sub", "AddV2", "Exp", "Log", "Log1p", "Softplus", "Mean", "Sum"})


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("name", PROBABILITIES)
def test_a_loss_of_probabilities_is_that_of_float32(name, config):
    traced = trace_step(*PROBABILITIES[name], activation=tf.nn.softmax)
    inputs = exact_inputs(PROBABILITIES[name][0])
    expected = traced.run(traced.graph_def, *inputs)
    found = traced.run(traced.rewrite(config).graph_def, *inputs)
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-6)
    assert all(np.isfinite(gradient).all() for gradient in found)


def test_without_the_rule_a_difference_is_rounded():
    """The tables can fail: labels near 100 are rounded by up to a quarter in bfloat16."""
    traced = trace_step(*LOSSES["absolute, keras"])
    inputs = exact_inputs("values")
    # A network this small is not worth the Casts, either.
    without = dataclasses.replace(_without(CPU), disabled_rules=WITHOUT | {"cast-cut"})
    (expected, *_), (found, *_) = (
        traced.run(graph, *inputs)
        for graph in (traced.graph_def, traced.rewrite(without).graph_def)
    )
    assert abs(found / expected - 1) > 1e-3


def test_a_loss_of_many_terms_is_that_of_float32():
    def many(y, z):
        terms = [tf.abs(z - y * share) - 0.5 * (z - y) for share in np.linspace(0.9, 1, 30)]
        return tf.reduce_mean(tf.add_n(terms))

    traced = trace_step("values", many)
    inputs = exact_inputs("values")
    config = dataclasses.replace(CPU, disabled_rules=frozenset(("cast-cut",)))
    result = traced.rewrite(config)
    assert "MatMul" in {d.op for d in decisions_of(result.report) if d.converted}
    found, expected = (traced.run(g, *inputs)[0] for g in (result.graph_def, traced.graph_def))
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def _low(traced: Traced, config: PrecisionConfig) -> set[str]:
    nodes = traced.rewrite(config).graph_def.node
    return {node.name for node in nodes if node.attr["T"].type == config.target}


def _ops(traced: Traced, config: PrecisionConfig) -> collections.Counter[str]:
    nodes = traced.rewrite(config).graph_def.node
    return collections.Counter(n.op for n in nodes if n.attr["T"].type == config.target)


HIDDEN = tf.TensorSpec((64, CLASSES))


def two_layers(penalty, clip: float | None = None):
    def step(x, y, first, second):
        with tf.GradientTape() as tape:
            tape.watch([first, second])
            hidden = tf.nn.gelu(tf.matmul(x, first))
            logits = tf.matmul(hidden, second)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            value = tf.reduce_mean(losses) + penalty(hidden, first)
        gradients = tape.gradient(value, [first, second])
        if clip is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, clip)
        return (value, *gradients)

    shapes = (ROWS, CLASSES), (CLASSES, 64), (64, CLASSES)
    x, first, second = (tf.TensorSpec(shape) for shape in shapes)
    return trace(step, x, tf.TensorSpec((ROWS,), tf.int32), first, second)


def _none(_, __):
    return 0.0


def _of_weights(_, weights):
    return 1e-4 * tf.nn.l2_loss(weights)


def _of_features(hidden, _):
    return 1e-4 * tf.reduce_mean(tf.square(hidden))


@pytest.mark.parametrize("penalty", [_none, _of_weights, _of_features])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_nothing_of_the_model_and_the_gradients_is_held_back(penalty, clip):
    traced = two_layers(penalty, clip)
    for config in (CPU, GPU):
        assert _low(traced, config) == _low(traced, _without(config))


def test_of_a_way_that_is_too_long_what_is_near_the_loss_counts():
    def network(x, weights):
        value = tf.matmul(x, weights)
        for _ in range(600):
            value = value * 1.01
        return tf.reduce_mean(tf.abs(value - x))

    traced = trace(network, tf.TensorSpec((8, 8)), tf.TensorSpec((8, 8)))
    kept = _low(traced, _without(CPU)) - _low(traced, CPU)
    assert 500 < len(kept) < 513
    assert {"sub", "Abs"} <= kept


def test_a_residual_stream_and_a_norm_of_all_gradients_are_no_losses():
    def network(x, *weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            stream = x
            for matrix in weights:
                stream = stream + tf.matmul(stream * 2.0, matrix)
            loss = tf.reduce_mean(tf.square(stream - x))
        return loss, tf.linalg.global_norm(tape.gradient(loss, weights))

    traced = trace(network, *[tf.TensorSpec((64, 64))] * 31)
    with_rule, without = (_ops(traced, config) for config in (GPU, _without(GPU)))
    kept = without - with_rule
    assert kept["Sub"] == 1  # of the loss itself
    assert 10 < kept["AddV2"] < 18
    assert kept.total() < 60


def test_only_scalars_are_losses():
    def network(x, weights):
        product = tf.matmul(x, weights)
        pooled = tf.reduce_mean(product * 2.0 - x, -1, keepdims=True)
        return tf.reduce_sum(product - x, -1), tf.matmul(pooled * x, weights)

    traced = trace(network, tf.TensorSpec((8, 8)), tf.TensorSpec((8, 8)))
    assert _low(traced, CPU) == _low(traced, _without(CPU))


DIFFERENCES = """
x = Placeholder(dtype=float32, shape=[8, 8])
z = Tanh(x)
y = Cholesky(z)
a = MatMul(x, x)
d = Sub(a, y)
s = Abs(d)
v = Mean(s, [0, 1])
"""


def kept(text: str, config: PrecisionConfig = GPU) -> set[str]:
    """What belongs to a loss, or is made again of what it reads."""
    graph_def = graph(DIFFERENCES + text)
    view = view_body(graph_def, inferred_shapes(graph_def))
    coloring = paint(view, config, (), {})
    inside = (v for v in range(1, len(view.dtypes)) if coloring.why[v] == Reason.INSIDE_UNIT)
    return {view.node_of(vertex).name for vertex in inside}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"d", "s"}),
        ("w = Sqrt(v)\nt = Neg(w)", {"d", "s"}),
        # A scalar of which more than scalars are made is no loss.
        ("t = Mul(x, v)", set()),
        ("w = Sqrt(v)\nu = Neg(w)\nt = Mul(x, u)", set()),
        ("v1 = Neg(v)\n" + "".join(f"v{n + 1} = Neg(v{n})\n" for n in range(1, 600)), set()),
        # What products read is the model's, behind clear ops too.
        ("m = MatMul(d, d)", {"s"}),
        ("r = Reshape(d, [8, 8])\nn = Neg(r)\nm = MatMul(n, n)", {"s"}),
        # The gradient makes the difference once more, or something of it and the predictions.
        ("g = Sub(y, a)\nt = Mul(g, 2.0)\nm = MatMul(t, t)", {"d", "s", "g"}),
        ("g = Mul(a, d)\nm = MatMul(g, g)", {"d", "s", "g"}),
        # What is made of the predictions alone is rounded as they are; labels are not the model's.
        ("g = Tanh(a)\nm = MatMul(g, g)", {"d", "s"}),
        ("g = Tanh(y)\nm = MatMul(g, g)", {"d", "s"}),
        ("g = Mul(a, x)\nm = MatMul(g, g)", {"d", "s"}),
        ("c = Const(2.0)\nk = Mul(s, c)\nt = Sum(k, [0, 1])\ng = Mul(a, c)", {"d", "s", "k"}),
        ("g = MatMul(a, y)", {"d", "s"}),
        # The norm of a gradient says nothing of how that is made.
        ("g = TanhGrad(a, x)\nk = Abs(g)\nt = Sum(k, [0, 1])", {"d", "s", "k"}),
    ],
)
def test_what_belongs_to_a_loss(text: str, expected: set[str]) -> None:
    assert kept(text) == expected


def test_a_reduction_that_is_not_denied_is_no_loss() -> None:
    edits = tuple(
        ListEdit(list_name=name, action=action, op="Mean")
        for name, action in (("deny", "remove"), ("infer", "add"))
    )
    assert kept("", dataclasses.replace(GPU, list_edits=edits)) == set()
