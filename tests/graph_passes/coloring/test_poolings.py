"""Poolings and their gradients, which go low together or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from decisions import decisions_of
from free_casts import FREE_CASTS
from graph_text import graph
from parity import converted
from traced_graphs import Traced, of_op, trace

from graph_passes import PrecisionConfig, rewrite_graph_def
from graph_passes.ops.reasons import Reason

RULE = "max-pool"
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


def dtypes_of(graph: object, op: str) -> set[int]:
    (node,) = of_op(graph, op)  # type: ignore[arg-type]
    return {node.attr[name].type for name in ("T", "TInput") if name in node.attr}


def without(config: PrecisionConfig) -> PrecisionConfig:
    return dataclasses.replace(config, disabled_rules=frozenset((RULE,)))


@pytest.mark.parametrize(
    "config",
    [
        CPU,
        PrecisionConfig(target_dtype="float16", device="GPU"),
        PrecisionConfig(target_dtype="bfloat16", device="GPU"),
        dataclasses.replace(CPU, fused=True),
    ],
    ids=["a CPU", "float16 on a GPU", "bfloat16 on a GPU", "a compiler"],
)
def test_both_dtypes_of_a_gradient_go_low(config: PrecisionConfig) -> None:
    after = traced().rewrite(config).graph_def
    assert dtypes_of(after, "MaxPool3D") == dtypes_of(after, "MaxPool3DGrad") == {config.target}
    (pool,), (gradient,) = of_op(after, "MaxPool3D"), of_op(after, "MaxPool3DGrad")
    assert list(gradient.input[:2]) == [pool.input[0], pool.name]
    one_by_one = traced().rewrite(without(config)).graph_def
    assert dtypes_of(one_by_one, "MaxPool3DGrad") == {FLOAT}


def test_the_gradient_is_that_of_float32() -> None:
    graph = traced()
    after = graph.rewrite(CPU).graph_def
    random = np.random.default_rng(0)
    x, w = (random.normal(size=shape).astype(np.float32) for shape in (VOLUMES, FILTERS))
    before = graph.run(graph.graph_def, x, w)
    for old, new in zip(before, graph.run(after, x, w), strict=True):
        assert np.linalg.norm(new - old) < 0.05 * np.linalg.norm(old)


def test_without_a_kernel_both_stay_float32() -> None:
    """No CPU has a MaxPool3DGrad in float16."""
    config = dataclasses.replace(CPU, target_dtype="float16", cost_table=None)
    after = traced().rewrite(config).graph_def
    assert {node.attr["T"].type for node in of_op(after, "Conv3D")} == {config.target}
    assert dtypes_of(after, "MaxPool3D") == dtypes_of(after, "MaxPool3DGrad") == {FLOAT}


def test_without_a_gradient_it_goes_low() -> None:
    after = traced(is_trained=False).rewrite(CPU).graph_def
    assert dtypes_of(after, "MaxPool3D") == {CPU.target}


POOL = 'ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME"'


@pytest.mark.parametrize(
    ("config", "low"),
    [(CPU, set()), (dataclasses.replace(CPU, device="GPU", cost_table=None), {"p"})],
    ids=["a CPU", "a GPU"],
)
def test_a_pooling_stays_with_a_gradient_that_is_kept(
    config: PrecisionConfig, low: set[str]
) -> None:
    graph_def = graph(f"""
        x = Placeholder(dtype=float32, shape=[4, 8, 8, 16])
        w = Placeholder(dtype=float32, shape=[1, 1, 16, 16])
        a = Conv2D(x, w, strides=[1, 1, 1, 1], padding="SAME")
        p = MaxPool(a, {POOL})
        b = Conv2D(p, w, strides=[1, 1, 1, 1], padding="SAME")
        g = MaxPoolGrad(a, p, b, {POOL})
        c = Conv2D(g, w, strides=[1, 1, 1, 1], padding="SAME")
        out = Identity(c)
    """)
    both = rewrite_graph_def(graph_def, config, preserve=("out",))
    assert {"p", "g"} <= converted(graph_def, both.proto)
    result = rewrite_graph_def(graph_def, config, preserve=("out", "g"))
    assert converted(graph_def, result.proto) & {"p", "g"} == low
    kept = {d.node for d in decisions_of(result.report) if d.reason is Reason.POOLING}
    assert kept == {"p"} - low
