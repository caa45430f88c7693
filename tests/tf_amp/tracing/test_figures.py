"""Counts over remarks."""

from __future__ import annotations

import tensorflow as tf

from graph_passes import PrecisionConfig, Remark, rewrite_graph_def
from tf_amp.tracing.figures import figures_of, of_nodes

CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU")


def test_a_node_with_two_type_attributes_counts_once_and_in_each_copy() -> None:
    one, other = (Remark(kind="kept", function="f", node="n", attr=attr) for attr in "TU")
    assert of_nodes([one, other, one, other]) == [other, other]


def test_what_a_function_does_counts_at_each_of_its_calls() -> None:
    @tf.function
    def block(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(x @ x)

    @tf.function
    def net(x: tf.Tensor) -> tf.Tensor:
        return block(block(block(x)))

    graph = net.get_concrete_function(tf.TensorSpec((8, 8))).graph.as_graph_def()
    result = rewrite_graph_def(graph, CPU, preserve=["Identity"])
    found = figures_of([result.remarks("net")])
    assert (found.products_low, found.products) == (3, 3)
