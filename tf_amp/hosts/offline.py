"""Graphs that nobody is about to run: what TensorFlow can tell of them beforehand."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import TYPE_CHECKING

from graph_passes.coloring.constant_folding import is_large
from graph_passes.ir.indexing import NodeIndex
from graph_passes.ops.node_types import COLOCATION, NodeTypeTable
from tf_amp.hosts.c_api import CApiError
from tf_amp.hosts.imported_graph import ImportedGraph

if TYPE_CHECKING:
    from tensorflow.core.framework.function_pb2 import FunctionDef
    from tensorflow.core.framework.graph_pb2 import GraphDef
    from tensorflow.core.framework.op_def_pb2 import OpDef

    from graph_passes.ir.graph_view import Shape, Shapes

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
    def graph(self) -> ImportedGraph | None:
        """The graph with its library, built by TensorFlow; None where it cannot be."""
        try:
            return ImportedGraph(_without_weights(self.graph_def))
        except (CApiError, ValueError) as error:  # shapes are a help, not a need
            _log.debug("No shapes are known, because the graph cannot be built: %s", error)
            return None

    def of_graph(self, node: str) -> tuple[Shape | None, ...]:
        """The shapes of the outputs of a node of the main graph, as `Shapes`."""
        return () if self.graph is None else self.graph.shapes(node)

    def of_function(self, name: str) -> Shapes | None:
        """The shapes in a function's body, which is built for that; None where it cannot be.

        A function knows the shapes of its arguments only where its definition notes them, as
        definitions made by tracing do.
        """
        if name not in self._bodies:
            body = None
            try:
                if self.graph is not None:
                    body = ImportedGraph(self._body(self.library[name]))
            except (CApiError, ValueError) as error:  # as above
                _log.debug("No shapes are known in the function %s: %s", name, error)
            self._bodies[name] = None if body is None else body.shapes
        return self._bodies[name]

    @functools.cached_property
    def _bodies(self) -> dict[str, Shapes | None]:
        """What `of_function` has told."""
        return {}

    @functools.cached_property
    def _signatures(self) -> dict[str, OpDef]:
        return {name: function.signature for name, function in self.library.items()}

    def _body(self, function: FunctionDef) -> GraphDef:
        """A function's body as a graph that has its arguments as placeholders.

        Raises:
            ValueError: an input names no tensor, or two nodes have the same name.
        """
        graph = type(self.graph_def)()
        graph.versions.CopyFrom(self.graph_def.versions)
        for number, arg in enumerate(function.signature.input_arg):
            if arg.handle_data:  # what is written to the variable has to fit it
                node = graph.node.add(name=arg.name, op="VarHandleOp")
                node.attr["dtype"].type = arg.handle_data[0].dtype
                node.attr["shape"].shape.CopyFrom(arg.handle_data[0].shape)
                continue
            node = graph.node.add(name=arg.name, op="Placeholder")
            node.attr["dtype"].type = arg.type
            node.attr["shape"].shape.unknown_rank = True
            noted = function.arg_attr.get(number)  # [] would write to a map that lacks the key
            if noted is not None and "_output_shapes" in noted.attr:
                for known in noted.attr["_output_shapes"].list.shape[:1]:
                    node.attr["shape"].shape.CopyFrom(known)
        graph.node.extend(function.node_def)
        # Of the functions TensorFlow needs those alone that are called as ops.
        called = self.library.keys() & {node.op for node in function.node_def}
        graph.library.function.extend(self.library[name] for name in called)
        index = NodeIndex(NodeTypeTable(self._signatures.get), named_outputs=True)
        nodes = list(graph.node)
        index.extend(nodes)
        for node in nodes:
            node.input[:] = [_flat(name, index) for name in node.input[:]]
            # It may name what was an argument's name while the function was traced: an embedding's.
            node.attr.pop(COLOCATION, None)
        return graph


def _without_weights(graph_def: GraphDef) -> GraphDef:
    """A graph of the same shapes, with placeholders for large constants; itself where it has none.

    No shape is told from values of so many elements, and a frozen model mostly consists of them.
    """
    large = {
        number: node.attr["value"].tensor
        for number, node in enumerate(graph_def.node)
        # [] would write to a map that lacks the key.
        if node.op == "Const" and "value" in node.attr and is_large(node.attr["value"].tensor)
    }
    if not large:
        return graph_def
    rest = type(graph_def)(versions=graph_def.versions, library=graph_def.library)
    for number, node in enumerate(graph_def.node):
        if number not in large:
            rest.node.add().CopyFrom(node)
            continue
        new = rest.node.add(name=node.name, op="Placeholder", input=node.input, device=node.device)
        new.attr["dtype"].CopyFrom(node.attr["dtype"])
        new.attr["shape"].shape.CopyFrom(large[number].tensor_shape)
    return rest


def _flat(tensor: str, index: NodeIndex) -> str:
    """The name that a graph has for an input of a node of a function's body."""
    if tensor[:1] == "^":
        return tensor
    name, port = index.split(tensor)
    number = index.numbers.get(name)
    if number is None or not 0 <= port < len(index.node_type(number).layout.out_slots):
        raise ValueError(f"the input {tensor!r} names no tensor")
    return f"{name}:{port}"
