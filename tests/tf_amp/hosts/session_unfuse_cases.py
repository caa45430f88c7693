"""What the remapper fuses on a CPU: with AMP off, with AMP on, with a pass that does nothing."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any
from unittest import mock

import numpy as np
import session_harness as harness
import tensorflow as tf
from session_peer_graphs import values

import graph_passes

v1 = tf.compat.v1
MATRIX_OPS = ("MatMul", "BatchMatMulV2", "Conv2D", "Conv3D", "DepthwiseConv2dNative")
ONE, ZERO = np.ones(8, np.float32), np.zeros(8, np.float32)


def build() -> tuple[dict[str, Any], dict[Any, Any]]:
    x = v1.placeholder(tf.float32, [8, 16])
    image = v1.placeholder(tf.float32, [2, 8, 8, 4])
    volume = v1.placeholder(tf.float32, [2, 4, 4, 4, 3])
    heads = v1.placeholder(tf.float32, [2, 4, 8, 16])
    weight, bias = tf.constant(values(1, 16, 16, scale=0.3)), tf.constant(values(2, 16))
    kernel, depth = (
        tf.constant(values(3, 3, 3, 4, 8, scale=0.2)),
        tf.constant(values(4, 3, 3, 4, 2)),
    )
    cube = tf.constant(values(5, 2, 2, 2, 3, 5))
    dense = tf.nn.bias_add(tf.matmul(x, weight), bias)
    conv = tf.nn.conv2d(image, kernel, 1, "SAME")
    frozen = v1.nn.fused_batch_norm(conv, ONE, ZERO, ZERO + 0.1, ONE * 2, is_training=False)[0]
    norm, mean, _ = v1.nn.fused_batch_norm(conv, ONE, ZERO, is_training=True)
    relu = tf.nn.relu(norm)
    scores = tf.matmul(heads, heads * 2.0, transpose_b=True)
    graphs = {
        "bias": dense,
        "relu": tf.nn.relu(dense),
        "tanh": tf.tanh(dense),
        "leaky": tf.nn.leaky_relu(dense, alpha=0.3),
        "gelu": tf.nn.gelu(dense),
        "gelu_approximate": tf.nn.gelu(dense, approximate=True),
        "conv_relu6": tf.nn.relu6(tf.nn.bias_add(conv, ONE)),
        "conv_batch_norm": tf.nn.relu(frozen),
        "batch_norm": relu,
        "batch_norm_statistics": [relu, mean],
        "batch_norm_residual": tf.nn.relu(norm + conv),
        "batch_norm_gradient": [relu, *tf.gradients(tf.reduce_sum(relu * norm), kernel)],
        "depthwise": tf.nn.relu(
            tf.nn.bias_add(tf.nn.depthwise_conv2d(image, depth, [1] * 4, "SAME"), ONE)
        ),
        "conv3d": tf.nn.elu(
            tf.nn.bias_add(tf.nn.conv3d(volume, cube, [1] * 5, "SAME"), np.ones(5, np.float32))
        ),
        "bias_of_rank_2": tf.nn.relu(tf.matmul(x, weight) + values(6, 1, 16)),
        "bias_of_rank_4": tf.nn.relu(conv + values(7, 1, 1, 1, 8)),
        "scores": scores * 0.125 + np.ones((2, 1, 8, 8), np.float32),
    }
    feed = {
        x: values(10, 8, 16),
        image: values(11, 2, 8, 8, 4),
        volume: values(12, 2, 4, 4, 4, 3),
        heads: values(13, 2, 4, 8, 16),
    }
    # The fetch is a node of its own, so that the fused one is not preserved.
    last = tf.nest.map_structure(lambda y: tf.cumsum(y, axis=0), graphs)
    return last, feed


def main() -> None:
    logging.getLogger("tf_amp").setLevel(logging.ERROR)
    untouched = mock.patch("graph_passes.rewrite_graph_def", unchanged)
    with tf.Graph().as_default():
        graphs, feed = build()
        for name, fetches in graphs.items():
            plain = harness.run_new_session(fetches, feed)
            with harness.amp():
                low = harness.run_new_session(fetches, feed)
                with untouched:
                    same = harness.run_new_session(fetches, feed)
            with harness.amp("float16"):
                half = harness.run_new_session(fetches, feed)
            harness.report(
                name,
                plain=plain.fused(),
                low=low.fused(),
                low_ops=low.dtypes(*MATRIX_OPS, *(f"Fused{op}" for op in MATRIX_OPS)),
                restored=same.fused() == plain.fused(),
                exact=harness.relative_error(plain.values, same.values) == 0.0,
                error=harness.relative_error(plain.values, low.values),
                half_error=harness.relative_error(plain.values, half.values),
                half_matrix_ops=half.dtypes("MatMul", "Conv2D", "FusedMatMul", "FusedConv2D"),
            )


_REWRITE = graph_passes.rewrite_graph_def


def unchanged(graph: Any, *args: Any, **kwargs: Any) -> Any:
    return dataclasses.replace(_REWRITE(graph, *args, **kwargs), proto=graph, changed=True)
