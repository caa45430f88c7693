"""MaxPool3D and its gradient, which TensorFlow makes kernels of oneDNN together or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from free_casts import FREE_CASTS
from traced_graphs import Traced, node_types, of_op, trace

from graph_passes import PrecisionConfig
from graph_passes.units.reduction.max_pool import RULE

CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU", cost_table=FREE_CASTS)
FLOAT = tf.float32.as_datatype_enum
VOLUMES, FILTERS = (2, 8, 8, 8, 4), (3, 3, 3, 4, 4)


def network(is_trained: bool) -> Callable[..., list[tf.Tensor]]:
    def step(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = tf.nn.max_pool3d(tf.nn.conv3d(x, w, [1] * 5, "SAME"), 2, 2, "VALID")
            y = tf.nn.conv3d(y, w, [1] * 5, "SAME")
        return tape.gradient(y, [x, w]) if is_trained else [y]

    return step


def traced(is_trained: bool = True) -> Traced:
    return trace(network(is_trained), tf.TensorSpec((None, *VOLUMES[1:])), tf.TensorSpec(FILTERS))


def dtype_of(graph: object, op: str) -> int:
    (node,) = of_op(graph, op)  # type: ignore[arg-type]
    dtype: int = node.attr["T"].type
    return dtype


def test_both_stay_float32_and_nothing_comes_between() -> None:
    graph = traced()
    assert RULE in node_types(graph.find(CPU))
    after = graph.rewrite(CPU).graph_def
    assert dtype_of(after, "MaxPool3D") == dtype_of(after, "MaxPool3DGrad") == FLOAT
    (pool,), (gradient,) = of_op(after, "MaxPool3D"), of_op(after, "MaxPool3DGrad")
    assert list(gradient.input[:2]) == [pool.input[0], pool.name]
    assert {node.attr["T"].type for node in of_op(after, "Conv3D")} == {CPU.target}

    random = np.random.default_rng(0)
    x, w = (random.normal(size=shape).astype(np.float32) for shape in (VOLUMES, FILTERS))
    before = graph.run(graph.graph_def, x, w)
    for old, new in zip(before, graph.run(after, x, w), strict=True):
        assert np.linalg.norm(new - old) < 0.05 * np.linalg.norm(old)


def test_what_else_the_gradient_reads_is_left_alone() -> None:
    def gradient(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        y = tf.nn.conv3d(x, w, [1, 2, 2, 2, 1], "SAME")
        sizes = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "VALID"}
        return [tf.raw_ops.MaxPool3DGrad(orig_input=x, orig_output=y, grad=y, **sizes)]

    specs = tf.TensorSpec(VOLUMES), tf.TensorSpec(FILTERS)
    assert RULE not in node_types(trace(gradient, *specs).find(CPU))


def test_without_a_gradient_it_goes_low() -> None:
    graph = traced(is_trained=False)
    assert RULE not in node_types(graph.find(CPU))
    assert dtype_of(graph.rewrite(CPU).graph_def, "MaxPool3D") == CPU.target


@pytest.mark.parametrize(
    "config",
    [
        PrecisionConfig(target_dtype="float16", device="GPU"),
        dataclasses.replace(CPU, fused=True),
        dataclasses.replace(CPU, disabled_rules=frozenset((RULE,))),
    ],
    ids=["a GPU", "a compiler", "switched off"],
)
def test_where_it_is_not_for(config: PrecisionConfig) -> None:
    assert RULE not in node_types(traced().find(config))
