"""Replacing parts of a graph: new nodes in, tensors redirected, what nobody reads out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from graph_passes.op_registry import registered_op_type
from graph_passes.view import GraphView

Proto = TypeVar("Proto", graph_pb2.GraphDef, function_pb2.FunctionDef)


def output_name(view: GraphView, node: str, op: str, port: int) -> str:
    """The name of an output of a single-tensor-per-argument op, as readers in this graph write it.

    Raises:
        KeyError: the op type is not registered.
    """
    if not view.is_function:
        return node if port == 0 else f"{node}:{port}"
    op_type = registered_op_type(op)
    if op_type is None:
        raise KeyError(op)
    return f"{node}:{op_type.op_def.output_arg[port].name}:0"


def replace_tensors(
    proto: Proto,
    view: GraphView,
    *,
    redirect: Mapping[str, str],
    inputs: Mapping[str, Sequence[str]],
    new_nodes: Sequence[node_def_pb2.NodeDef],
    preserve: Collection[str],
) -> Proto:
    """A copy of a graph in which tensors come from elsewhere.

    Args:
        proto: the GraphDef or FunctionDef; it is not changed.
        view: its view.
        redirect: tensor -> the tensor that its readers shall read instead.
        inputs: node -> all its new inputs.
        new_nodes: nodes to add; their inputs are redirected too.
        preserve: nodes that must stay even if nothing reads them.

    Returns:
        The copy. Nodes that made redirected tensors or fed replaced inputs, and that nothing reads
        any more, are gone with all that only they read.
    """
    copy = type(proto)()
    copy.CopyFrom(proto)
    nodes = copy.node_def if view.is_function else copy.node  # type: ignore[union-attr]
    first = len(copy.signature.input_arg) if view.is_function else 0  # type: ignore[union-attr]
    orphans = {view.split(tensor)[0] for tensor in redirect}
    touched = {view.index[name] for name in inputs}
    for name in orphans:
        touched |= view.reading_nodes(view.index[name])
    # What a tensor is redirected to has readers that its view does not know of.
    kept = {*preserve, *(view.split(tensor)[0] for tensor in redirect.values())}
    for number in touched:
        if not 0 <= number - first < len(nodes):
            continue  # a result of the function, redirected below
        node: node_def_pb2.NodeDef = nodes[number - first]
        if node.name in inputs:
            orphans.update(view.split(name)[0] for name in node.input if name[0] != "^")
            controls: list[str] = [name for name in node.input if name[0] == "^"]
            del node.input[:]
            node.input.extend((*inputs[node.name], *controls))
            if node.op == "AddN":
                node.attr["N"].i = len(inputs[node.name])
        for port, name in enumerate(node.input):
            node.input[port] = redirect.get(name, name)
    nodes.extend(new_nodes)
    for node in nodes[len(nodes) - len(new_nodes) :]:
        for port, name in enumerate(node.input):
            node.input[port] = redirect.get(name, name)
    if view.is_function:
        for result, name in copy.ret.items():  # type: ignore[union-attr]
            copy.ret[result] = redirect.get(name, name)  # type: ignore[union-attr]
            kept.add(copy.ret[result].partition(":")[0])  # type: ignore[union-attr]
        kept.update(copy.control_ret.values())  # type: ignore[union-attr]
    dead = _Unread(view, nodes, first, len(new_nodes), kept).find(orphans)
    remaining = [node for node in nodes if node.name not in dead]
    survivors = type(proto)()
    target = survivors.node_def if view.is_function else survivors.node  # type: ignore[union-attr]
    target.extend(remaining)
    del nodes[:]
    nodes.MergeFrom(target)
    return copy


class _Unread:
    """Finds nodes that nothing reads in an edited graph."""

    def __init__(
        self,
        view: GraphView,
        nodes: Sequence[node_def_pb2.NodeDef],
        first: int,
        added: int,
        kept: Collection[str],
    ) -> None:
        self._view = view
        self._nodes = nodes
        self._first = first
        self._kept = kept
        self._added = nodes[len(nodes) - added :]
        self._of_added = {
            name.lstrip("^").partition(":")[0] for node in self._added for name in node.input
        }

    def find(self, orphans: Collection[str]) -> set[str]:
        """The orphans that nothing reads, and what only such nodes read, one after another."""
        dead: set[str] = set()
        pending = list(orphans)
        while pending:
            name = pending.pop()
            number = self._view.index.get(name)
            if number is None or name in dead or not self._may_go(number, name, dead):
                continue
            dead.add(name)
            pending.extend(n.lstrip("^").partition(":")[0] for n in self._node(number).input)
        return dead

    def _node(self, number: int) -> node_def_pb2.NodeDef:
        return self._nodes[number - self._first]

    def _may_go(self, number: int, name: str, dead: Collection[str]) -> bool:
        view = self._view
        if name in self._kept or name in self._of_added or view.op_types[number] is None:
            return False
        if not 0 <= number - self._first < len(self._nodes) - len(self._added):
            return False  # an argument of the function
        if _has_effect(self._node(number).op):
            return False
        readers = view.reading_nodes(number) | set(view.control_readers.get(name, ()))
        return not any(
            self._reads(reader, name) for reader in readers if view.nodes[reader].name not in dead
        )

    def _reads(self, reader: int, name: str) -> bool:
        """Whether a node still reads another, now that inputs are redirected."""
        if reader - self._first >= len(self._nodes) - len(self._added):
            return False  # a result of the function: what it reads is kept
        return any(n.lstrip("^").partition(":")[0] == name for n in self._node(reader).input)


def _has_effect(op: str) -> bool:
    op_type = registered_op_type(op)
    return op_type is None or op_type.op_def.is_stateful or op == "Placeholder"
