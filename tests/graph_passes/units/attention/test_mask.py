"""Masks before a softmax: they become ones that float16 holds, and mask the same."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from traced_graphs import Traced, node_types, of_op, trace

from graph_passes import PrecisionConfig

FLOAT = tf.float32.as_datatype_enum
HALF = tf.float16.as_datatype_enum
GPU = PrecisionConfig(target_dtype="float16", device="GPU")
OFF = PrecisionConfig(disabled_rules=frozenset(("attention-mask",)))
LOWEST = tf.float32.min
SCORES = tf.TensorSpec((3, 2, 6, 8))
MASK = tf.TensorSpec((3, 8), tf.int32)


def _columns(mask: tf.Tensor) -> tf.Tensor:
    return mask[:, None, None, :]


def _is_kept(mask: tf.Tensor) -> tf.Tensor:
    return _columns(mask) > 0


def _dropped(mask: tf.Tensor) -> tf.Tensor:
    return 1.0 - tf.cast(_columns(mask), tf.float32)


FUTURE = np.triu(np.full((6, 8), -1e9, np.float32), 3)
BAND = 1.0 - tf.linalg.band_part(np.ones((6, 8), np.float32), -1, 2).numpy()
FORMS = {
    "replaced": lambda s, m: tf.where(_is_kept(m), s, -1e9),
    "replaced by the lowest": lambda s, m: tf.where(_is_kept(m), s, LOWEST),
    "replaced, other branch": lambda s, m: tf.where(_columns(m) < 1, -1e9, s),
    "replaced by a filled tensor": lambda s, m: tf.where(_is_kept(m), s, tf.fill(s.shape, -1e9)),
    "replaced by a difference": lambda s, m: tf.where(_columns(m) < 1, s - 1e9, s),
    "added": lambda s, m: s + _dropped(m) * -1e9,
    "added, the lowest": lambda s, m: s + _dropped(m) * LOWEST,
    "added, from one side": lambda s, m: LOWEST * _dropped(m) + s,
    "subtracted": lambda s, m: s - 1e9 * tf.cast(_columns(m) < 1, tf.float32),
    "added, selected": lambda s, m: s + tf.where(_is_kept(m), 0.0, -1e9),
    "added, a constant": lambda s, m: s + FUTURE,
    "added twice": lambda s, m: s + _dropped(m) * -1e9 + BAND * -1e9,
    "added, one mask": lambda s, m: s + tf.maximum(_dropped(m), BAND) * -1e9,
    "added, picked behind the Cast": lambda s, m: (
        s + (1.0 - tf.cast(m, tf.float32)[:, None, None, :]) * -1e9
    ),
    "added, cast twice": lambda s, m: (
        s + tf.cast(tf.cast(_columns(m) < 1, tf.float64), tf.float32) * -1e9
    ),
    "added, a constant band": lambda s, m: (
        s + (1.0 - tf.linalg.band_part(tf.fill([6, 8], 1.0), -1, 2)) * -1e9
    ),
    "replaced by what is spread": lambda s, m: tf.where(
        _is_kept(m), s, tf.broadcast_to(-1e9, s.shape)
    ),
    "behind shape ops": lambda s, m: tf.reshape(tf.where(_is_kept(m), s, -1e9), [6, 6, 8]),
}


def attend(form: str, scores: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Attention weights between two matrix products."""
    scores = tf.matmul(scores, 2.0 * tf.eye(8))
    weights = tf.nn.softmax(FORMS[form](scores, mask))
    return tf.matmul(weights, tf.eye(8))


def inputs() -> tuple[np.ndarray, np.ndarray]:
    """Scores, and a mask that keeps all, some and none of the positions."""
    rng = np.random.default_rng(0)
    mask = np.array([[1] * 8, [1, 0, 1, 1, 0, 0, 1, 0], [0] * 8], np.int32)
    return rng.normal(0, 3, (3, 2, 6, 8)).astype(np.float32), mask


def trace_form(form: str) -> Traced:
    return trace(lambda scores, mask: attend(form, scores, mask), SCORES, MASK)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_a_mask_stays_float32(form):
    traced = trace_form(form)
    assert set(node_types(traced.find(GPU))) == {"attention-mask"}
    after = traced.rewrite(GPU).graph_def
    (softmax,) = of_op(after, "Softmax")
    assert softmax.attr["T"].type == HALF
    up = [cast.input[0] for cast in of_op(after, "Cast") if cast.attr["SrcT"].type == HALF]
    assert up == ["MatMul_1"]
    assert of_op(trace_form(form).rewrite(OFF).graph_def, "Softmax")[0].attr["T"].type == FLOAT


