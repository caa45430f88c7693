"""Makes the views of graphs: of a GraphDef, a joined graph, and the body of a function.

The same kind of view serves a GraphDef and the body of a FunctionDef, whose arguments and results
appear as pseudo-nodes of the ops `_Arg` and `_Retval`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2, op_def_pb2

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
    "view_joined",
]


def view_graph(graph_def: graph_pb2.GraphDef, shapes: Shapes | None = None) -> GraphView:
    """Indexes the main graph of a GraphDef.

    Args:
        graph_def: the graph.
        shapes: static shapes, where they are known.

    Raises:
        InvalidGraphError: an input names no tensor, a name is used twice, or a node has the wrong
            number of inputs.
    """
    functions = {f.signature.name: f.signature for f in graph_def.library.function}
    return _read(graph_def.node, functions, shapes)


def view_joined(
    graph_def: graph_pb2.GraphDef,
    functions: Mapping[str, op_def_pb2.OpDef],
    shapes: Shapes | None = None,
) -> GraphView:
    """Indexes a joined graph.

    Args:
        graph_def: the graph that `joining.join` made.
        functions: definitions of functions that are called as ops, and of the joined calls.
        shapes: static shapes, where they are known.

    Raises:
        InvalidGraphError: as `view_graph`.
    """
    return _read(graph_def.node, functions, shapes, named_outputs=True)


def view_function(
    function_def: function_pb2.FunctionDef,
    functions: Mapping[str, op_def_pb2.OpDef] | None = None,
    shapes: Shapes | None = None,
) -> GraphView:
    """Indexes the body of a function.

    Args:
        function_def: the function.
        functions: definitions of the functions that the body calls as ops.
        shapes: static shapes, where they are known.

    Raises:
        InvalidGraphError: as `view_graph`, or an argument stands for several tensors.
    """
    nodes: list[node_def_pb2.NodeDef] = []
    owner = graph_pb2.GraphDef()  # of the pseudo-nodes, which then share memory
    for arg in function_def.signature.input_arg:
        if arg.number_attr or arg.type_list_attr or arg.type_attr:
            raise InvalidGraphError(f"the argument {arg.name!r} has no fixed dtype")
        pseudo = owner.node.add(name=arg.name, op=ARGUMENT)
        pseudo.attr["T"].type = arg.type
        nodes.append(pseudo)
    nodes.extend(function_def.node_def)
    for arg in function_def.signature.output_arg:
        # A result may bear the name of a node or an argument; "/" keeps this name out of the way.
        result = function_def.ret.get(arg.name)  # [] would write to a map that lacks the key
        if not result:
            raise InvalidGraphError(f"nothing is named as the result {arg.name!r}")
        pseudo = owner.node.add(name=f"{arg.name}/{RESULT}", op=RESULT, input=[result])
        pseudo.attr["T"].type = arg.type
        nodes.append(pseudo)
    return _read(nodes, functions or {}, shapes, is_function=True, named_outputs=True)


def _read(
    nodes: Sequence[node_def_pb2.NodeDef],
    functions: Mapping[str, op_def_pb2.OpDef],
    shapes: Shapes | None,
    *,
    is_function: bool = False,
    named_outputs: bool = False,
) -> GraphView:
    nodes = nodes if isinstance(nodes, list) else list(nodes)  # a field makes each object anew
    index = NodeIndex(functions, named_outputs=named_outputs)
    index.extend(nodes)
    return GraphView(nodes, index, functions, is_function=is_function, shapes=shapes)
