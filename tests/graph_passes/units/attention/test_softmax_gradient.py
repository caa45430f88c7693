"""Gradients of softmaxes: what goes low, what the sum inside adds up to, and what stays."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from cpu_units import bfloat16_product_error
from traced_graphs import Traced, node_types, of_op, trace

from graph_passes import PrecisionConfig
from graph_passes.policy.config import ListEdit

FLOAT = tf.float32.as_datatype_enum
# Graphs as small as these are not worth their Casts.
PAINTED = frozenset(("cast-cut",))
CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU", disabled_rules=PAINTED)
GPU = PrecisionConfig(target_dtype="float16", device="GPU", disabled_rules=PAINTED)
GPU_BFLOAT16 = PrecisionConfig(target_dtype="bfloat16", device="GPU", disabled_rules=PAINTED)
CONFIGS = {"CPU": CPU, "GPU": GPU, "GPU bfloat16": GPU_BFLOAT16}
SIZE = 128
SPEC = tf.TensorSpec((2, 4, SIZE, 16))


def weights_of(query: tf.Tensor) -> tf.Tensor:
    return tf.nn.softmax(tf.matmul(query, query, transpose_b=True))


def plain(weights: tf.Tensor) -> tf.Tensor:
    return weights


def with_dropout(weights: tf.Tensor) -> tf.Tensor:
    return tf.nn.experimental.stateless_dropout(weights, 0.2, seed=[1, 2])


def masked(weights: tf.Tensor) -> tf.Tensor:
    return tf.where(tf.linalg.band_part(tf.ones((SIZE, SIZE), tf.bool), -1, 0), weights, 0.0)


def multiplied(weights: tf.Tensor) -> tf.Tensor:
    """Rows that attend to nothing are set to zero, as Keras' Softmax does up to 3.11."""
    kept = tf.linalg.band_part(tf.ones((SIZE, SIZE), tf.bool), -1, 0)
    return weights * tf.cast(kept, weights.dtype)


BETWEEN = {"plain": plain, "dropout": with_dropout, "masked": masked, "multiplied": multiplied}


def attention_gradient(between):
    """Attention with itself as the value, and the gradient with regard to the query."""

    def gradient(query):
        with tf.GradientTape() as tape:
            tape.watch(query)
            result = tf.matmul(between(weights_of(query)), query)
        return tape.gradient(result, query, output_gradients=tf.ones_like(result) + query)

    return gradient


def low_sums(traced: Traced, config: PrecisionConfig) -> list[bool]:
    """For each sum over the last axis whether it is in the target dtype."""
    after = traced.rewrite(config).graph_def
    return [node.attr["T"].type != FLOAT for node in of_op(after, "Sum") if _keeps_axis(node)]


def _keeps_axis(node) -> bool:
    return node.attr["keep_dims"].b


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("config", CONFIGS)
def test_the_whole_gradient_goes_low(between, config):
    traced = trace(attention_gradient(BETWEEN[between]), SPEC)
    assert "softmax-gradient" in node_types(traced.find(CONFIGS[config]))
    after = traced.rewrite(CONFIGS[config]).graph_def
    (difference,) = [n for n in of_op(after, "Sub") if n.name.startswith("gradient_tape")]
    for node in (difference, *of_op(after, "Softmax")):
        assert node.attr["T"].type == CONFIGS[config].target
    if config == "CPU":
        assert True in low_sums(traced, CPU)
    else:
        ones = [node for node in of_op(after, "BatchMatMulV2") if "ones_product" in node.name]
        assert [node.attr["T"].type for node in ones] == [CONFIGS[config].target]


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("config", CONFIGS)
def test_the_gradient_is_that_of_float32(between, config):
    traced = trace(attention_gradient(BETWEEN[between]), SPEC)
    query = np.random.default_rng(0).normal(0, 0.5, (2, 4, SIZE, 16)).astype(np.float32)
    off = PrecisionConfig(
        target_dtype=CONFIGS[config].target_dtype,
        device=CONFIGS[config].device,
        # Behind a denied sum the softmax would be in float32.
        disabled_rules=PAINTED | {"softmax-gradient", "saturation"},
    )
    (exact,) = traced.run(traced.graph_def, query)
    spread = np.abs(exact).max()
    errors = [
        np.abs(traced.run(traced.rewrite(c).graph_def, query)[0] - exact).max() / spread
        for c in (CONFIGS[config], off)
    ]
    # Scores of up to 10 and weights are rounded either way; the sum must not make it much worse.
    is_bfloat16 = CONFIGS[config].target_dtype == "bfloat16"
    cut = bfloat16_product_error() if is_bfloat16 else 1
    unit = 2.0**-8 * cut if is_bfloat16 else 2.0**-11
    assert errors[0] < 12 * unit
    assert errors[0] < 1.75 * cut * errors[1] + unit