@pytest.mark.parametrize("form", FORMS)
def test_the_weights_are_those_of_float32(form):
    traced = trace_form(form)
    scores, mask = inputs()
    after = traced.rewrite(GPU).graph_def
    expected, found = (
        traced.run(graph_def, scores, mask)[0].reshape(scores.shape)
        for graph_def in (traced.graph_def, after)
    )
    assert np.isfinite(found).all()
    # Scores of up to 20 are rounded by 2^-7, and softmax turns that into as much of its result.
    kept = slice(0, 2)
    np.testing.assert_allclose(found[kept], expected[kept], rtol=2**-6, atol=2**-10)
    if "constant" not in form:
        assert (found[1, ..., mask[1] == 0] == 0).all()
    np.testing.assert_allclose(found.sum(-1), 1, atol=2**-8)
    if form.startswith("replaced") and "difference" not in form:
        np.testing.assert_array_equal(found[2], np.full_like(found[2], 1 / 8))


@pytest.mark.parametrize("form", ["replaced", "added"])
def test_the_softmax_itself_is_the_same_in_float32(form):
    traced = trace_form(form)
    scores, mask = inputs()
    (expected,) = traced.run(traced.graph_def, scores, mask)
    (found,) = traced.run(traced.find(GPU).proto, scores, mask)
    np.testing.assert_allclose(found[:2], expected[:2], rtol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("batch", [2, None])
def test_attention_layers_of_keras(dropout, batch):
    keras.utils.set_random_seed(3)
    layer = layers.MultiHeadAttention(2, 8, dropout=dropout)
    spec = tf.TensorSpec((batch, 6, 16))
    kept = tf.constant(np.tri(6, dtype=bool))
    layer(tf.zeros((1, 6, 16)), tf.zeros((1, 6, 16)))
    for options in ({"use_causal_mask": True}, {"attention_mask": kept[None]}):
        traced = trace(lambda x, o=options: layer(x, x, training=dropout > 0, **o), spec)
        # Captured variables cannot be fed here: the dtypes are what is asked for.
        graph_def = traced.rewrite(GPU).graph_def
        assert node_types(traced.find(GPU))[:1] == ["attention-mask"]
        assert {node.attr["T"].type for node in of_op(graph_def, "Softmax")} == {HALF}
        selects = [n for n in of_op(graph_def, "SelectV2") if n.attr["T"].type == FLOAT]
        assert not selects


def test_keras_attention_and_the_mask_it_subtracts():
    layer = layers.Attention()
    spec = tf.TensorSpec((3, 6, 8))
    kept = tf.TensorSpec((3, 6), tf.bool)
    traced = trace(lambda x, m: layer([x, x], mask=[m, m], use_causal_mask=True), spec, kept)
    assert node_types(traced.find(GPU)) == ["attention-mask"]
    (softmax,) = of_op(traced.rewrite(GPU).graph_def, "Softmax")
    assert softmax.attr["T"].type == HALF


def test_one_mask_for_many_layers():
    def network(scores, mask):
        adder = _dropped(mask) * -1e9
        for _ in range(3):
            weights = tf.nn.softmax(tf.matmul(scores, tf.eye(8)) + adder)
            scores = tf.matmul(weights, tf.eye(8))
        return scores

    traced = trace(network, SCORES, MASK)
    assert node_types(traced.find(GPU)) == ["attention-mask"]
    softmaxes = of_op(traced.rewrite(GPU).graph_def, "Softmax")
    assert [node.attr["T"].type for node in softmaxes] == [HALF] * 3


def test_a_mask_inside_a_function():
    @tf.function(autograph=False)
    def attention(scores, mask):
        return attend("replaced", scores, mask)

    traced = trace(lambda scores, mask: attention(scores, mask), SCORES, MASK)
    after = traced.rewrite(GPU).graph_def
    bodies = [node for function in after.library.function for node in function.node_def]
    softmaxes = [node for node in (*bodies, *after.node) if node.op == "Softmax"]
    assert HALF in {node.attr["T"].type for node in softmaxes}
    scores, mask = inputs()
    (expected,) = traced.run(traced.graph_def, scores, mask)
    (found,) = traced.run(after, scores, mask)
    np.testing.assert_allclose(found, expected, rtol=2**-6, atol=2**-10)


def _fetched(scores, mask):
    masked = tf.where(_is_kept(mask), tf.matmul(scores, tf.eye(8)), -1e9)
    return tf.matmul(tf.nn.softmax(masked), tf.eye(8)), masked


def _summed(scores, mask):
    masked = tf.where(_is_kept(mask), tf.matmul(scores, tf.eye(8)), -1e9)
    return tf.matmul(tf.nn.softmax(masked), tf.eye(8)), tf.reduce_max(masked)


def _one_of_two(scores, mask):
    adder = _dropped(mask) * -1e9
    first = tf.matmul(tf.nn.softmax(tf.matmul(scores, tf.eye(8)) + adder), tf.eye(8))
    return tf.matmul(first + adder, tf.eye(8))


def _any_factor(scores, mask):
    return tf.matmul(tf.nn.softmax(scores + scores * -1e9), tf.eye(8))


def _one_and_two(scores, mask):
    factor = 2.0 - tf.cast(_columns(mask), tf.float32)
    return tf.matmul(tf.nn.softmax(scores + factor * -1e9), tf.eye(8))


MISSES = {
    "fetched": (_fetched, "reads the masked scores as well"),
    "also read": (_summed, "reads the masked scores as well"),
    "another reader of the mask": (_one_of_two, "reads the masked scores as well"),
    "a factor that is no mask": (_any_factor, "zeros and ones"),
    "a factor of one and two": (_one_and_two, "zeros and ones"),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_misses_are_told(name):
    function, why = MISSES[name]
    traced = trace(function, SCORES, MASK)
    fusion = traced.find(GPU)
    assert node_types(fusion) == []
    assert any(why in miss.why for miss in fusion.misses)


def test_a_preserved_mask_stays():
    traced = trace_form("replaced")
    (select,) = of_op(traced.graph_def, "SelectV2")
    fusion = traced.find(GPU, [select.name])
    assert node_types(fusion) == []
    assert any("preserved" in miss.why for miss in fusion.misses)


@pytest.mark.parametrize("value", [-1e4, -3e4, -np.inf])
def test_what_float16_holds_is_left_alone(value):
    def network(scores, mask):
        masked = tf.where(_is_kept(mask), tf.matmul(scores, tf.eye(8)), value)
        return tf.matmul(tf.nn.softmax(masked), tf.eye(8))

    assert node_types(trace(network, SCORES, MASK).find(GPU)) == []


def test_bfloat16_holds_every_mask():
    config = PrecisionConfig(target_dtype="bfloat16", device="CPU")
    assert node_types(trace_form("replaced").find(config)) == []
    assert node_types(trace_form("replaced").find(OFF)) == []


@pytest.mark.parametrize(
    "other",
    [
        lambda s, m: tf.nn.softmax(tf.where(_is_kept(m), tf.cast(s, tf.float64), -1e9)),
        lambda s, m: tf.nn.softmax(s[..., :1] + tf.zeros((0,))),
    ],
    ids=["float64", "nothing"],
)
def test_what_is_no_mask_of_float32_is_left(other):
    traced = trace(lambda s, m: (tf.matmul(s, tf.eye(8)), other(s, m)), SCORES, MASK)
    assert node_types(traced.find(GPU)) == []


@pytest.mark.parametrize("is_first", [True, False])
def test_a_mask_by_itself_and_beside_another(is_first):
    def network(scores, mask):
        masked = tf.where(_is_kept(mask), tf.matmul(scores, tf.eye(8)), -1e9)
        both = [masked, masked + _dropped(mask) * -1e9]
        return [tf.matmul(tf.nn.softmax(one), tf.eye(8)) for one in both[:: 1 if is_first else -1]]

    traced = trace(network, SCORES, MASK)
    after = traced.rewrite(GPU).graph_def
    assert [node.attr["T"].type for node in of_op(after, "Softmax")] == [HALF] * 2
    given = inputs()
    pairs = zip(traced.run(after, *given), traced.run(traced.graph_def, *given), strict=True)
    for found, expected in pairs:
        np.testing.assert_allclose(found[:2], expected[:2], rtol=2**-6, atol=2**-10)


def test_what_a_mask_waited_for_its_reader_waits_for():
    def network(scores, mask):
        check = tf.debugging.check_numerics(scores, "scores", name="check")
        scores = tf.matmul(scores, tf.eye(8))
        with tf.control_dependencies([check]):
            lowest = tf.constant(-1e9)
        return tf.matmul(tf.nn.softmax(tf.where(_is_kept(mask), scores, lowest)), tf.eye(8))

    traced = trace(network, SCORES, MASK)
    copy = type(traced.graph_def).FromString(traced.graph_def.SerializeToString())
    (select,) = of_op(copy, "SelectV2")
    select.input.append("^MatMul")
    (select,) = of_op(dataclasses.replace(traced, graph_def=copy).find(GPU).proto, "SelectV2")
    assert select.input[2].endswith("mask_2")
    assert select.input[3:] == ["^MatMul", "^check"]
