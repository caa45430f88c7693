"""Copies of graphs that take their nodes from a view."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.descriptor import FieldDescriptor
from tensorflow.core.framework import function_pb2, graph_pb2

from graph_passes.view import GraphView

Proto = TypeVar("Proto", graph_pb2.GraphDef, function_pb2.FunctionDef)

_BODY = frozenset(("node", "node_def", "ret"))


def copy_graph(proto: Proto, view: GraphView) -> Proto:
    """A copy of a graph as a view has it.

    Args:
        proto: the GraphDef or FunctionDef that was indexed; it is not changed.
        view: the view of it, or one that was edited since: nodes and results come from there, all
            else from the graph.
    """
    copy = type(proto)()
    if not view.is_edited:
        copy.CopyFrom(proto)
        return copy
    for field, value in proto.ListFields():
        if field.name in _BODY:
            continue
        if field.type == FieldDescriptor.TYPE_MESSAGE or field.is_repeated:
            getattr(copy, field.name).MergeFrom(value)
        else:
            setattr(copy, field.name, value)
    if not isinstance(copy, function_pb2.FunctionDef):
        copy.node.extend(view.nodes)
        return copy
    arguments, results = len(copy.signature.input_arg), copy.signature.output_arg
    end = len(view.nodes) - len(results)
    copy.node_def.extend(view.nodes[arguments:end])
    for arg, node in zip(results, view.nodes[end:], strict=True):
        copy.ret[arg.name] = node.input[0]
    return copy
