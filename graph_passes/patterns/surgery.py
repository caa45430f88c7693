"""Replacing parts of a graph: new nodes in, tensors redirected, what nobody reads out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from tensorflow.core.framework import graph_pb2, node_def_pb2

from graph_passes.eligibility import node_name
from graph_passes.kinds import Kind
from graph_passes.op_registry import registered_op_type
from graph_passes.view import ARGUMENT, RESULT, GraphView, Shape


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
    view: GraphView,
    *,
    redirect: Mapping[str, str],
    inputs: Mapping[str, Sequence[str]],
    new_nodes: Sequence[node_def_pb2.NodeDef],
    preserve: Collection[str],
    shapes: Mapping[str, Sequence[Shape | None]],
) -> GraphView:
    """A graph in which tensors come from elsewhere.

    Args:
        view: the graph; it is not changed.
        redirect: tensor -> the tensor that its readers shall read instead.
        inputs: node -> all its new inputs.
        new_nodes: nodes to add; their inputs are redirected too.
        preserve: nodes that must stay even if nothing reads them.
        shapes: name of a new node -> static shapes of its outputs.

    Returns:
        The view of the new graph, which shares with the old one the nodes that are as they were.
        Nodes that made redirected tensors or fed replaced inputs, and that nothing reads any more,
        are gone with all that only they read.

    Raises:
        InvalidGraphError: a name is used twice, or an input names no tensor.
    """
    orphans = {view.split(tensor)[0] for tensor in redirect}
    touched = {view.index[name] for name in inputs}
    for name in orphans:
        touched.update(view.reading_nodes(view.index[name]))
    # What a tensor is redirected to has readers that its view does not know of.
    kept = {*preserve, *(view.split(tensor)[0] for tensor in redirect.values())}
    changed: dict[int, node_def_pb2.NodeDef] = {}
    owner = graph_pb2.GraphDef()  # messages of one owner share memory
    for number in touched:
        node = view.nodes[number]
        read = node.input[:]
        given = inputs.get(node.name)
        if given is not None:
            orphans.update(node_name(name) for name in read if name[0] != "^")
            read = [*given, *(name for name in read if name[0] == "^")]
        elif redirect.keys().isdisjoint(read):
            continue
        new = changed[number] = owner.node.add()
        new.CopyFrom(node)
        new.input[:] = read
        if given is not None and node.op == "AddN":
            new.attr["N"].i = len(given)
    for node in (*changed.values(), *new_nodes):
        read = node.input[:]
        if not redirect.keys().isdisjoint(read):
            node.input[:] = [redirect.get(name, name) for name in read]
    dead = _Unread(view, changed, new_nodes, kept).find(orphans)
    nodes, moved, anew = _assemble(view, changed, new_nodes, dead)
    return view.edited(nodes, moved, anew, shapes)


def _controls(node: node_def_pb2.NodeDef) -> list[str]:
    return [name for name in node.input[:] if name[0] == "^"]


def _assemble(
    view: GraphView,
    changed: Mapping[int, node_def_pb2.NodeDef],
    new_nodes: Sequence[node_def_pb2.NodeDef],
    dead: Collection[int],
) -> tuple[list[node_def_pb2.NodeDef], np.ndarray, list[int]]:
    """What is left of a graph, with its changed and its new nodes, as `GraphView.edited` takes it.

    New nodes stand behind the others, but before the results of a function.
    """
    alive = np.ones(len(view.nodes), bool)
    alive[list(dead)] = False
    moved = np.where(alive, np.cumsum(alive, dtype=np.int32) - 1, -1)
    end = len(view.nodes) - len(view.of_op(RESULT) if view.is_function else ())
    moved[end:] += len(new_nodes)
    first_new = int(np.count_nonzero(alive[:end]))
    nodes = [changed.get(number, node) for number, node in enumerate(view.nodes) if alive[number]]
    nodes[first_new:first_new] = new_nodes
    anew = {int(moved[number]) for number in changed} - {-1}
    anew.update(range(first_new, first_new + len(new_nodes)))
    return nodes, moved, sorted(anew)


class _Unread:
    """Finds nodes that nothing reads in an edited graph.

    Args:
        view: the graph before the edits.
        changed: number of a node -> the node as it is now.
        new_nodes: the nodes added.
        kept: names of nodes that must stay.
    """

    def __init__(
        self,
        view: GraphView,
        changed: Mapping[int, node_def_pb2.NodeDef],
        new_nodes: Sequence[node_def_pb2.NodeDef],
        kept: Collection[str],
    ) -> None:
        self._view = view
        self._changed = changed
        self._kept = {view.index[name] for name in kept if name in view.index}
        self._may_go = [self._has_no_effect(kind) for kind in view.kinds]
        makers = np.asarray(view.maker_nodes)
        readers = np.bincount(makers[makers >= 0], minlength=len(view.nodes))
        # How often a node that stays reads each node, control inputs included.
        self._uses: list[int] = readers.tolist()
        for name, waiting in view.control_readers.items():
            if name in view.index:
                self._uses[view.index[name]] += len(waiting)
        for number, node in changed.items():
            for read in self._read_before(number):
                self._uses[read] -= 1
            for read in self._numbers(node):
                self._uses[read] += 1
        for node in new_nodes:
            for read in self._numbers(node):
                self._uses[read] += 1

    def find(self, orphans: Collection[str]) -> set[int]:
        """The orphans that nothing reads, and what only such nodes read, one after another."""
        dead: set[int] = set()
        index = self._view.index
        pending = [index[name] for name in orphans if name in index]
        while pending:
            number = pending.pop()
            if self._uses[number] or number in dead or number in self._kept:
                continue
            if not self._may_go[self._view.kind_of[number]]:
                continue
            dead.add(number)
            node = self._changed.get(number)
            given_up = self._read_before(number) if node is None else self._numbers(node)
            for read in given_up:
                self._uses[read] -= 1
            pending.extend(given_up)
        return dead

    def _has_no_effect(self, kind: Kind) -> bool:
        return (
            kind.op_type is not None
            and not kind.op_type.op_def.is_stateful
            and kind.op not in ("Placeholder", ARGUMENT, RESULT)
            and not kind.is_call  # it may have an effect inside
        )

    def _read_before(self, number: int) -> list[int]:
        """The nodes that a node read before the edits, each as often as it did."""
        view = self._view
        read = [maker for maker in view.makers(number) if maker >= 0]
        if number in view.control_ends:
            read += self._numbers(view.nodes[number], controls_alone=True)
        return read

    def _numbers(self, node: node_def_pb2.NodeDef, *, controls_alone: bool = False) -> list[int]:
        """The nodes of the old graph that a node reads now."""
        find = self._view.index.get
        numbers = []
        for name in _controls(node) if controls_alone else node.input[:]:
            number = find(name)  # most are plain names, which need no taking apart
            if number is None:
                number = find(node_name(name))
            if number is not None:
                numbers.append(number)
        return numbers
