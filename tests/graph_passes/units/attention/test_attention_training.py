"""Training steps of a masked attention block of Keras: one low stretch, and float32's training."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from cpu_units import bfloat16_errors_behind_products
from keras import layers
from traced_graphs import of_op
from training_steps import Step, trace

from graph_passes import PrecisionConfig, rewrite_graph_def

FLOAT = tf.float32.as_datatype_enum
CONFIGS = {
    "bfloat16": PrecisionConfig(target_dtype="bfloat16", device="CPU"),
    "float16": PrecisionConfig(target_dtype="float16", device="GPU"),
}
RULES = frozenset(("attention-mask", "softmax-gradient", "gelu", "unread-sum"))
LENGTH, WIDTH = 16, 32


def _block(*, approximate: bool, dropout: float) -> keras.Model:
    inputs = keras.Input((LENGTH, WIDTH))
    kept = keras.ops.any(inputs > -1.5, axis=-1)[:, None, :]
    attention = layers.MultiHeadAttention(4, 8, dropout=dropout)
    x = attention(inputs, inputs, attention_mask=kept, use_causal_mask=True)
    x = layers.Dense(64, activation=lambda z: keras.activations.gelu(z, approximate=approximate))(x)
    x = layers.Dense(WIDTH)(x)
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


BUILDERS = {
    "tanh": lambda: _block(approximate=True, dropout=0.0),
    "erf": lambda: _block(approximate=False, dropout=0.0),
    "dropout": lambda: _block(approximate=True, dropout=0.2),
}


@pytest.fixture(scope="module", params=[(name, batch) for name in BUILDERS for batch in (8, None)])
def step(request: pytest.FixtureRequest) -> Step:
    name, batch = request.param
    return trace(BUILDERS[name], batch)


def rewritten(step: Step, config: PrecisionConfig):
    result = rewrite_graph_def(step.graph_def, config, preserve=step.preserve, shapes=step.shapes)
    assert result.failure is None
    return result.graph_def


@pytest.mark.parametrize("dtype", CONFIGS)
def test_attention_and_activation_are_low_forward_and_back(step, dtype):
    config = CONFIGS[dtype]
    after = rewritten(step, config)
    ops = ("Softmax", "Tanh", "TanhGrad", "Erf", "Erfc", "Pow", "Square")
    inside = [node for op in ops for node in of_op(after, op)]
    assert {node.attr["T"].type for node in inside} == {config.target}
    large = LENGTH * LENGTH
    makers = {node.name: node.op for node in after.node}
    up = [cast for cast in of_op(after, "Cast") if cast.attr["SrcT"].type == config.target]
    scores = [cast for cast in up if _elements(step, cast.input[0]) == large]
    assert not scores, [makers[cast.input[0].partition(":")[0]] for cast in scores]


def _elements(step: Step, tensor: str) -> int:
    """The elements of the last two axes of a tensor, 0 where it has fewer than four axes."""
    shapes = step.shapes(tensor.partition(":")[0])
    shape = shapes[0] if shapes else None
    return (shape[-1] or 0) * (shape[-2] or 0) if shape and len(shape) == 4 else 0


@pytest.mark.parametrize("dtype", CONFIGS)
def test_casts_are_fewer_than_without_the_rules(step, dtype):
    config = CONFIGS[dtype]
    off = PrecisionConfig(
        target_dtype=config.target_dtype, device=config.device, disabled_rules=RULES
    )
    casts = [
        len([n for n in of_op(rewritten(step, c), "Cast") if FLOAT in _dtypes(n)])
        for c in (config, off)
    ]
    assert casts[0] < casts[1]


def _dtypes(cast) -> tuple[int, int]:
    return cast.attr["SrcT"].type, cast.attr["DstT"].type


@pytest.mark.parametrize("dtype", CONFIGS)
def test_it_trains_as_in_float32(step, dtype):
    expected, _ = step.train(step.graph_def, 8)
    found, weights = step.train(rewritten(step, CONFIGS[dtype]), 8)
    assert all(np.isfinite(weight).all() for weight in weights)
    tolerance = 0.04 * bfloat16_errors_behind_products() if dtype == "bfloat16" else 0.01
    # The last losses are a thousandth of the first: roundings decide their third digit.
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=1e-4 * expected[0])
