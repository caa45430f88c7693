"""Graphs that nobody is about to run: what TensorFlow can tell of them beforehand."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import TYPE_CHECKING, Any

from tf_amp.hosts.function_shapes import static_shapes, traced_shapes

if TYPE_CHECKING:
    from tensorflow.core.framework.function_pb2 import FunctionDef
    from tensorflow.core.framework.graph_pb2 import GraphDef

    from graph_passes.ir.view import Shapes

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class InferredShapes:
    """The static shapes of a graph and of its functions, from TensorFlow's shape functions.

    TensorFlow builds the graph, in a graph of its own, when a shape is asked for first: the pass
    has checked by then that the graph is valid, which TensorFlow's importer may not survive where
    it is not. Nothing is run. Where TensorFlow cannot build it (an op that it does not know, say),
    no shapes are known.

    Attributes:
        graph_def: the graph; it is not changed.
    """

    graph_def: GraphDef

    @functools.cached_property
    def library(self) -> dict[str, FunctionDef]:
        """Function name -> definition."""
        return {function.signature.name: function for function in self.graph_def.library.function}

    @functools.cached_property
    def graph(self) -> Any:
        """The graph with its library, built by TensorFlow; None where it cannot be."""
        import tensorflow as tf

        graph, copy = tf.Graph(), type(self.graph_def)()
        copy.CopyFrom(self.graph_def)  # the import writes the defaults of attrs into what it gets
        try:
            with graph.as_default():
                tf.graph_util.import_graph_def(copy, name="")
        except Exception as error:  # shapes are a help, not a need
            _log.debug("No shapes are known, because the graph cannot be built: %s", error)
            return None
        return graph

    def of_graph(self, node: str) -> Any:
        """The shapes of the outputs of a node of the main graph, as `Shapes`."""
        return self._of_main(node)

    @functools.cached_property
    def _of_main(self) -> Shapes:
        return (lambda _: ()) if self.graph is None else static_shapes(self.graph)

    def of_function(self, name: str) -> Shapes | None:
        """The shapes in a function's body, which is built for that; None where it cannot be.

        A function knows the shapes of its arguments only where its definition notes them, as
        definitions made by tracing do.
        """
        from tensorflow.python.framework import function_def_to_graph

        if self.graph is None:
            return None
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
        except Exception as error:  # as above
            _log.debug("No shapes are known in the function %s: %s", name, error)
            return None
        return traced_shapes(body, definition)