def test_long_rows_add_up_in_float32():
    """20,000 terms of which each is less than half a unit of the sum."""
    size = 20_000
    terms = np.full((2, 4, size), 1 / 64, np.float32)

    def product_gradient(logits):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            weights = tf.nn.softmax(logits)
            result = tf.matmul(weights, tf.ones((size, 1)))
        return tape.gradient(result, logits)

    traced = trace(product_gradient, tf.TensorSpec((2, 4, size)))
    for config in CONFIGS.values():
        assert "softmax-gradient" in node_types(traced.find(config))
        (found,) = traced.run(traced.rewrite(config).graph_def, terms)
        # The gradient is 0. A sum that stalls is 18 % short of 1 in float16; 1 / 20,000 is below
        # float16's normal numbers and rounded by 6e-4 of itself there.
        assert np.abs(found).max() < 0.01 / size


def test_the_replacement_computes_the_same_in_float32():
    traced = trace(attention_gradient(with_dropout), SPEC)
    query = np.random.default_rng(1).normal(0, 0.5, (2, 4, SIZE, 16)).astype(np.float32)
    (before,) = traced.run(traced.graph_def, query)
    (after,) = traced.run(traced.find(GPU).proto, query)
    np.testing.assert_allclose(after, before, atol=1e-5 * np.abs(before).max())


def test_an_unknown_batch():
    traced = trace(attention_gradient(plain), tf.TensorSpec((None, 4, SIZE, 16)))
    for config in CONFIGS.values():
        assert "softmax-gradient" in node_types(traced.find(config))


def test_an_unknown_last_axis_is_a_near_miss_on_a_gpu():
    traced = trace(attention_gradient(plain), tf.TensorSpec((2, 4, None, 16)))
    fusion = traced.find(GPU)
    assert "softmax-gradient" not in node_types(fusion)
    assert any("last axis is not known" in miss.why for miss in fusion.misses)
    assert "softmax-gradient" in node_types(traced.find(CPU))


def _loss_gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        probabilities = tf.nn.softmax(tf.matmul(x, tf.ones((16, 8))))
        loss = -tf.reduce_mean(tf.math.log(probabilities + 1e-7)[:, 0])
    return tape.gradient(loss, x)


def test_a_softmax_before_a_loss_keeps_its_gradient():
    traced = trace(_loss_gradient, tf.TensorSpec((32, 16)))
    for config in CONFIGS.values():
        fusion = traced.find(config)
        assert "softmax-gradient" not in node_types(fusion)
        assert any("from no matrix product" in miss.why for miss in fusion.misses)
        after = traced.rewrite(config).graph_def
        (total,) = [node for node in of_op(after, "Sum") if _keeps_axis(node)]
        assert total.attr["T"].type == FLOAT


def _read_twice(query):
    weights = weights_of(query)
    flowing = tf.matmul(query, query, transpose_b=True)
    total = tf.reduce_sum(flowing * weights, -1, keepdims=True)
    return tf.matmul((flowing - total) * weights, query), total + 1.0


def _other_axis(query):
    weights = weights_of(query)
    flowing = tf.matmul(query, query, transpose_b=True)
    total = tf.reduce_sum(flowing * weights, -2, keepdims=True)
    return tf.matmul((flowing - total) * weights, query)


def _other_factor(query):
    weights = weights_of(query)
    flowing = tf.matmul(query, query, transpose_b=True)
    total = tf.reduce_sum(flowing * weights, -1, keepdims=True)
    return tf.matmul((flowing - total) * flowing, query)


