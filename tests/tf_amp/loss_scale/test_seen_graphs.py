"""Graphs are marked while they are built."""

from __future__ import annotations

import tensorflow as tf

from tf_amp.loss_scale.seen_graphs import is_seen, mark_seen


def test_a_function_is_marked_with_those_around_it() -> None:
    graphs = []

    def note(x: tf.Tensor, *, mark: bool) -> tf.Tensor:
        graphs.append(tf.compat.v1.get_default_graph())
        if mark:
            mark_seen()
        return x

    @tf.function
    def outer(x: tf.Tensor) -> tf.Tensor:
        graphs.append(tf.compat.v1.get_default_graph())
        tf.function(note)(x, mark=False)
        return tf.function(note)(x, mark=True)

    outer(tf.constant(1.0))
    assert list(map(is_seen, graphs)) == [True, False, True]
    assert not is_seen(graphs[0].outer_graph)


def test_v1_graphs() -> None:
    graph, other = tf.Graph(), tf.Graph()
    with graph.as_default():
        # A step in a branch is one of the graph.
        tf.cond(tf.constant(True), lambda: (mark_seen(), 0)[1], lambda: 0)
    assert (is_seen(graph), is_seen(other), is_seen(None)) == (True, False, False)


def test_nothing_is_marked_eagerly() -> None:
    mark_seen()
    assert not is_seen(tf.compat.v1.get_default_graph())
