"""Graphs that nobody is about to run: what TensorFlow can tell of them beforehand."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from tf_amp.hosts.function_shapes import static_shapes, traced_shapes

if TYPE_CHECKING:
    from tensorflow.core.framework.function_pb2 import FunctionDef
    from tensorflow.core.framework.graph_pb2 import GraphDef

    from graph_passes.view import Shapes

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class InferredShapes:
    """The static shapes of a graph and of its functions, from TensorFlow's shape functions.

    Attributes:
        graph: the graph with its library, built by TensorFlow.
        library: function name -> definition.
    """

    graph: Any
    library: dict[str, FunctionDef]

    def of_graph(self, node: str) -> Any:
        """The shapes of the outputs of a node of the main graph, as `Shapes`."""
        return static_shapes(self.graph)(node)

    def of_function(self, name: str) -> Shapes | None:
        """The shapes in a function's body, which is built for that; None where it cannot be.

        A function knows the shapes of its arguments only where its definition notes them, as
        definitions made by tracing do.
        """
        from tensorflow.python.framework import function_def_to_graph

        definition = type(self.library[name])()
        definition.CopyFrom(self.library[name])
        noted = [
            definition.arg_attr[number].attr["_output_shapes"].list.shape
            for number in range(len(definition.signature.input_arg))
        ]
        shapes = [shape[0] if shape else None for shape in noted]
        try:
            with self.graph.as_default():
                body = function_def_to_graph.function_def_to_graph(definition, input_shapes=shapes)
        except Exception as error:  # as below
            _log.debug("No shapes are known in the function %s: %s", name, error)
            return None
        return traced_shapes(body, definition)


def infer_shapes(graph_def: GraphDef) -> InferredShapes | None:
    """Static shapes of a graph's tensors, as TensorFlow's shape functions find them.

    The graph is built once, in a graph of its own, and a function when its shapes are asked for;
    nothing is run.

    Args:
        graph_def: the graph; it is not changed.

    Returns:
        The shapes, None where TensorFlow cannot build the graph (an op that it does not know,
        say). The pass then goes without.
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
    library = {function.signature.name: function for function in graph_def.library.function}
    return InferredShapes(graph, library)