def _axis_not_kept(query):
    query = query[0, 0]
    weights = weights_of(query)
    flowing = tf.matmul(query, query, transpose_b=True)
    return tf.matmul((flowing - tf.reduce_sum(flowing * weights, -1)) * weights, query)


def _divided(query):
    weights = weights_of(query)
    flowing = tf.matmul(query, query, transpose_b=True)
    total = tf.reduce_sum(flowing * weights, -1, keepdims=True)
    return tf.matmul((flowing - total) / weights, query)


def _counted(query):
    weights = weights_of(query)
    flowing = tf.cast(tf.cast(query * 9.0, tf.int32), tf.float32)
    flowing = tf.concat([flowing] * 8, -1)
    total = tf.reduce_sum(flowing * weights, -1, keepdims=True)
    return tf.matmul((flowing - total) * weights, query)


MISSES = {
    "read twice": (_read_twice, "more than the gradient"),
    "another axis": (_other_axis, "last axis"),
    "another factor": (_other_factor, "not multiplied by the softmax"),
    "another op": (_divided, "not multiplied by the softmax"),
    "the axis is not kept": (_axis_not_kept, "does not keep its axis"),
    "whole numbers": (_counted, "from no matrix product"),
}


def _formula(query, combine, axis=-1):
    weights = weights_of(query)
    flowing = tf.matmul(query, query, transpose_b=True)
    total = tf.reduce_sum(flowing * weights, axis, keepdims=True)
    return tf.matmul(combine(flowing, total) * weights, query)


@pytest.mark.parametrize(
    ("function", "is_one"),
    [
        (lambda query: _formula(query, tf.subtract), True),
        (lambda query: _formula(query, tf.subtract, 3), True),
        (lambda query: _formula(query[0, 0], tf.subtract), True),
        (lambda query: _formula(query, tf.add), False),
        (lambda query: _formula(query, lambda flowing, total: total - flowing), False),
        (lambda query: tf.matmul(weights_of(query) ** 2, query), False),
        (lambda query: tf.matmul(tf.multiply(*[weights_of(query)] * 2), query), False),
    ],
)
def test_what_is_written_like_the_gradient(function, is_one):
    traced = trace(function, SPEC)
    query = np.random.default_rng(2).normal(0, 0.5, SPEC.shape).astype(np.float32)
    (exact,) = traced.run(traced.graph_def, query)
    for config in CONFIGS.values():
        found = traced.find(config)
        assert ("softmax-gradient" in node_types(found)) is is_one
        assert is_one or not found.misses
        (same,) = traced.run(found.proto, query)
        np.testing.assert_allclose(same, exact, atol=1e-5 * np.abs(exact).max())


def test_one_row_is_no_matrix_to_multiply_by_ones():
    def step(query):
        logits, flowing = (
            tf.reshape(tf.matmul(query[0, 0], tf.ones((16, 1))), [SIZE]) for _ in range(2)
        )
        weights = tf.nn.softmax(logits)
        total = tf.reduce_sum(flowing * weights, -1, keepdims=True)
        return tf.matmul(((flowing - total) * weights)[None], query[0, 0])

    traced = trace(step, SPEC)
    assert "softmax-gradient" in node_types(traced.find(CPU))
    (miss,) = traced.find(GPU).misses
    assert "no operand of rank 1" in miss.why


@pytest.mark.parametrize("name", MISSES)
def test_near_misses_are_told(name):
    function, why = MISSES[name]
    traced = trace(function, SPEC)
    for config in (CPU, GPU):
        fusion = traced.find(config)
        assert "softmax-gradient" not in node_types(fusion)
        assert any(why in miss.why for miss in fusion.misses)


def test_it_can_be_switched_off_and_follows_the_lists():
    traced = trace(attention_gradient(plain), SPEC)
    off = PrecisionConfig(disabled_rules=frozenset(("softmax-gradient",)))
    denied = ListEdit(list_name="deny", action="add", op="Softmax")
    for config in (off, PrecisionConfig(list_edits=(denied,)), PrecisionConfig(parity=True)):
        assert "softmax-gradient" not in node_types(traced.find(config))
