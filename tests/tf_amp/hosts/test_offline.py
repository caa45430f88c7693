"""Static shapes of graphs that nobody runs."""

from __future__ import annotations

import tensorflow as tf

import tf_amp
from tf_amp.hosts.offline import infer_shapes


def products_summed_over_a_batch() -> tf.compat.v1.GraphDef:
    """The gradient of a weight that all members of a batch share."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 6, 8], "x")
        dy = tf.compat.v1.placeholder(tf.float32, [None, 6, 4], "dy")
        products = tf.matmul(x, dy, transpose_a=True, name="products")
        total = tf.reduce_sum(products, [0], name="total")
        tf.identity(tf.reshape(total, [8, 4]), "gradient")
    return graph.as_graph_def()


def test_shapes_have_none_for_an_open_dimension():
    shapes = infer_shapes(products_summed_over_a_batch())
    assert shapes is not None
    assert shapes("products") == ((None, 8, 4),)
    assert shapes("no such node") == ()


def test_a_graph_that_cannot_be_built_has_no_shapes_and_is_still_rewritten():
    graph_def = products_summed_over_a_batch()
    graph_def.node.add(name="custom", op="NoSuchOpAnywhere", input=["gradient"])
    assert infer_shapes(graph_def) is None
    result = tf_amp.rewrite_graph_def(
        graph_def, preserve=["gradient"], target_dtype="bfloat16", device="CPU"
    )
    assert result.failure is None
    assert result.report.converted_nodes > 0


def test_the_public_rewrite_uses_shapes_for_the_patterns_that_need_them():
    options = {"preserve": ["gradient"], "target_dtype": "bfloat16", "device": "CPU"}
    result = tf_amp.rewrite_graph_def(products_summed_over_a_batch(), **options)
    assert result.failure is None
    ops = {node.op for node in result.graph_def.node}
    assert "MatMul" in ops
    assert not ops & {"BatchMatMulV2", "Sum"}
    parity = tf_amp.rewrite_graph_def(products_summed_over_a_batch(), parity=True, **options)
    assert "BatchMatMulV2" in {node.op for node in parity.graph_def.node}


def test_the_graph_is_not_changed():
    graph_def = products_summed_over_a_batch()
    for node in graph_def.node:
        node.attr.pop("transpose_a", None)
        node.attr.pop("keep_dims", None)
    before = graph_def.SerializeToString(deterministic=True)
    assert infer_shapes(graph_def) is not None
    assert graph_def.SerializeToString(deterministic=True) == before
