"""Graphs that TensorFlow's importer builds without Python objects of their nodes."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.core.framework import graph_pb2
from tensorflow.python.framework import function_def_to_graph

from tf_amp.hosts import offline
from tf_amp.hosts.c_api import CApiError
from tf_amp.hosts.function_shapes import static_shapes, traced_shapes
from tf_amp.hosts.imported_graph import ImportedGraph
from tf_amp.hosts.offline import InferredShapes

STEPS: tuple[Callable[[tf.Tensor], tf.Tensor], ...] = (
    tf.nn.relu,
    lambda x: tf.matmul(x, x, transpose_a=True),
    lambda x: tf.reduce_sum(x, [-1], keepdims=True),
    lambda x: tf.reshape(x, [-1, 1]),
    lambda x: tf.reshape(x, tf.concat([tf.shape(x)[:1], [-1]], 0)),
    lambda x: tf.pad(x, [[0, 1], [2, 0]]),
    lambda x: tf.raw_ops.SplitV(value=x, size_splits=[-1], axis=0, num_split=1)[0],
    lambda x: tf.concat([x, x], -1),
    # Cut again: squared four times, a shape has more values than TensorFlow can count: it aborts.
    lambda x: tf.tile(x, tf.shape(x)[-2:])[:7, :7],
    lambda x: tf.compat.v1.placeholder_with_default(x, [None, None]),
    lambda x: tf.boolean_mask(x, x[:, 0] > 0.0),
    lambda x: tf.py_function(lambda y: y, [x], tf.float32),
    lambda x: tf.while_loop(lambda y: True, lambda y: [tf.tanh(y)], [x], maximum_iterations=2)[0],
    lambda x: tf.cond(tf.size(x) > 2, lambda: x, lambda: x + 1.0),
    lambda x: tf.Variable(tf.zeros([2, 3], tf.float32)).read_value() + x[:1, :1],
    lambda x: x[:1, :1] + tf.constant(1.0, shape=[80, 90]),
)


def built(graph_def: graph_pb2.GraphDef) -> tf.Graph:
    """The graph with Python's objects."""
    copy = graph_pb2.GraphDef()
    copy.CopyFrom(graph_def)  # the import writes the defaults of attrs into what it gets
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(copy, name="")
    return graph


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(STEPS), min_size=1, max_size=7),
    st.sampled_from([(4, 6), (None, 6), (None, None), None]),
    st.booleans(),
)
def test_shapes_are_those_of_pythons_importer(
    steps: list[Callable[[tf.Tensor], tf.Tensor]], shape: tuple[int | None, ...] | None, noted: bool
):
    graph = tf.Graph()
    with graph.as_default():
        x = tf.ensure_shape(tf.compat.v1.placeholder(tf.float32, shape), [None, None])
        for step in steps:
            x = tf.ensure_shape(step(x), [None, None])
    graph_def = graph.as_graph_def(add_shapes=noted)
    before = graph_def.SerializeToString(deterministic=True)
    inferred = InferredShapes(graph_def)
    expected = built(graph_def)
    of_python = static_shapes(expected)
    for node in graph_def.node:
        assert inferred.of_graph(node.name) == of_python(node.name), node.name
    for function in graph_def.library.function:
        with expected.as_default():
            body = function_def_to_graph.function_def_to_graph(function)
        of_body = inferred.of_function(function.signature.name)
        of_python = traced_shapes(body, function)
        assert of_body is not None
        for node in body.as_graph_def().node:
            assert of_body(node.name) == of_python(node.name), node.name
    assert graph_def.SerializeToString(deterministic=True) == before


def test_what_tensorflow_refuses_is_told_in_its_words():
    graph_def = graph_pb2.GraphDef()
    graph_def.node.add(name="x", op="NoSuchOpAnywhere")
    with pytest.raises(CApiError, match="NoSuchOpAnywhere"):
        ImportedGraph(graph_def)


def test_attrs_that_were_asked_for_in_vain_do_no_harm():
    graph = tf.Graph()
    with graph.as_default():
        tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[3], name="v")
    graph_def = graph.as_graph_def()
    assert not graph_def.node[0].attr["no such attr"].s
    del graph_def.node[0].attr["container"]
    assert not graph_def.node[0].attr["container"].s
    assert ImportedGraph(graph_def).shapes("v") == ((),)
    assert "container" in graph_def.node[0].attr


def test_weights_of_a_frozen_model_are_not_handed_over(monkeypatch: pytest.MonkeyPatch):
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 90])
        tf.matmul(x, tf.constant(np.ones([90, 80], np.float32), name="w"), name="y")
    given: list[int] = []

    def build(graph_def: graph_pb2.GraphDef) -> ImportedGraph:
        given.append(graph_def.ByteSize())
        return ImportedGraph(graph_def)

    monkeypatch.setattr(offline, "ImportedGraph", build)
    inferred = InferredShapes(graph.as_graph_def())
    assert (*inferred.of_graph("w"), *inferred.of_graph("y")) == ((90, 80), (None, 80))
    assert given[0] < 90 * 80


def test_a_node_that_is_not_there_has_no_shapes():
    assert ImportedGraph(graph_pb2.GraphDef()).shapes("nobody") == ()


def test_shapes_can_be_asked_for_while_a_function_that_gives_them_is_kept():
    graph = tf.Graph()
    with graph.as_default():
        tf.compat.v1.placeholder(tf.float32, [None, 3], "x")
    shapes = ImportedGraph(graph.as_graph_def()).shapes
    gc.collect()
    assert shapes("x") == ((None, 3),)
