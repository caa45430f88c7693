from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from decisions import reasons_of
from graph_text import graph
from parity import converted
from tensorflow.core.framework import tensor_pb2, types_pb2
from tensorflow.python.framework import tensor_util

from graph_passes import PrecisionConfig, rewrite_graph_def
from graph_passes.coloring.constant_range import is_out_of_range

UNWEIGHED = PrecisionConfig(disabled_rules=frozenset(("cast-cut", "result")))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, False),
        (1.0, False),
        (65504.0, False),
        (65536.0, True),
        (-1e9, True),
        (np.inf, False),  # infinite before, infinite after
        (-np.inf, False),
        (np.nan, False),
        (1e-8, True),
        (-1e-8, True),
        (1e-6, False),
        ([1.0, -1e9], True),
        ([1.0, 1e-9], True),
        (np.r_[np.ones(100), 1e-9], False),  # a weight near 0, not an epsilon
        (np.r_[np.ones(100), 1e9], True),
        ([np.inf, np.nan, 1.0], False),
        (np.full([20], 1e6), True),
        ([1.0, 65504.0], False),
        ([0.0, 2.0**-24], False),
        (np.r_[np.ones(15), 1e-9], True),
        ([-np.inf, 1.0], False),
        ([np.inf, 1e9], True),
        ([np.nan, -1e9], True),
    ],
)
def test_what_float16_cannot_hold(value: object, expected: bool) -> None:
    assert is_out_of_range(tf.make_tensor_proto(value, tf.float32)) == expected
    listed = tensor_pb2.TensorProto(float_val=np.atleast_1d(np.array(value, np.float32)).tolist())
    assert is_out_of_range(listed) == expected


def test_a_constant_that_lists_no_values_is_zero() -> None:
    assert not is_out_of_range(tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT))


@pytest.mark.parametrize(
    ("reader", "preserve"), [("Cholesky(big)", ()), ("Tanh(big)", ("reader",)), ("Tanh(x)", ())]
)
def test_what_stays_float32_in_any_case_denies_nothing_for_reading_it(
    reader: str, preserve: tuple[str, ...]
) -> None:
    before = graph(
        f"""
        x = Const(0.5, [8, 8])
        big = Const(1000000000.0, [8, 8])
        reader = {reader}
        allow1 = MatMul(x, x)
        infer1 = AddV2(allow1, reader)
        out = Identity(infer1)
        """
    )
    result = rewrite_graph_def(before, UNWEIGHED, preserve=("out", *preserve))
    assert "infer1" in converted(before, result.proto)


def test_a_constant_without_a_value_is_not_looked_at() -> None:
    before = graph("x = Const(0.5, [8, 8])\nallow1 = MatMul(x, x)\nout = Identity(allow1)")
    del before.node[0].attr["value"]
    result = rewrite_graph_def(before, PrecisionConfig(), preserve=("out",))
    assert result.failure is None
    assert "allow1" in converted(before, result.proto)


@pytest.mark.parametrize("constant", ["-1000000000.0", "0.00000001"])
def test_reader_of_the_constant_stays_float32_in_float16_alone(constant: str) -> None:
    before = graph(
        f"""
        x = Const(0.5, [8, 8])
        allow1 = MatMul(x, x)
        infer1 = AddV2(allow1, {constant})
        clear1 = Relu(infer1)
        infer2 = Tanh(clear1)
        allow2 = MatMul(infer2, infer2)
        out = Identity(allow2)
        """
    )
    result = rewrite_graph_def(before, PrecisionConfig(), preserve=("out",))
    low = converted(before, result.proto)
    assert {"allow1", "allow2"} <= low
    assert "infer1" not in low
    assert "constant that the target dtype cannot hold" in reasons_of(result.report)["infer1"]
    for config in (
        PrecisionConfig(disabled_rules=frozenset(["constant-range"])),
        PrecisionConfig(target_dtype="bfloat16"),
        PrecisionConfig(parity=True),
    ):
        after = rewrite_graph_def(before, config, preserve=("out",)).proto
        assert "infer1" in converted(before, after)


def test_masked_softmax_keeps_its_mask_finite() -> None:
    """The end of an attention mask: minus infinity in float16 would make a row of NaN."""
    before = graph(
        """
        x = Const(0.5, [8, 8])
        mask = Const(1.0, [8, 8])
        allow1 = MatMul(x, x)
        big = Mul(mask, -1000000000.0)
        masked = AddV2(allow1, big)
        weights = Softmax(masked)
        allow2 = MatMul(weights, x)
        out = Identity(allow2)
        """
    )
    without = PrecisionConfig(disabled_rules=frozenset(("attention-mask",)))
    after = rewrite_graph_def(before, without, preserve=("out",)).proto
    assert {"allow1", "allow2"} <= converted(before, after)
    assert {"big", "masked"}.isdisjoint(converted(before, after))
    after = rewrite_graph_def(before, PrecisionConfig(), preserve=("out",)).proto
    assert {"allow1", "masked", "allow2"} <= converted(before, after)
    (big,) = (node for node in after.node if node.name == "big")
    nodes = {node.name: node for node in after.node}
    (bound,) = (
        tensor_util.MakeNdarray(nodes[i].attr["value"].tensor) for i in big.input if i != "mask"
    )
    assert np.isfinite(bound.astype(np.float16)).all()
    assert bound < -1e4


def test_a_product_of_such_a_constant_is_told_to_stay_float32() -> None:
    before = graph("""
        x = Placeholder(dtype=float32, shape=[8, 8])
        y = MatMul(x, 100000.0)
        z = Relu(y)
        out = MatMul(z, x)
    """)
    result = rewrite_graph_def(before, PrecisionConfig(), preserve=("x",))
    assert converted(before, result.proto) == {"out", "z"}
    (kept,) = [remark for remark in result.remarks().remarks if remark.node == "y"]
    assert (kept.kind, kept.rule) == ("kept", "constant_range")


@pytest.mark.parametrize("way", ["", "Reshape", "Transpose"])
def test_what_is_made_of_a_product_of_integers_stays_float32_in_float16_alone(way: str) -> None:
    """As of a layer of int8: the sums in int32 are divided by the scales as floats."""
    with tf.Graph().as_default() as made:
        x = tf.compat.v1.placeholder(tf.float32, [64, 64], "x")
        whole = tf.matmul(*(tf.compat.v1.placeholder(tf.int32, [64, 64]) for _ in range(2)))
        moved = {"R": tf.reshape(whole, [64, 64]), "T": tf.transpose(whole)}.get(way[:1], whole)
        product = tf.matmul(x, x, name="product")
        scaled = tf.divide(tf.cast(moved, tf.float32), product, name="scaled")
        total = tf.add(scaled, product, name="total")
        tf.matmul(tf.nn.relu(total), x, name="out")
    before = made.as_graph_def()
    result = rewrite_graph_def(before, UNWEIGHED, preserve=("out",))
    low = converted(before, result.proto)
    assert "product" in low
    assert not {"scaled", "total"} & low
    assert "integer product" in reasons_of(result.report)["scaled"]
    config = replace(UNWEIGHED, target_dtype="bfloat16")
    assert "scaled" in converted(before, rewrite_graph_def(before, config, preserve=("out",)).proto)
