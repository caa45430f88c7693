from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework.types_pb2 import DT_HALF

import tf_amp
from tf_amp.loss_scale import gradients as g

INF, NAN = float("inf"), float("nan")


def slices(values: list[float], dtype: tf.DType = tf.float32) -> tf.IndexedSlices:
    return tf.IndexedSlices(
        tf.constant([[v] for v in values], dtype),
        tf.constant([1] * len(values)),
        tf.constant([4, 1]),
    )


# jmp's all_finite cases and torch's unscale_sparse cases.
@pytest.mark.parametrize(
    ("gradients", "finite"),
    [
        ([], True),
        ([None], True),
        ([tf.constant([0.0, 1.0])], True),
        ([tf.constant([0.0, INF])], False),
        ([tf.constant(-INF)], False),
        ([tf.constant(NAN), None], False),
        ([tf.constant(1.0), tf.constant([[NAN]])], False),
        ([slices([1.0, 2.0])], True),
        ([slices([1.0, INF])], False),
        ([slices([NAN])], False),
        ([slices([64000.0, 1.0], tf.float16)], True),
        ([slices([64000.0, 64000.0], tf.float16)], False),
        ([slices([64000.0, 64000.0])], True),
        ([tf.constant(1.0 + 2.0j)], True),
        ([tf.constant([complex(0.0, INF)]), tf.constant(1.0)], False),
        ([slices([complex(NAN, 0.0)], tf.complex64)], False),
    ],
)
@pytest.mark.parametrize("in_function", [False, True])
def test_all_finite(gradients: list[object], finite: bool, in_function: bool) -> None:
    check = tf.function(g.all_finite) if in_function else g.all_finite
    assert bool(check(gradients)) is finite
    code = g.culprit_code(gradients)
    assert (int(code) < 0) is finite


@pytest.mark.parametrize(
    ("gradients", "culprit"),
    [
        ([tf.constant(1.0), tf.constant([INF, 1.0])], ("b", "inf")),
        ([tf.constant([INF, NAN]), tf.constant(INF)], ("a", "NaN")),
        ([None, tf.constant(NAN)], ("b", "NaN")),
        ([tf.constant(1.0), None], None),
    ],
)
def test_culprit_is_the_first_that_is_not_finite(
    gradients: list[object], culprit: tuple[str, str] | None
) -> None:
    assert g.decode_culprit(int(g.culprit_code(gradients)), ["a", "b"]) == culprit


def test_unscale_keeps_sparse_gradients_sparse_and_none_none() -> None:
    dense, sparse, none = g.unscale([tf.constant(8.0), slices([4.0, 2.0]), None], tf.constant(4.0))
    assert float(dense) == 2.0
    assert isinstance(sparse, tf.IndexedSlices)
    np.testing.assert_array_equal(sparse.values, [[1.0], [0.5]])
    np.testing.assert_array_equal(sparse.indices, [1, 1])
    assert none is None


@pytest.mark.parametrize("scale", [1e38, 3.0e38, 2.0**127, 1e-30])
def test_unscale_is_exact_enough_at_extreme_scales(scale: float) -> None:
    """The reciprocal of a large scale is denormal; multiplying by it gives 0 on many machines."""
    (gradient,) = g.unscale([tf.constant(scale / 4, tf.float32)], tf.constant(scale))
    assert float(gradient) == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_a_low_precision_loss_is_scaled_in_float32(dtype: tf.DType) -> None:
    scaled = g.scale(tf.constant(60000.0, dtype), tf.constant(2.0**15))
    assert scaled.dtype == tf.float32
    assert np.isfinite(scaled.numpy())


def test_scale_takes_structures_callables_and_float64() -> None:
    factor = tf.constant(4.0)
    scaled = g.scale({"a": tf.constant(1.0), "b": [tf.constant(2.0, tf.float64)]}, factor)
    assert float(scaled["a"]) == 4.0
    assert scaled["b"][0].dtype == tf.float64
    assert float(g.scale(lambda: tf.constant(3.0), factor)()) == 12.0


def test_float16_gradients_are_divided_in_float32_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    g._warn_about_float16.cache_clear()
    for _ in range(3):
        (gradient,) = g.unscale([tf.constant(60000.0, tf.float16)], tf.constant(2.0**20))
    assert gradient.dtype == tf.float16
    assert float(gradient) == pytest.approx(60000 / 2**20, rel=1e-3)
    assert sum("float16" in message for message in caplog.messages) == 1


def test_select_gives_python_numbers_the_dtype_beside_them() -> None:
    with tf.Graph().as_default():
        assert g.select(tf.constant(True), 0, tf.constant(5, tf.int64)).dtype == tf.int64
        assert g.select(tf.constant(True), tf.constant(1.0), 2).dtype == tf.float32


def test_gradients_are_divided_in_float32_whoever_reads_them() -> None:
    """Joined, as what sums them over replicas joins them, they cost fewer casts in float16."""

    @tf.function
    def step(x: tf.Tensor, weights: list[tf.Tensor], factor: tf.Tensor) -> tf.Tensor:
        gradients = g.unscale([tf.matmul(x, weight) for weight in weights], factor)
        return tf.concat([tf.reshape(one, [-1]) for one in gradients], 0)

    x = tf.TensorSpec([64, 64])
    traced = step.get_concrete_function(x, [x] * 4, tf.TensorSpec([])).graph.as_graph_def()
    result = tf_amp.rewrite_graph_def(traced)
    low = {
        node.op for node in result.proto.node if any(a.type == DT_HALF for a in node.attr.values())
    }
    assert low == {"Cast", "MatMul"}
