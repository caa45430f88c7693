"""Copies of graphs that take their nodes from a view."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Sequence
from typing import TypeAlias, TypeVar

from google.protobuf.message import Message
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from graph_passes.ir.graph_view import GraphView

Graph: TypeAlias = graph_pb2.GraphDef | function_pb2.FunctionDef
Proto = TypeVar("Proto", graph_pb2.GraphDef, function_pb2.FunctionDef)

_BODY = frozenset(("node", "node_def", "ret"))
_VALUE = "value"


def nodes_of(graph: Graph) -> Sequence[node_def_pb2.NodeDef]:
    """The nodes of a graph or of a function's body."""
    return graph.node if isinstance(graph, graph_pb2.GraphDef) else graph.node_def  # type: ignore[return-value]


def copy_graph(proto: Proto, view: GraphView, without_value: Collection[int] = ()) -> Proto:
    """A copy of a graph as a view has it.

    Args:
        proto: the GraphDef or FunctionDef that was indexed; it is not changed.
        view: the view of it, or one that was edited since: nodes and results come from there, all
            else from the graph.
        without_value: numbers of constants whose value is left out, because it will be another.
    """
    copy = type(proto)()
    if not view.is_edited and not without_value:
        copy.CopyFrom(proto)
        return copy
    _copy_fields(proto, copy, _BODY)
    first, end = view.body.start, view.body.stop
    if isinstance(copy, function_pb2.FunctionDef):
        for arg, node in zip(copy.signature.output_arg, view.nodes[end:], strict=True):
            copy.ret[arg.name] = node.input[0]
        add = copy.node_def.add
    else:
        add = copy.node.add
    nodes = list(view.nodes[first:end])
    for number in without_value:
        nodes[number - first] = _without_value(nodes[number - first])
    # One by one, since a field extended by messages serializes and parses each.
    copies = itertools.starmap(add, itertools.repeat((), len(nodes)))
    collections.deque(map(node_def_pb2.NodeDef.CopyFrom, copies, nodes), maxlen=0)
    return copy


def _without_value(node: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
    new = node_def_pb2.NodeDef()
    _copy_fields(node, new, ("attr",))
    for name, value in node.attr.items():
        if name != _VALUE:
            new.attr[name].CopyFrom(value)
    return new


def _copy_fields(old: Message, new: Message, left_out: Collection[str]) -> None:
    for field, value in old.ListFields():
        if field.name in left_out:
            continue
        if isinstance(value, int | float | str | bytes):
            setattr(new, field.name, value)
        else:
            getattr(new, field.name).MergeFrom(value)
