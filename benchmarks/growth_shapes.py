"""Graphs of one shape and any size, each of a kind that sweeps or recursion would be slow on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from synthetic_graphs import add_constant, add_float, add_node
from tensorflow.core.framework import graph_pb2, node_def_pb2, types_pb2

_SIZE = 8
_FLOAT = types_pb2.DT_FLOAT

Shape = Callable[[graph_pb2.GraphDef, int, str], str]
"""Adds a part of some size to a graph, behind a product; returns what is to be fetched."""


def build(name: str, size: int) -> tuple[graph_pb2.GraphDef, list[str]]:
    """Builds a graph of one of `SHAPES`.

    Args:
        name: of the shape.
        size: how often the part that repeats does.

    Returns:
        The graph and the names of the nodes that are to be fetched.
    """
    graph = graph_pb2.GraphDef()
    x = add_node(graph, "Placeholder", "x", dtype=_FLOAT)
    for _ in range(2):
        x.attr["shape"].shape.dim.add().size = _SIZE
    last = SHAPES[name](graph, size, _product(graph, "first", "x"))
    add_node(graph, "Identity", "out", add_float(graph, "Exp", "exp", last), T=_FLOAT)
    return graph, ["out"]


def _product(graph: graph_pb2.GraphDef, name: str, x: str) -> str:
    return add_float(graph, "MatMul", name, x, x)


def _reverse_infer_chain(graph: graph_pb2.GraphDef, size: int, x: str) -> str:
    """Tanh behind Tanh, the last one first in the graph."""
    nodes = graph_pb2.GraphDef()
    for number in range(size):
        x = add_float(nodes, "Tanh", f"tanh_{number}", x)
    graph.node.extend(reversed(nodes.node))
    return x


def _clear_chain(graph: graph_pb2.GraphDef, size: int, x: str) -> str:
    """Reshape behind Reshape, of shapes that nobody knows."""
    shape = add_constant(graph, "shape", np.array([_SIZE, _SIZE], np.int32))
    for number in range(size):
        x = add_float(graph, "Reshape", f"reshape_{number}", x, shape)
        graph.node[-1].attr["Tshape"].type = types_pb2.DT_INT32
    return x


def _reverse_clear_chain(graph: graph_pb2.GraphDef, size: int, x: str) -> str:
    """The same, the last one first in the graph."""
    nodes = graph_pb2.GraphDef()
    x = _clear_chain(nodes, size, x)
    graph.node.extend(reversed(nodes.node))
    return x


def _denied_chain(graph: graph_pb2.GraphDef, size: int, x: str) -> str:
    """Exp, and behind it a chain of ops that stay float32 for it."""
    x = _clear_chain(graph, size, add_float(graph, "Exp", "denied", x))
    return add_float(graph, "Tanh", "end", x)


def _fan_out(graph: graph_pb2.GraphDef, size: int, x: str) -> str:
    """One tensor, taken by many infer ops behind a clear op, each read by a float32 one too."""
    x = _clear_chain(graph, 1, x)
    axis = add_constant(graph, "axis", np.int32(0))
    for number in range(size):
        y = add_float(graph, "Tanh", f"tanh_{number}", x)
        add_float(graph, "Cumsum", f"sum_{number}", y, axis)
        graph.node[-1].attr["Tidx"].type = types_pb2.DT_INT32
    return x


def _fan_in(graph: graph_pb2.GraphDef, size: int, x: str) -> str:
    """The gradients of one weight that many steps share, added up."""
    shape = add_constant(graph, "shape", np.array([_SIZE, _SIZE], np.int32))
    terms = []
    for number in range(size):
        y = add_float(
            graph, "Reshape", f"reshape_{number}", _product(graph, f"y_{number}", x), shape
        )
        graph.node[-1].attr["Tshape"].type = types_pb2.DT_INT32
        terms.append(y)
    x = add_float(graph, "AddN", "total", *terms)
    graph.node[-1].attr["N"].i = size
    return x


def _many_parts(graph: graph_pb2.GraphDef, size: int, x: str) -> str:
    """Many small graphs that nothing joins."""
    for number in range(size):
        add_node(graph, "Placeholder", f"x_{number}", dtype=_FLOAT)
        y = add_float(
            graph, "Relu", f"relu_{number}", _product(graph, f"y_{number}", f"x_{number}")
        )
        add_float(graph, "Exp", f"exp_{number}", _product(graph, f"z_{number}", y))
    return x


def _unrolled_list(graph: graph_pb2.GraphDef, size: int, x: str) -> str:
    """A loop over a tensor list, unrolled: each step reads the list and writes to it."""
    handle = _list(graph, "list")
    for number in range(size):
        handle = _set_item(graph, f"set_{number}", handle, x)
        x = _product(graph, f"y_{number}", _get_item(graph, f"get_{number}", handle))
    return x


def _stored_list(graph: graph_pb2.GraphDef, size: int, x: str) -> str:
    """A tensor list of which all items are written, and then all read."""
    handle = _list(graph, "list")
    for number in range(size):
        handle = _set_item(graph, f"set_{number}", handle, x)
    for number in range(size):
        x = _product(graph, f"y_{number}", _get_item(graph, f"get_{number}", handle))
    return x


def _many_lists(graph: graph_pb2.GraphDef, size: int, x: str) -> str:
    """A tensor list of its own in each step."""
    for number in range(size):
        handle = _set_item(graph, f"set_{number}", _list(graph, f"list_{number}"), x)
        x = _product(graph, f"y_{number}", _get_item(graph, f"get_{number}", handle))
    return x


def _list(graph: graph_pb2.GraphDef, name: str) -> str:
    sizes = [add_constant(graph, f"{name}/{what}", np.int32(_SIZE)) for what in ("shape", "length")]
    types = {"element_dtype": _FLOAT, "shape_type": types_pb2.DT_INT32}
    return add_node(graph, "TensorListReserve", name, *sizes, **types).name


def _set_item(graph: graph_pb2.GraphDef, name: str, handle: str, item: str) -> str:
    index = add_constant(graph, f"{name}/index", np.int32(0))
    return add_node(
        graph, "TensorListSetItem", name, handle, index, item, element_dtype=_FLOAT
    ).name


def _get_item(graph: graph_pb2.GraphDef, name: str, handle: str) -> str:
    index = add_constant(graph, f"{name}/index", np.int32(0))
    shape = add_constant(graph, f"{name}/shape", np.array([_SIZE, _SIZE], np.int32))
    return add_node(
        graph, "TensorListGetItem", name, handle, index, shape, element_dtype=_FLOAT
    ).name


def _nested_calls(graph: graph_pb2.GraphDef, size: int, x: str) -> str:
    """A function with a product calls one with a product, and so on."""
    for number in range(size):
        function = graph.library.function.add()
        function.signature.name = f"f_{number}"
        for arg, name in (
            (function.signature.input_arg.add(), "x"),
            (function.signature.output_arg.add(), "y"),
        ):
            arg.name, arg.type = name, _FLOAT
        last = "product:product:0"
        product = function.node_def.add(name="product", op="MatMul", input=["x", "x"])
        product.attr["T"].type = _FLOAT
        if number + 1 < size:
            _fill_call(function.node_def.add(name="call"), f"f_{number + 1}", last)
            last = "call:output:0"
        function.ret["y"] = last
    _fill_call(graph.node.add(name="call"), "f_0", x)
    return "call"


def _fill_call(node: node_def_pb2.NodeDef, function: str, argument: str) -> None:
    node.op = "PartitionedCall"
    node.input.append(argument)
    node.attr["Tin"].list.type.append(_FLOAT)
    node.attr["Tout"].list.type.append(_FLOAT)
    node.attr["f"].func.name = function


def _shared_constants(graph: graph_pb2.GraphDef, size: int, x: str) -> str:
    """A variance to normalize with, computed from constants: each sum is read twice."""
    return _normalized(graph, x, size, shared=True)


def _deep_constants(graph: graph_pb2.GraphDef, size: int, x: str) -> str:
    """A variance to normalize with, computed from constants one after another."""
    return _normalized(graph, x, size, shared=False)


def _normalized(graph: graph_pb2.GraphDef, x: str, size: int, *, shared: bool) -> str:
    one = add_constant(graph, "one", np.ones(_SIZE, np.float32))
    variance = one
    for number in range(size):
        variance = add_float(graph, "Mul", f"mul_{number}", variance, variance if shared else one)
    inverse = add_float(graph, "Rsqrt", "inverse", variance)
    scaled = add_float(graph, "Mul", "scaled", x, inverse)
    return add_float(graph, "AddV2", "moved", scaled, one)


def _nested_v1_loops(graph: graph_pb2.GraphDef, size: int, x: str) -> str:
    """A ref variable that enters loops in loops."""
    variable = add_node(graph, "VariableV2", "variable", dtype=_FLOAT)
    for _ in range(2):
        variable.attr["shape"].shape.dim.add().size = _SIZE
    weight = add_float(graph, "Identity", "variable/read", "variable")
    for number in range(size):
        weight = add_float(graph, "Enter", f"weight_{number}", weight)
        graph.node[-1].attr["frame_name"].s = f"frame_{number}".encode()
    for number in range(size):
        x = add_float(graph, "Enter", f"enter_{number}", x)
        graph.node[-1].attr["frame_name"].s = f"frame_{number}".encode()
    for number in range(size):
        x = add_float(graph, "Exit", f"exit_{number}", x)
    return x


def _clipped_gradients(graph: graph_pb2.GraphDef, size: int, x: str) -> str:
    """Gradients divided by the norm of all of them."""
    gradients = [_product(graph, f"gradient_{number}", x) for number in range(size)]
    squares = [add_float(graph, "L2Loss", f"{name}/square", name) for name in gradients]
    norm = add_float(graph, "AddN", "norm", *squares)
    graph.node[-1].attr["N"].i = size
    for name in gradients:
        add_float(graph, "Mul", f"{name}/clipped", name, norm)
    return x


def _fused_readers(graph: graph_pb2.GraphDef, size: int, x: str) -> str:
    """A product to which many biases are added."""
    bias = add_constant(graph, "bias", np.zeros(_SIZE, np.float32))
    y = _product(graph, "shared", x)
    for number in range(size):
        x = add_float(graph, "BiasAdd", f"sum_{number}", y, bias)
    return x


SHAPES: dict[str, Shape] = {
    "reverse infer chain": _reverse_infer_chain,
    "clear chain": _clear_chain,
    "reverse clear chain": _reverse_clear_chain,
    "denied chain": _denied_chain,
    "fan-out": _fan_out,
    "fan-in": _fan_in,
    "fused readers": _fused_readers,
    "clipped gradients": _clipped_gradients,
    "many parts": _many_parts,
    "unrolled list": _unrolled_list,
    "stored list": _stored_list,
    "many lists": _many_lists,
    "nested calls": _nested_calls,
    "nested v1 loops": _nested_v1_loops,
    "shared constants": _shared_constants,
    "deep constants": _deep_constants,
}
"""Name -> the shape."""
