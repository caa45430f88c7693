"""Graphs of any size, for measuring how the pass grows."""

from __future__ import annotations

import numpy as np
from tensorflow.core.framework import graph_pb2, node_def_pb2, types_pb2
from tensorflow.python.framework import tensor_util

_SIZE = 64
# A block in this place of every so many has a softmax-like part, which must stay in float32.
_DENIED_EVERY = 4


def layered_graph(nodes: int) -> tuple[graph_pb2.GraphDef, list[str]]:
    """Builds a deep residual network with a float32 part in every fourth block.

    Each block is MatMul, BiasAdd, Relu, Mul and a residual AddV2 with variables of its own and
    their handles; every fourth one goes on with Exp, Sum and RealDiv.

    Args:
        nodes: about how many; the last block is finished.

    Returns:
        The graph and the name of its last node, which is to be fetched.
    """
    graph = graph_pb2.GraphDef()
    x = add_node(graph, "Placeholder", "x", dtype=types_pb2.DT_FLOAT).name
    graph.node[0].attr["shape"].shape.dim.add().size = _SIZE
    graph.node[0].attr["shape"].shape.dim.add().size = _SIZE
    half = add_constant(graph, "half", np.float32(0.5))
    axis = add_constant(graph, "axis", np.int32(1))
    number = 0
    while len(graph.node) < nodes:
        scope = f"network_1/residual_block_{number}_1/dense_1"
        x = _block(graph, scope, x, half)
        if number % _DENIED_EVERY == _DENIED_EVERY - 1:
            x = _normalization(graph, scope, x, axis)
        number += 1
    return graph, [x]


def _block(graph: graph_pb2.GraphDef, name: str, x: str, half: str) -> str:
    kernel = _variable(graph, f"{name}/kernel", (_SIZE, _SIZE))
    bias = _variable(graph, f"{name}/bias", (_SIZE,))
    y = add_float(graph, "MatMul", f"{name}/MatMul", x, kernel)
    graph.node[-1].attr["transpose_a"].b = False
    graph.node[-1].attr["transpose_b"].b = False
    y = add_float(graph, "BiasAdd", f"{name}/BiasAdd", y, bias)
    graph.node[-1].attr["data_format"].s = b"NHWC"
    y = add_float(graph, "Relu", f"{name}/Relu", y)
    y = add_float(graph, "Mul", f"{name}/Mul", y, half)
    return add_float(graph, "AddV2", f"{name}/AddV2", x, y)


def _normalization(graph: graph_pb2.GraphDef, name: str, x: str, axis: str) -> str:
    y = add_float(graph, "Exp", f"{name}/Exp", x)
    total = add_float(graph, "Sum", f"{name}/Sum", y, axis)
    graph.node[-1].attr["Tidx"].type = types_pb2.DT_INT32
    graph.node[-1].attr["keep_dims"].b = True
    return add_float(graph, "RealDiv", f"{name}/RealDiv", y, total)


def _variable(graph: graph_pb2.GraphDef, name: str, shape: tuple[int, ...]) -> str:
    handle = add_node(graph, "VarHandleOp", name, dtype=types_pb2.DT_FLOAT)
    # What tracing writes too; without it the nodes would be lighter than those of real graphs.
    handle.attr["shared_name"].s = name.encode()
    handle.attr["debug_name"].s = f"{name}/".encode()
    handle.attr["container"].s = b""
    handle.attr["allowed_devices"].list.SetInParent()
    for size in shape:
        handle.attr["shape"].shape.dim.add().size = size
    return add_node(graph, "ReadVariableOp", f"{name}/Read", name, dtype=types_pb2.DT_FLOAT).name


def add_constant(graph: graph_pb2.GraphDef, name: str, value: np.generic) -> str:
    tensor = tensor_util.make_tensor_proto(value)
    add_node(graph, "Const", name, dtype=tensor.dtype).attr["value"].tensor.CopyFrom(tensor)
    return name


def add_float(graph: graph_pb2.GraphDef, op: str, name: str, *inputs: str) -> str:
    return add_node(graph, op, name, *inputs, T=types_pb2.DT_FLOAT).name


def add_node(
    graph: graph_pb2.GraphDef, op: str, name: str, *inputs: str, **types: int
) -> node_def_pb2.NodeDef:
    node = graph.node.add(op=op, name=name)
    node.input.extend(inputs)
    for attr, dtype in types.items():
        node.attr[attr].type = dtype
    return node
