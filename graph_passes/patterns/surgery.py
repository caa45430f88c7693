"""Replacing parts of a graph: new nodes in, tensors redirected, what nobody reads out."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

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
    reads: dict[int, list[str]] = {}  # by changed nodes
    for number in touched:
        node = view.nodes[number]
        read = node.input[:]
        given = inputs.get(node.name)
        if given is not None:
            orphans.update(node_name(name) for name in read if name[0] != "^")
            read = [*given, *(name for name in read if name[0] == "^")]
        elif redirect.keys().isdisjoint(read):
            continue
        reads[number] = [redirect.get(name, name) for name in read]
    added = [node.input[:] for node in new_nodes]
    for node, read in zip(new_nodes, added, strict=True):
        if not redirect.keys().isdisjoint(read):
            read[:] = [redirect.get(name, name) for name in read]
            node.input[:] = read
    dead = _Unread(view, reads, added, kept).find(orphans)
    owner = graph_pb2.GraphDef()  # messages of one owner share memory
    changed = {
        number: _with_inputs(owner, view.nodes[number], read)
        for number, read in reads.items()
        if number not in dead
    }
    nodes, moved, anew = _assemble(view, changed, new_nodes, dead)
    return view.edited(nodes, moved, anew, shapes)


def _with_inputs(
    owner: graph_pb2.GraphDef, node: node_def_pb2.NodeDef, inputs: Sequence[str]
) -> node_def_pb2.NodeDef:
    """A copy of a node that reads other tensors, perhaps fewer."""
    new = owner.node.add()
    new.CopyFrom(node)
    new.input[:] = inputs
    if node.op == "AddN":
        new.attr["N"].i = sum(name[0] != "^" for name in inputs)
    return new


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
    all_nodes = list(view.nodes)
    for number, node in changed.items():
        all_nodes[number] = node
    nodes = list(itertools.compress(all_nodes, alive.tobytes()))
    nodes[first_new:first_new] = new_nodes
    anew = [*moved[list(changed)].tolist(), *range(first_new, first_new + len(new_nodes))]
    return nodes, moved, sorted(anew)


class _Unread:
    """Finds nodes that nothing reads in an edited graph.

    Args:
        view: the graph before the edits.
        reads: number of a changed node -> what it reads now.
        added: what each new node reads.
        kept: names of nodes that must stay.
    """

    def __init__(
        self,
        view: GraphView,
        reads: Mapping[int, Sequence[str]],
        added: Iterable[Sequence[str]],
        kept: Collection[str],
    ) -> None:
        self._view = view
        self._reads = reads
        self._starts, self._makers = view.edge_starts, view.maker_nodes
        stays = np.array([_has_effect(kind) for kind in view.kinds])[np.asarray(view.kind_of)]
        stays[[view.index[name] for name in kept if name in view.index]] = True
        makers = np.asarray(self._makers)
        readers = np.bincount(makers[makers >= 0], minlength=len(view.nodes))
        # How often a node that stays reads each node, control inputs included. One that stays in
        # any case counts as read once more, as does the maker of number -1, which is not known.
        self._uses: list[int] = [*(readers + stays).tolist(), len(makers) + 1]
        for name, waiting in view.control_readers.items():
            if name in view.index:
                self._uses[view.index[name]] += len(waiting)
        for number, now in reads.items():
            for read in self._read_before(number):
                self._uses[read] -= 1
            for read in self._numbers(now):
                self._uses[read] += 1
        for names in added:
            for read in self._numbers(names):
                self._uses[read] += 1

    def find(self, orphans: Collection[str]) -> set[int]:
        """The orphans that nothing reads, and what only such nodes read, one after another."""
        dead: set[int] = set()
        uses, index, reads = self._uses, self._view.index, self._reads
        orphaned = [index[name] for name in orphans if name in index]
        pending = [number for number in orphaned if not uses[number]]
        while pending:
            number = pending.pop()
            dead.add(number)
            now = reads.get(number)
            for read in self._read_before(number) if now is None else self._numbers(now):
                uses[read] -= 1
                if not uses[read]:
                    pending.append(read)
        return dead

    def _read_before(self, number: int) -> Sequence[int]:
        """The nodes that a node read before the edits, each as often as it did."""
        read = self._makers[self._starts[number] : self._starts[number + 1]]
        if number not in self._view.control_ends:
            return read
        names = self._view.nodes[number].input[:]
        return [*read, *self._numbers(name for name in names if name[0] == "^")]

    def _numbers(self, names: Iterable[str]) -> list[int]:
        """The nodes of the old graph that make tensors; new nodes are left out."""
        find = self._view.index.get
        numbers = []
        for name in names:
            number = find(name)  # most are plain names, which need no taking apart
            if number is None:
                number = find(node_name(name))
            if number is not None:
                numbers.append(number)
        return numbers


def _has_effect(kind: Kind) -> bool:
    return (
        kind.op_type is None
        or kind.op_type.op_def.is_stateful
        or kind.op in ("Placeholder", ARGUMENT, RESULT)
        or kind.is_call  # it may have an effect inside
    )
