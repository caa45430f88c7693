"""Makes the views of graphs: of a GraphDef and of the body of a function.

The same kind of view serves both; the arguments and results of a function appear as pseudo-nodes of
the ops `_Arg` and `_Retval`.
"""

from __future__ import annotations

from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2, types_pb2

from graph_passes.ir.copying import Graph
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


def view_body(
    graph: Graph,
    shapes: Shapes | None = None,
    node_types: NodeTypeTable | None = None,
    devices: FunctionDevices = no_devices,
) -> GraphView:
    """Indexes the main graph of a GraphDef, or the body of a function.

    Args:
        graph: the graph or the function.
        shapes: static shapes of its tensors, where they are known.
        node_types: those of graphs that belong to it; by default it has some of its own, and a
            function calls none as an op.
        devices: of the variables among a function's arguments; the pseudo-nodes have them.

    Raises:
        InvalidGraphError: an input names no tensor, a name is used twice, a node has the wrong
            number of inputs, nodes read each other in a circle, or an argument stands for several
            tensors.
    """
    is_function = isinstance(graph, function_pb2.FunctionDef)
    if node_types is None:
        library = () if is_function else graph.library.function
        node_types = NodeTypeTable({f.signature.name: f.signature for f in library}.get)
    # A field makes each object anew.
    nodes = _nodes_of_function(graph, devices) if is_function else list(graph.node)
    index = NodeIndex(node_types, named_outputs=is_function)
    index.extend(nodes)
    view = GraphView(nodes, index, is_function=is_function, shapes=shapes)
    require_acyclic(view)  # whatever follows tensors back must come to an end
    return view


def _nodes_of_function(
    function_def: function_pb2.FunctionDef, devices: FunctionDevices
) -> list[node_def_pb2.NodeDef]:
    """The nodes of a function's body between the pseudo-nodes."""
    nodes: list[node_def_pb2.NodeDef] = []
    owner = graph_pb2.GraphDef()  # of the pseudo-nodes, which then share memory
    for arg in function_def.signature.input_arg:
        if arg.number_attr or arg.type_list_attr or arg.type_attr:
            raise InvalidGraphError(f"the argument {arg.name!r} has no fixed dtype")
        argument = owner.node.add(op=ARGUMENT, name=arg.name)
        argument.attr["T"].type = arg.type
        if arg.type == types_pb2.DT_RESOURCE:
            argument.device = devices(function_def.signature.name, arg.name)
        nodes.append(argument)
    nodes.extend(function_def.node_def)
    for arg in function_def.signature.output_arg:
        # A result may bear the name of a node or an argument; "/" keeps this name out of the way.
        result = function_def.ret.get(arg.name)  # [] would write to a map that lacks the key
        if not result:
            raise InvalidGraphError(f"nothing is named as the result {arg.name!r}")
        nodes.append(owner.node.add(op=RESULT, name=f"{arg.name}/{RESULT}", input=[result]))
        nodes[-1].attr["T"].type = arg.type
    return nodes
