"""Sums of matrix products over a batch: which are one product, and what it comes to."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from traced_graphs import Traced, node_types, trace

from graph_passes import PrecisionConfig

GPU = PrecisionConfig(target_dtype="float16", device="GPU")
RULE = "weight-gradient"


def summed(
    left: tuple[int | None, ...],
    right: tuple[int | None, ...],
    axes: list[int],
    target: list[int],
    *,
    transposed: bool = True,
) -> Traced:
    """A sum of products with what flows back, reshaped to some shape."""

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        dy = tf.raw_ops.ReluGrad(gradients=y, features=y)
        product = tf.raw_ops.BatchMatMulV2(x=x, y=dy, adj_x=transposed)
        return tf.reshape(tf.reduce_sum(product, axes, keepdims=True), target) * 1.0

    return trace(step, tf.TensorSpec(left), tf.TensorSpec(right))


@pytest.mark.parametrize(
    ("left", "right", "axes", "target", "is_one"),
    [
        ((4, 6, 8), (4, 6, 5), [0], [8, 5], True),
        ((2, 4, 6, 8), (2, 4, 6, 5), [1, 0], [8, 5], True),
        ((6, 8), (6, 5), [], [8, 5], True),
        ((4, 6, 4), (4, 6, 5), [1], [4, 5], False),  # over an axis of the products
        ((1, 6, 8), (4, 6, 5), [0], [8, 5], False),  # one operand is repeated
        ((4, 6, 8), (4, 6, 5), [0], [5, 8], False),
        ((4, 6, 8), (4, 6, 5), [0], [40], False),
    ],
)
def test_a_sum_over_the_batch_to_the_shape_of_a_weight_is_one_product(
    left, right, axes, target, is_one
):
    traced = summed(left, right, axes, target)
    found = traced.find(GPU)
    assert (RULE in node_types(found)) is is_one
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(shape, np.float32) for shape in (left, right)]
    (new,), (old,) = (traced.run(g, *given) for g in (found.proto, traced.graph_def))
    np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)


def test_an_operand_of_unknown_shape_is_a_near_miss():
    traced = summed((4, 6, 8), (4, 6, 5), [0], [8, 5])
    (miss,) = dataclasses.replace(traced, shapes=lambda _: ()).find(GPU).misses
    assert "are not both known" in miss.why


def test_products_of_another_kind_are_left():
    traced = summed((4, 8, 6), (4, 6, 5), [0], [8, 5], transposed=False)
    assert RULE not in node_types(traced.find(GPU))
