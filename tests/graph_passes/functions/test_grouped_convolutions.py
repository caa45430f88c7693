"""Convolutions of groups that XLA compiles: which are taken from it, and what they give then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cpu_units import HAS_ONEDNN, NO_ONEDNN
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from graph_passes import PrecisionConfig, RewriteResult, rewrite_graph_def
from graph_passes.functions.call_tree import MUST_COMPILE
from graph_passes.functions.grouped_convolutions import RULE
from graph_passes.ir.convolutions import CONVOLUTIONS
from graph_passes.policy.config import ListEdit
from graph_passes.policy.cost_table_files import shipped_table
from tf_amp.hosts.function_shapes import called_shapes, static_shapes

TABLE = shipped_table("cpu-avx512_bf16", "bfloat16")
CONFIG = PrecisionConfig(target_dtype="bfloat16", device="CPU", cost_table=TABLE)
FLOAT32 = dataclasses.replace(CONFIG, converts=False, cost_table=None)
in_both = pytest.mark.parametrize("config", [CONFIG, FLOAT32], ids=["bfloat16", "float32"])
IMAGES, FILTERS, ROWS = (None, 16, 16, 64), (3, 3, 4, 64), 8
ATTRS = {"strides": 1, "padding": "SAME"}
Body = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step with a function that XLA compiles.

    Attributes:
        graph_def: its graph, of the placeholders `x` and `w`.
        results: names of the output, of the gradients, and of a counter of calls.
        shapes: shapes of its tensors, and of those of its functions.
    """

    graph_def: graph_pb2.GraphDef
    results: list[str]
    shapes: tuple[Any, Any]

    def rewrite(self, config: PrecisionConfig) -> RewriteResult:
        """The rewritten graph; a rewrite that was given up fails the test."""
        of_graph, of_functions = self.shapes
        result = rewrite_graph_def(
            self.graph_def,
            config,
            preserve=["x", "w", *self.results],
            shapes=of_graph,
            function_shapes=of_functions,
        )
        assert result.failure is None
        return result

    def run(self, graph_def: graph_pb2.GraphDef, *values: np.ndarray) -> list[np.ndarray]:
        """The output and the gradients that a graph made of it gives."""
        runs_by_name = not any(
            node.op in CONVOLUTIONS and MUST_COMPILE not in function.attr
            for function in graph_def.library.function
            for node in function.node_def
        )
        if not (runs_by_name or HAS_ONEDNN):
            pytest.skip(NO_ONEDNN)
        with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
            tf.import_graph_def(graph_def, name="")
            return session.run(self.results, dict(zip(("x:0", "w:0"), values, strict=True)))  # type: ignore[no-any-return]


def convolution(**attrs: Any) -> Body:
    return lambda x, w: tf.nn.convolution(x, w, **{**ATTRS, **attrs})


def program(
    body: Body,
    images: tuple[int | None, ...] = IMAGES,
    filters: tuple[int | None, ...] = FILTERS,
    beside: Callable[[Any], Any] = tf.nn.relu,
) -> Program:
    """A step of `body`, compiled, between a product of pixels and the sum of squares."""
    compiled = tf.function(body, jit_compile=True, autograph=False)

    @tf.function(autograph=False)
    def step(x: Any, w: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch((x, w))
            y = beside(compiled(x @ tf.eye(images[-1] or 64), w))
            loss = tf.reduce_sum(y * y)
        return [y, *tape.gradient(loss, (x, w))]

    return traced_program(step, images, filters)


def traced_program(step: Any, images: Any, filters: Any) -> Program:
    """A function of images and filters as a program."""
    specs = (tf.TensorSpec(images, name="x"), tf.TensorSpec(filters, name="w"))
    traced = step.get_concrete_function(*specs)
    graph = traced.graph
    return Program(
        graph.as_graph_def(),
        [tensor.name for tensor in traced.outputs],
        (static_shapes(graph), called_shapes(graph._functions)),
    )


def compiled_calls(graph_def: graph_pb2.GraphDef) -> list[node_def_pb2.NodeDef]:
    return [n for n in graph_def.node if MUST_COMPILE in n.attr and n.attr[MUST_COMPILE].b]


def called(graph_def: graph_pb2.GraphDef) -> list[function_pb2.FunctionDef]:
    """The functions that the graph calls itself."""
    library = {function.signature.name: function for function in graph_def.library.function}
    return [library[n.attr["f"].func.name] for n in graph_def.node if n.op.endswith("Call")]


def convolutions(graph_def: graph_pb2.GraphDef) -> list[node_def_pb2.NodeDef]:
    return [n for f in called(graph_def) for n in f.node_def if n.op.startswith("Conv2D")]


def values(*shapes: tuple[int | None, ...]) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.normal(size=[n or ROWS for n in shape]).astype("float32") for shape in shapes]


