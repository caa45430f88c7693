"""Building graphs with TensorFlow 1's interface inside a TensorFlow 2 process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

v1 = tf.compat.v1


@contextlib.contextmanager
def v1_graph(*, functional_loops: bool = False) -> Iterator[tf.Graph]:
    """A fresh graph with a fixed seed, whose loops are Enter ... Exit or While ops."""
    enabled = control_flow_util.ENABLE_CONTROL_FLOW_V2
    control_flow_util.ENABLE_CONTROL_FLOW_V2 = functional_loops
    try:
        with tf.Graph().as_default() as graph:
            v1.set_random_seed(7)
            yield graph
    finally:
        control_flow_util.ENABLE_CONTROL_FLOW_V2 = enabled


def fetch(*tensors: tf.Tensor) -> tuple[str, ...]:
    """Adds an Identity after each tensor; their names."""
    return tuple(tf.identity(tensor).op.name for tensor in tensors)
