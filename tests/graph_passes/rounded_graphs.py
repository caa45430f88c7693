"""Graphs in naive low precision: every float32 tensor is rounded as soon as it is made."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2, types_pb2
from tensorflow.python.framework import op_def_registry

# What is drawn at random decides, by comparisons, what a program does.
_KEPT = "Random"


def rounded(
    graph_def: graph_pb2.GraphDef, dtype: str, half: int | None = None
) -> graph_pb2.GraphDef:
    """A graph that computes in float32 and rounds the result of each op to another dtype.

    What is beyond the range of the dtype becomes its largest number, so that an error is measured
    where an overflow would end in NaN.

    Args:
        graph_def: a graph with its functions.
        dtype: "float16" or "bfloat16".
        half: a number that draws which half of the tensors is rounded; all are by default. What
            is zero in each precision, a difference of two equal values, is so no more.

    Returns:
        A new graph with the same names.
    """
    result = graph_pb2.GraphDef(versions=graph_def.versions)
    result.node.extend(_rounded(graph_def.node, dtype, _in_graph, half))
    for function in graph_def.library.function:
        made = result.library.function.add()
        made.CopyFrom(function)
        del made.node_def[:]
        made.node_def.extend(_rounded(function.node_def, dtype, _in_function, half))
        floats = _floats(function.node_def, _in_function, half)
        for name, source in function.ret.items():
            if source in floats:
                made.ret[name] = f"{_name(source)}:y:0"
    result.library.gradient.extend(graph_def.library.gradient)
    return result


Reference = Callable[[str, str, int, int], str]


def _in_graph(node: str, output: str, index: int, port: int) -> str:
    return f"{node}:{port}" if port else node


def _in_function(node: str, output: str, index: int, port: int) -> str:
    return f"{node}:{output}:{index}"


def _name(source: str) -> str:
    return f"rounded/{source.replace(':', '/port')}"


def _outputs(node: node_def_pb2.NodeDef) -> Iterator[tuple[str, int, int]]:
    """The outputs of a node: the name in its op, the index among those of that name, the dtype."""
    for arg in op_def_registry.get(node.op).output_arg:
        if arg.type_list_attr:
            types = list(node.attr[arg.type_list_attr].list.type)
        else:
            count = node.attr[arg.number_attr].i if arg.number_attr else 1
            types = [node.attr[arg.type_attr].type if arg.type_attr else arg.type] * count
        for index, dtype in enumerate(types):
            yield arg.name, index, dtype


def _floats(
    nodes: Sequence[node_def_pb2.NodeDef], reference: Reference, half: int | None
) -> set[str]:
    found = {
        reference(node.name, output, index, port)
        for node in nodes
        if _KEPT not in node.op
        for port, (output, index, dtype) in enumerate(_outputs(node))
        if dtype == types_pb2.DT_FLOAT
    }
    if half is None:
        return found
    return {source for source in found if zlib.crc32(f"{half} {source}".encode()) % 2}


def _rounded(
    nodes: Sequence[node_def_pb2.NodeDef], dtype: str, reference: Reference, half: int | None
) -> Iterator[node_def_pb2.NodeDef]:
    floats = _floats(nodes, reference, half)
    last = ":y:0" if reference is _in_function else ""
    for node in nodes:
        copy = node_def_pb2.NodeDef()
        copy.CopyFrom(node)
        for number, source in enumerate(node.input):
            if source in floats:
                copy.input[number] = f"{_name(source)}{last}"
        yield copy
    target, float32 = tf.as_dtype(dtype), tf.float32
    largest = np.float32(target.max)
    for sign, op in ((1, "max"), (-1, "min")):
        limit = node_def_pb2.NodeDef(name=f"rounded/{op}", op="Const")
        limit.attr["dtype"].type = float32.as_datatype_enum
        limit.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(sign * largest, float32))
        yield limit
    ends = [f"rounded/{op}" + (":output:0" if last else "") for op in ("max", "min")]
    for source in sorted(floats):
        name = _name(source)
        below = node_def_pb2.NodeDef(name=f"below/{name}", op="Minimum", input=[source, ends[0]])
        above = node_def_pb2.NodeDef(
            name=f"above/{name}", op="Maximum", input=[below.name + (last and ":z:0"), ends[1]]
        )
        for node in (below, above):
            node.attr["T"].type = float32.as_datatype_enum
            yield node
        down = node_def_pb2.NodeDef(
            name=f"down/{name}", op="Cast", input=[above.name + (last and ":z:0")]
        )
        up = node_def_pb2.NodeDef(name=name, op="Cast", input=[down.name + last])
        for node, (given, made) in ((down, (float32, target)), (up, (target, float32))):
            node.attr["SrcT"].type = given.as_datatype_enum
            node.attr["DstT"].type = made.as_datatype_enum
            yield node