@pytest.mark.parametrize(
    ("body", "images", "filters"),
    [
        (convolution(), IMAGES, FILTERS),
        (convolution(strides=2), IMAGES, (3, 3, 16, 128)),
        (convolution(padding="VALID", dilations=2), IMAGES, (3, 3, 1, 64)),
        pytest.param(convolution(), IMAGES, (7, 7, 1, 128), marks=pytest.mark.slow),
        (convolution(), (None, 100, 64), (5, 8, 64)),
    ],
    ids=["groups", "strided", "dilated", "wide", "one axis"],
)
def test_taken_from_xla(body: Body, images: Any, filters: Any) -> None:
    made = program(body, images, filters)
    assert len(compiled_calls(made.graph_def)) == 2
    before = made.graph_def.SerializeToString(deterministic=True)
    result = made.rewrite(CONFIG)
    assert made.graph_def.SerializeToString(deterministic=True) == before
    new = result.graph_def
    assert not compiled_calls(new)
    for function in called(new):
        assert MUST_COMPILE not in function.attr
    assert sorted(node.op for node in convolutions(new)) == [
        "Conv2D",
        "Conv2DBackpropFilter",
        "Conv2DBackpropInput",
    ]
    assert tf.bfloat16 in {node.attr["T"].type for node in convolutions(new)}
    assert sum(unit.startswith(f"{RULE}: ") for unit in result.report.fused_units) == 2
    fed = values(images, filters)
    for found, true in zip(made.run(new, *fed), made.run(made.graph_def, *fed), strict=True):
        assert np.abs(found - true).max() < 0.03 * np.abs(true).max()


@in_both
def test_a_batch_without_rows_has_gradients(config: PrecisionConfig) -> None:
    made = program(
        lambda x, w: convolution()(x, w), beside=lambda y: tf.nn.bias_add(y, tf.ones(64))
    )
    new = made.rewrite(config).graph_def
    assert not compiled_calls(new)
    x, w = values(IMAGES, FILTERS)
    y, dx, dw = made.run(new, x[:0], w)
    assert (y.shape, dx.shape) == ((0, 16, 16, 64), (0, 16, 16, 64))
    assert not dw.any()


@in_both
def test_a_penalty_on_gradients(config: PrecisionConfig) -> None:
    """As of a Wasserstein GAN: the gradient of a function of gradients."""
    compiled = tf.function(convolution(), jit_compile=True, autograph=False)

    @tf.function(autograph=False)
    def step(x: Any, w: Any) -> list[Any]:
        with tf.GradientTape() as outer:
            outer.watch(w)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(compiled(x, w) ** 2)
            penalty = tf.reduce_sum(tape.gradient(y, x) ** 2) + y
        return [penalty, outer.gradient(penalty, w)]

    made = traced_program(step, IMAGES, FILTERS)
    assert compiled_calls(made.graph_def)
    new = made.rewrite(config).graph_def
    assert not compiled_calls(new)
    fed = values(IMAGES, FILTERS)
    for found, true in zip(made.run(new, *fed), made.run(made.graph_def, *fed), strict=True):
        assert np.abs(found - true).max() < 0.03 * np.abs(true).max()


DENIED = tuple(
    ListEdit(list_name="deny", action="add", op=op)
    for op in ("MatMul", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
)


@pytest.mark.parametrize(
    ("config", "prefix"),
    [(dataclasses.replace(CONFIG, list_edits=DENIED), ""), (FLOAT32, "_MklNative")],
    ids=["by the lists", "without fast units"],
)
def test_also_where_nothing_is_converted(config: PrecisionConfig, prefix: str) -> None:
    """In float32 the kernels are named: on most such CPUs TensorFlow takes others."""
    made = program(convolution())
    result = made.rewrite(config)
    assert not result.report.converted_nodes
    assert not compiled_calls(result.graph_def)
    ops = {node.op for function in called(result.graph_def) for node in function.node_def}
    assert {prefix + op for op in CONVOLUTIONS} <= ops
    fed = values(IMAGES, FILTERS)
    found, true = (made.run(graph, *fed) for graph in (result.graph_def, made.graph_def))
    for one, other in zip(found, true, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        {"target_dtype": "float16", "cost_table": None},
        {"device": "GPU", "cost_table": None},
        {"cost_table": None},
        {"fused": True},
        {"parity": True},
        {"disabled_rules": frozenset((RULE,))},
    ],
    ids=str,
)
def test_not_where_onednn_may_have_no_kernel(change: dict[str, Any]) -> None:
    result = program(convolution()).rewrite(dataclasses.replace(CONFIG, **change))
    assert len(compiled_calls(result.graph_def)) == 2


def explicitly_padded(x: Any, w: Any) -> Any:
    return tf.nn.conv2d(x, w, 1, [[0, 0], [1, 1], [1, 1], [0, 0]])


def in_float64(x: Any, w: Any) -> Any:
    return tf.cast(convolution()(tf.cast(x, "float64"), tf.cast(w, "float64")), "float32")


def followed_by_a_plain_one(x: Any, w: Any) -> Any:
    return convolution()(convolution()(x, w), tf.ones([1, 1, 64, 64]))


@pytest.mark.parametrize(
    ("body", "filters"),
    [
        (convolution(), (3, 3, 64, 64)),
        (convolution(), (3, 3, None, 64)),
        (explicitly_padded, FILTERS),
        (in_float64, FILTERS),
        (followed_by_a_plain_one, FILTERS),
        (lambda x, w: tf.nn.relu(convolution()(x, w)), FILTERS),
    ],
    ids=["one group", "unknown groups", "padding", "float64", "a plain one too", "an activation"],
)
def test_what_is_compiled_for_another_reason_stays(body: Body, filters: Any) -> None:
    made = program(body, IMAGES, filters)
    assert len(compiled_calls(made.rewrite(CONFIG).graph_def)) == 2
