"""Graphs that nobody is about to run: what TensorFlow can tell of them beforehand."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tf_amp.hosts.function_shapes import static_shapes

if TYPE_CHECKING:
    from tensorflow.core.framework.graph_pb2 import GraphDef

    from graph_passes.view import Shapes

_log = logging.getLogger(__name__)


def infer_shapes(graph_def: GraphDef) -> Shapes | None:
    """Static shapes of a graph's tensors, as TensorFlow's shape functions find them.

    The graph is built once, in a graph of its own; nothing is run.

    Args:
        graph_def: the graph; it is not changed.

    Returns:
        A function from a node's name to the shapes of its outputs, None where TensorFlow cannot
        build the graph (an op that it does not know, say). The pass then goes without shapes.
    """
    import tensorflow as tf

    graph, copy = tf.Graph(), type(graph_def)()
    copy.CopyFrom(graph_def)  # the import writes the defaults of attrs into what it is given
    try:
        with graph.as_default():
            tf.graph_util.import_graph_def(copy, name="")
    except Exception as error:  # shapes are a help, not a need
        _log.debug("No shapes are known, because the graph cannot be built: %s", error)
        return None
    return static_shapes(graph)
