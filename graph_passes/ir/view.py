"""Makes the views of graphs: of a GraphDef and of the body of a function.

The same kind of view serves a GraphDef and the body of a FunctionDef, whose arguments and results
appear as pseudo-nodes of the ops `_Arg` and `_Retval`.
"""

from __future__ import annotations

import functools

from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2, types_pb2

from graph_passes.ir.graph_view import (
    ARGUMENT,
    RESULT,
    FunctionDevices,
    GraphView,
    Shapes,
    no_devices,
)
from graph_passes.ir.indexing import InvalidGraphError, NodeIndex
from graph_passes.ir.node_order import require_acyclic
from graph_passes.ops.node_types import NodeTypeTable


def view_graph(
    graph_def: graph_pb2.GraphDef,
    shapes: Shapes | None = None,
    node_types: NodeTypeTable | None = None,
) -> GraphView:
    """Indexes the main graph of a GraphDef.

    Args:
        graph_def: the graph.
        shapes: static shapes of its tensors, where they are known.
        node_types: those of graphs that belong to it; by default it has some of its own.

    Raises:
        InvalidGraphError: an input names no tensor, a name is used twice, a node has the wrong
            number of inputs, or nodes read each other in a circle.
    """
    if node_types is None:
        node_types = NodeTypeTable(
            {f.signature.name: f.signature for f in graph_def.library.function}.get
        )
    nodes = list(graph_def.node)  # a field makes each object anew
    return _indexed(nodes, node_types, shapes, is_function=False)


def view_function(
    function_def: function_pb2.FunctionDef,
    shapes: Shapes | None = None,
    node_types: NodeTypeTable | None = None,
    devices: FunctionDevices = no_devices,
) -> GraphView:
    """Indexes the body of a function.

    Args:
        function_def: the function.
        shapes: static shapes of the body's tensors, where they are known.
        node_types: those of graphs that belong to it; by default it calls no function as an op.
        devices: of the variables among its arguments; the pseudo-nodes have them.

    Raises:
        InvalidGraphError: as `view_graph`, or an argument stands for several tensors.
    """
    nodes: list[node_def_pb2.NodeDef] = []
    owner = graph_pb2.GraphDef()  # of the pseudo-nodes, which then share memory
    for arg in function_def.signature.input_arg:
        if arg.number_attr or arg.type_list_attr or arg.type_attr:
            raise InvalidGraphError(f"the argument {arg.name!r} has no fixed dtype")
        argument = _add_pseudo_node(owner, ARGUMENT, arg.type, arg.name)
        if arg.type == types_pb2.DT_RESOURCE:
            argument.device = devices(function_def.signature.name, arg.name)
        nodes.append(argument)
    nodes.extend(function_def.node_def)
    for arg in function_def.signature.output_arg:
        # A result may bear the name of a node or an argument; "/" keeps this name out of the way.
        result = function_def.ret.get(arg.name)  # [] would write to a map that lacks the key
        if not result:
            raise InvalidGraphError(f"nothing is named as the result {arg.name!r}")
        pseudo = _add_pseudo_node(owner, RESULT, arg.type, f"{arg.name}/{RESULT}")
        pseudo.input.append(result)
        nodes.append(pseudo)
    return _indexed(nodes, node_types or NodeTypeTable(), shapes, is_function=True)


def _indexed(
    nodes: list[node_def_pb2.NodeDef],
    node_types: NodeTypeTable,
    shapes: Shapes | None,
    *,
    is_function: bool,
) -> GraphView:
    index = NodeIndex(node_types, named_outputs=is_function)
    index.extend(nodes)
    view = GraphView(nodes, index, is_function=is_function, shapes=shapes)
    require_acyclic(view)  # whatever follows tensors back must come to an end
    return view


def view_body(
    graph: graph_pb2.GraphDef | function_pb2.FunctionDef,
    shapes: Shapes | None = None,
    node_types: NodeTypeTable | None = None,
    devices: FunctionDevices = no_devices,
) -> GraphView:
    """Indexes a graph or a function, as `view_graph` and `view_function`."""
    if isinstance(graph, graph_pb2.GraphDef):
        return view_graph(graph, shapes, node_types)
    return view_function(graph, shapes, node_types, devices)


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
