"""Gradients of repetitions: few terms take the dtype of what they sum, many stay float32."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from traced_graphs import Traced, node_types, of_op, trace

from graph_passes import PrecisionConfig
from graph_passes.units.reduction.tile_gradient import RULE

FLOAT = tf.float32.as_datatype_enum
CPU = PrecisionConfig(
    target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("cast-cut", "ones-product"))
)
GPU = dataclasses.replace(CPU, target_dtype="float16", device="GPU")
WITHOUT = dataclasses.replace(CPU, disabled_rules=CPU.disabled_rules | {RULE})
FILTER = (3, 3, 8, 8)


def between_convolutions(repeat, batch: int | None = None) -> Traced:
    """The gradient of images that are made by a convolution, repeated and read by another."""

    def step(x, w):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.conv2d(repeat(tf.nn.conv2d(x, w, 1, "SAME")), w, 1, "SAME")
        return tape.gradient(y, x, output_gradients=y)

    return trace(step, tf.TensorSpec((batch, 16, 16, 8)), tf.TensorSpec(FILTER))


def upsampling() -> layers.Layer:
    layer = layers.UpSampling2D()
    layer.build((None, 16, 16, 8))
    return layer


def dtypes_of_sums(traced: Traced, config: PrecisionConfig) -> list[int]:
    return [node.attr["T"].type for node in of_op(traced.rewrite(config).graph_def, "Sum")]


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("batch", [None, 2])
def test_the_gradient_of_an_upsampling_goes_low(config, batch):
    traced = between_convolutions(upsampling(), batch)
    assert node_types(traced.find(config)) == [RULE, RULE]
    assert dtypes_of_sums(traced, config) == [config.target, config.target]
    casts = of_op(traced.rewrite(config).graph_def, "Cast")
    ours = [cast for cast in casts if "AutoMixedPrecision" in cast.name]
    assert len(ours) == 3  # of the images, the filter and the result


def test_its_values_are_those_of_additions():
    traced = between_convolutions(upsampling())
    random = np.random.default_rng(0)
    given = [random.normal(size=size).astype(np.float32) for size in ((2, 16, 16, 8), FILTER)]
    found, by_float32_sums = (
        traced.run(traced.rewrite(config).graph_def, *given)[0] for config in (CPU, WITHOUT)
    )
    (wanted,) = traced.run(traced.graph_def, *given)
    assert np.linalg.norm(found - wanted) <= 1.2 * np.linalg.norm(by_float32_sums - wanted)


def tiled(*multiples: int):
    return lambda images: tf.tile(images, multiples)


@pytest.mark.parametrize(
    ("repeat", "is_low"),
    [
        pytest.param(tiled(1, 2, 2, 1), True, id="4 copies"),
        pytest.param(tiled(1, 5, 1, 1), False, id="5 copies"),
        pytest.param(tiled(1, 4, 4, 1), False, id="16 copies"),
        pytest.param(
            lambda images: tf.tile(images, tf.stack([1, tf.shape(images)[1] // 8, 1, 1])),
            False,
            id="not known",
        ),
    ],
)
def test_only_few_copies_go_low(repeat, is_low):
    (dtype,) = dtypes_of_sums(between_convolutions(repeat), CPU)
    assert (dtype == CPU.target) == is_low


def test_a_sum_that_a_model_takes_stays_float32():
    def in_pairs(images):
        apart = tf.reshape(tf.tile(images, (1, 2, 1, 1)), [-1, 2, 16, 16, 8])
        return tf.reduce_sum(apart, 1)

    traced = between_convolutions(in_pairs)
    dtypes = dict.fromkeys(dtypes_of_sums(traced, CPU))
    assert set(dtypes) == {FLOAT, CPU.target}


def test_the_rule_can_be_switched_off():
    assert set(dtypes_of_sums(between_convolutions(upsampling()), WITHOUT)) == {FLOAT}
