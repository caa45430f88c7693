"""Gradients of products of one tensor's functions: one pass, values as before, and what is left."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from traced_graphs import Traced, node_types, of_op, trace

from graph_passes import PrecisionConfig
from graph_passes.units.activation.local_derivative import RULE
from graph_passes.units.fusion import Fusion

CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU")
WIDTH = 8
Function = Callable[[tf.Tensor], tf.Tensor]

FUNCTIONS: dict[str, Function] = {
    "gelu, tanh": lambda x: keras.activations.gelu(x, approximate=True),
    "gelu, erfc": lambda x: 0.5 * x * tf.math.erfc(-x * np.float32(np.sqrt(0.5))),
    "gelu, erf": lambda x: 0.5 * x * (1.0 + tf.math.erf(x / np.sqrt(2.0).astype(np.float32))),
    "swish": lambda x: x * tf.sigmoid(x),
    "swish, scaled": lambda x: x * tf.sigmoid(-1.702 * x),
    "mish": lambda x: x * tf.tanh(tf.math.softplus(x)),
    "difference": lambda x: (x - tf.square(x)) * tf.exp(-x),
    "three factors": lambda x: x * tf.sin(x) * tf.sigmoid(x),
}


def between_products(function: Function) -> Callable[..., list[tf.Tensor]]:
    """A function between two products, and the gradients of both factors of the first."""

    def step(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = tf.matmul(function(tf.matmul(x, w)), w)
            loss = tf.reduce_sum(y * y)
        return tape.gradient(loss, [x, w])

    return step


def traced_between(function: Function, batch: int | None = 16, rank: int = 2) -> Traced:
    shape = (batch, *(4,) * (rank - 2), WIDTH)
    return trace(between_products(function), tf.TensorSpec(shape), tf.TensorSpec((WIDTH, WIDTH)))


def given(rows: int = 16, rank: int = 2) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, *(4,) * (rank - 2), WIDTH)).astype(np.float32)
    return x, random.normal(size=(WIDTH, WIDTH)).astype(np.float32)


def found(fusion: Fusion) -> int:
    return node_types(fusion).count(RULE)


def assert_the_same(traced: Traced, fusion: Fusion, *values: np.ndarray) -> None:
    wanted = traced.run(traced.graph_def, *values)
    for new, old in zip(traced.run(fusion.proto, *values), wanted, strict=True):
        assert new.shape == old.shape
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=2e-6 * np.abs(old).max())


def ancestors(graph_def: tf.compat.v1.GraphDef, name: str) -> set[str]:
    """The nodes that a node is made of or waits for."""
    nodes = {node.name: node for node in graph_def.node}
    pending, seen = [name], set()
    while pending:
        for read in nodes[pending.pop()].input:
            maker = read.lstrip("^").partition(":")[0]
            if maker not in seen:
                seen.add(maker)
                pending.append(maker)
    return seen


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("batch", [16, None])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_is_multiplied_once(name, batch, rank):
    traced = traced_between(FUNCTIONS[name], batch, rank)
    fusion = traced.find(CPU)
    assert found(fusion)
    assert_the_same(traced, fusion, *given(rank=rank))


@pytest.mark.parametrize("batch", [16, None])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_derivative_is_made_before_the_gradient_comes(name, batch):
    fusion = traced_between(FUNCTIONS[name], batch).find(CPU)
    products = [node for node in fusion.proto.node if node.name.endswith("local_derivative/dx")]
    assert products
    for product in products:
        gradient, derivative = product.input
        waited_for = ancestors(fusion.proto, derivative)
        assert gradient not in waited_for
        assert not any(node.startswith("gradient_tape/MatMul") for node in waited_for)


@pytest.mark.parametrize("name", ["gelu, tanh", "gelu, erfc", "swish", "mish"])
def test_fewer_tensors_of_full_size_are_made(name):
    traced = traced_between(FUNCTIONS[name])
    off = PrecisionConfig(target_dtype="bfloat16", device="CPU", disabled_rules={RULE})
    ops = ("Add", "AddN", "AddV2", "Exp", "Mul", "Neg", "Square", "TanhGrad", "SigmoidGrad")
    after, before = (
        sum(len(of_op(traced.find(config).proto, op)) for op in ops) for config in (CPU, off)
    )
    assert after < before


def test_a_batch_of_one_is_no_other_case():
    traced = traced_between(FUNCTIONS["gelu, erfc"], None)
    assert_the_same(traced, traced.find(CPU), *given(rows=1))


def test_a_number_that_adds_an_axis_is_no_number():
    def step(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        h = tf.matmul(x, w)
        e = tf.sigmoid(h)
        dy = tf.matmul(h * e, w)
        three = np.full((1, 1, 1), 3.0, np.float32)
        return [tf.add_n([dy * e * three, dy * h * three])]

    traced = trace(step, tf.TensorSpec((None, WIDTH)), tf.TensorSpec((WIDTH, WIDTH)))
    fusion = traced.find(CPU)
    assert found(fusion) == 1
    assert_the_same(traced, fusion, *given())


def test_large_and_small_arguments():
    traced = traced_between(FUNCTIONS["gelu, erfc"])
    x, _ = given()
    for scale in (1e-20, 1e4, 1e15):
        before, after = (
            traced.run(g, np.float32(x * scale), np.eye(WIDTH, dtype=np.float32))
            for g in (traced.graph_def, traced.find(CPU).proto)
        )
        for new, old in zip(after, before, strict=True):
            np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5 * np.abs(old).max())


def test_in_a_loop_of_tensorflow_1():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (16, WIDTH), name="x")
        w = tf.constant(np.eye(WIDTH, dtype=np.float32))

        def body(i, total):
            h = tf.matmul(total, w)
            y = tf.matmul(h * tf.sigmoid(h), w)
            (gradient,) = tf.gradients(y, h)
            return i + 1, total + 0.1 * tf.matmul(gradient, w)

        tf.compat.v1.disable_control_flow_v2()
        try:
            _, total = tf.compat.v1.while_loop(lambda i, _: i < 3, body, (0, x))
        finally:
            tf.compat.v1.enable_control_flow_v2()
        result = tf.identity(total, name="result")
    shapes = {op.name: [t.shape for t in op.outputs] for op in graph.get_operations()}
    traced = Traced(
        graph.as_graph_def(),
        ("x:0",),
        (result.name,),
        lambda name: tuple(
            None if s.rank is None else tuple(s.as_list()) for s in shapes.get(name, ())
        ),
    )
    fusion = traced.find(CPU)
    assert found(fusion) == 1
    assert_the_same(traced, fusion, given()[0])


def _gated(x: tf.Tensor) -> tf.Tensor:
    return x * tf.sigmoid(tf.matmul(x, tf.eye(WIDTH)))


def _scaled(x: tf.Tensor) -> tf.Tensor:
    return x * tf.reduce_mean(x, 0, keepdims=True)


def _twice(x: tf.Tensor) -> tf.Tensor:
    return x * tf.sigmoid(x) + tf.matmul(x, tf.eye(WIDTH))


def _square(x: tf.Tensor) -> tf.Tensor:
    return x * x


@pytest.mark.parametrize("function", [_gated, _scaled, _twice, _square])
@pytest.mark.parametrize("batch", [16, None])
def test_what_is_no_such_function_stays(function, batch):
    fusion = traced_between(function, batch).find(CPU)
    assert not found(fusion)


def test_a_gradient_that_is_fetched_on_its_way_stays():
    traced = traced_between(FUNCTIONS["swish"])
    inside = next(node.name for node in of_op(traced.graph_def, "SigmoidGrad"))
    fusion = traced.find(CPU, [inside])
    assert not found(fusion)
    assert any("to be preserved" in miss.why for miss in fusion.misses)


def test_a_gradient_of_the_gradient_is_the_same():
    def step(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as outer:
            outer.watch([x, w])
            with tf.GradientTape() as inner:
                inner.watch(x)
                h = tf.matmul(x, w)
                y = tf.matmul(h * tf.sigmoid(h), w)
                loss = tf.reduce_sum(y * y)
            penalty = tf.reduce_sum(inner.gradient(loss, x) ** 2)
        return outer.gradient(penalty, [x, w])

    traced = trace(step, tf.TensorSpec((16, WIDTH)), tf.TensorSpec((WIDTH, WIDTH)))
    assert_the_same(traced, traced.find(CPU), *given())


def test_a_sum_with_other_products_stays():
    def step(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        h = tf.matmul(x, w)
        a, b = tf.sigmoid(h), tf.tanh(h)
        return [tf.matmul(tf.add_n([a * b, a * tf.sin(h), b * tf.sin(h)]), w)]

    traced = trace(step, tf.TensorSpec((16, WIDTH)), tf.TensorSpec((WIDTH, WIDTH)))
    assert not found(traced.find(CPU))


def _reduced(h: tf.Tensor, dy: tf.Tensor) -> list[tf.Tensor]:
    column = tf.reduce_max(h, 1, keepdims=True)
    axes = tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(column), s1=tf.shape(h)).r0
    summed = tf.reduce_sum(dy * h, axes, keepdims=True)
    summed.set_shape((None, None))
    return [dy * h, dy * column, tf.reshape(summed, tf.shape(column)) * h]


def _halves(h: tf.Tensor, dy: tf.Tensor, shape: tf.Tensor | list[int]) -> list[tf.Tensor]:
    s = tf.sigmoid(h)
    halves = tf.reshape(dy * s, shape) * tf.range(1.0, WIDTH // 2 + 1)
    return [dy * s, dy * h, tf.reshape(halves, tf.shape(h))]


HARD: dict[str, Callable[[tf.Tensor, tf.Tensor], list[tf.Tensor]]] = {
    "no linear op": lambda h, dy: [dy * h, dy * tf.sin(h), -tf.exp(dy * h)],
    "a product of two parts": lambda h, dy: [dy * h, dy * tf.sin(h), (dy * h) * (dy * tf.sin(h))],
    "one divided by a part": lambda h, dy: [dy * h, dy * tf.sin(h), 3.0 / (dy * h)],
    "a slope at a part": lambda h, dy: [
        *(dy * h, dy * tf.sin(h)),
        tf.raw_ops.SigmoidGrad(y=dy * h, dy=h),
        tf.raw_ops.SigmoidGrad(y=dy * h, dy=dy * tf.sin(h)),
    ],
    "a slope of rows": lambda h, dy: [
        dy * tf.sin(h[0]),
        tf.raw_ops.SigmoidGrad(y=tf.sigmoid(h), dy=dy * tf.cos(h[0])),
    ],
    "rows and more": lambda h, dy: [
        *(dy * tf.tanh(h[0]), dy * tf.cos(h[0])),
        dy * tf.sin(h[0]) * h,
    ],
    "a sum": lambda h, dy: [dy * h, dy * tf.sin(h), tf.reduce_sum(dy * h, 0, keepdims=True) * h],
    "a sum over what is shorter": _reduced,
    "another shape": lambda h, dy: _halves(h, dy, [-1, WIDTH // 2]),
    "the shape of another": lambda h, dy: _halves(
        h, dy, tf.shape(tf.reshape(h, [-1, WIDTH // 2]) + 1.0)
    ),
    "a part taken back": lambda h, dy: [dy * h, dy * tf.sin(h), -(dy * h)],
}
"""What is added up behind products by functions of one tensor, and is no gradient of theirs."""


@pytest.mark.parametrize("batch", [16, None])
@pytest.mark.parametrize("name", HARD)
def test_whatever_is_added_up_is_the_same(name, batch):
    def step(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        h = tf.matmul(x, w)
        return [tf.matmul(tf.add_n(HARD[name](h, tf.matmul(h, w))), w)]

    traced = trace(step, tf.TensorSpec((batch, WIDTH)), tf.TensorSpec((WIDTH, WIDTH)))
    fusion = traced.find(CPU)
    assert not any("failed" in miss.why for miss in fusion.misses)
    x, w = given()
    assert_the_same(traced, fusion, x, w / 8)
