"""Static shapes of graphs that nobody runs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import tensorflow as tf

import tf_amp
from tf_amp.hosts.offline import InferredShapes


def products_summed_over_a_batch() -> tf.compat.v1.GraphDef:
    """The gradient of a weight that all members of a batch share."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 6, 8], "x")
        dy = tf.compat.v1.placeholder(tf.float32, [None, 6, 4], "dy")
        flowing = tf.raw_ops.ReluGrad(gradients=dy, features=dy)
        products = tf.matmul(x, flowing, transpose_a=True, name="products")
        total = tf.reduce_sum(products, [0], keepdims=True, name="total")
        tf.identity(tf.reshape(total, [8, 4]), "gradient")
    return graph.as_graph_def()


def test_shapes_have_none_for_an_open_dimension():
    shapes = InferredShapes(products_summed_over_a_batch())
    assert shapes.of_graph("products") == ((None, 8, 4),)
    assert shapes.of_graph("no such node") == ()


def test_a_graph_that_cannot_be_built_has_no_shapes_and_is_still_rewritten():
    graph_def = products_summed_over_a_batch()
    graph_def.node.add(name="custom", op="NoSuchOpAnywhere", input=["gradient"])
    assert InferredShapes(graph_def).graph is None
    assert InferredShapes(graph_def).of_graph("products") == ()
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


def called_products() -> tf.compat.v1.GraphDef:
    """A product behind a call of a function that makes one as well."""

    @tf.function(input_signature=[tf.TensorSpec([None, 8]), tf.TensorSpec([8, 4])])
    def product(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, w, name="products")

    @tf.function(input_signature=[tf.TensorSpec([None, 8]), tf.TensorSpec([8, 4])])
    def main(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.matmul(product(x, w), tf.transpose(w))

    return main.get_concrete_function().graph.as_graph_def(add_shapes=True)


def test_shapes_of_a_body_are_those_its_definition_notes_for_the_arguments():
    graph_def = called_products()
    shapes = InferredShapes(graph_def)
    (function,) = graph_def.library.function
    of_body = shapes.of_function(function.signature.name)
    assert of_body is not None
    assert of_body(function.signature.input_arg[0].name) == ((None, 8),)
    assert of_body("products") == ((None, 4),)


def test_a_body_that_cannot_be_built_has_no_shapes():
    graph_def = called_products()
    shapes = InferredShapes(graph_def)
    (function,) = shapes.library.values()
    function.node_def[0].op = "NoSuchOpAnywhere"
    assert shapes.of_function(function.signature.name) is None


def test_the_graph_is_not_changed():
    graph_def = products_summed_over_a_batch()
    for node in graph_def.node:
        node.attr.pop("transpose_a", None)
        node.attr.pop("keep_dims", None)
    before = graph_def.SerializeToString(deterministic=True)
    assert InferredShapes(graph_def).graph is not None
    assert graph_def.SerializeToString(deterministic=True) == before


def test_an_input_that_names_no_tensor_is_told_before_tensorflow_builds_the_graph(
    run_forked: Callable[..., subprocess.CompletedProcess[str]],
):
    """TensorFlow's importer dies of some of these."""
    done = run_forked(
        """
        import tf_amp
        from tensorflow.core.framework import graph_pb2, types_pb2

        for reference in ("x:2147483648", "x:-1", "x:1", "no_such_node"):
            graph_def = graph_pb2.GraphDef()
            x = graph_def.node.add(name="x", op="Placeholder")
            x.attr["dtype"].type = types_pb2.DT_FLOAT
            y = graph_def.node.add(name="y", op="MatMul", input=["x", reference])
            y.attr["T"].type = types_pb2.DT_FLOAT
            total = graph_def.node.add(name="s", op="Rsqrt", input=["y"])
            total.attr["T"].type = types_pb2.DT_FLOAT
            result = tf_amp.rewrite_graph_def(graph_def)
            print(result.failure.partition(":")[0], result.graph_def is graph_def)
        """
    )
    assert done.stdout.splitlines() == ["InvalidGraphError True"] * 4


def test_a_body_has_shapes_whose_colocations_name_no_node():
    """An embedding of tf_keras is placed beside its variable, by a name that tracing had for it."""
    table = tf.Variable(tf.ones([10, 4]), name="table")

    @tf.function(input_signature=[tf.TensorSpec([3], tf.int32)])
    def embed(x):
        found = tf.raw_ops.ResourceGather(resource=table.handle, indices=x, dtype=tf.float32)
        return tf.matmul(found, tf.ones([4, 5]), name="product")

    graph = tf.compat.v1.GraphDef()
    graph.library.function.add().CopyFrom(embed.get_concrete_function().function_def)
    (function,) = graph.library.function
    lookup = next(node for node in function.node_def if node.op == "ResourceGather")
    lookup.attr["_class"].list.s[:] = [b"loc:@lookup/2505"]
    of_body = InferredShapes(graph).of_function(function.signature.name)
    assert of_body is not None and of_body("product") == ((None, 5),)
    assert lookup.attr["_class"].list.s  # the graph itself keeps it
