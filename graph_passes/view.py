"""Makes the views of graphs: of a GraphDef and of the body of a function.

The same kind of view serves a GraphDef and the body of a FunctionDef, whose arguments and results
appear as pseudo-nodes of the ops `_Arg` and `_Retval`.
"""

from __future__ import annotations

import functools

from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from graph_passes.graph_view import (
    ARGUMENT,
    FLOAT,
    JOINED_ARGUMENT,
    RESULT,
    FunctionShapes,
    GraphView,
    Shape,
    Shapes,
    extend_shapes,
    no_shapes,
)
from graph_passes.indexing import InvalidGraphError, NodeIndex
from graph_passes.kinds import KindTable
from graph_passes.vertices import OPAQUE

__all__ = [
    "ARGUMENT",
    "FLOAT",
    "JOINED_ARGUMENT",
    "OPAQUE",
    "RESULT",
    "FunctionShapes",
    "GraphView",
    "InvalidGraphError",
    "Shape",
    "Shapes",
    "extend_shapes",
    "no_shapes",
    "view_function",
    "view_graph",
]


def view_graph(
    graph_def: graph_pb2.GraphDef, shapes: Shapes | None = None, kinds: KindTable | None = None
) -> GraphView:
    """Indexes the main graph of a GraphDef.

    Args:
        graph_def: the graph.
        shapes: static shapes, where they are known.
        kinds: the kinds of graphs that belong to it; by default it has kinds of its own.

    Raises:
        InvalidGraphError: an input names no tensor, a name is used twice, or a node has the wrong
            number of inputs.
    """
    if kinds is None:
        kinds = KindTable({f.signature.name: f.signature for f in graph_def.library.function}.get)
    index = NodeIndex(kinds)
    nodes = list(graph_def.node)  # a field makes each object anew
    index.extend(nodes)
    return GraphView(nodes, index, is_function=False, shapes=shapes)


def view_function(
    function_def: function_pb2.FunctionDef,
    shapes: Shapes | None = None,
    kinds: KindTable | None = None,
) -> GraphView:
    """Indexes the body of a function.

    Args:
        function_def: the function.
        shapes: static shapes of the body's tensors, where they are known.
        kinds: the kinds of graphs that belong to it; by default it calls no function as an op.

    Raises:
        InvalidGraphError: as `view_graph`, or an argument stands for several tensors.
    """
    nodes: list[node_def_pb2.NodeDef] = []
    owner = graph_pb2.GraphDef()  # of the pseudo-nodes, which then share memory
    for arg in function_def.signature.input_arg:
        if arg.number_attr or arg.type_list_attr or arg.type_attr:
            raise InvalidGraphError(f"the argument {arg.name!r} has no fixed dtype")
        nodes.append(_add_pseudo_node(owner, ARGUMENT, arg.type, arg.name))
    nodes.extend(function_def.node_def)
    for arg in function_def.signature.output_arg:
        # A result may bear the name of a node or an argument; "/" keeps this name out of the way.
        result = function_def.ret.get(arg.name)  # [] would write to a map that lacks the key
        if not result:
            raise InvalidGraphError(f"nothing is named as the result {arg.name!r}")
        pseudo = _add_pseudo_node(owner, RESULT, arg.type, f"{arg.name}/{RESULT}")
        pseudo.input.append(result)
        nodes.append(pseudo)
    index = NodeIndex(kinds or KindTable(lambda _: None), named_outputs=True)
    index.extend(nodes)
    return GraphView(nodes, index, is_function=True, shapes=shapes)


def _add_pseudo_node(
    owner: graph_pb2.GraphDef, op: str, dtype: int, name: str
) -> node_def_pb2.NodeDef:
    node = owner.node.add()
    node.CopyFrom(_blank_pseudo_node(op, dtype))
    node.name = name
    return node


@functools.cache
def _blank_pseudo_node(op: str, dtype: int) -> node_def_pb2.NodeDef:
    """A node to be copied: to set its attr anew takes twice as long."""
    node = node_def_pb2.NodeDef(op=op)
    node.attr["T"].type = dtype
    return node
