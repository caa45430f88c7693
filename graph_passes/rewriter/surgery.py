"""Replacing parts of a graph: new nodes in, tensors redirected, what nobody reads out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from tensorflow.core.framework import graph_pb2, node_def_pb2

from graph_passes.ir.eligibility import node_name, numbers_of
from graph_passes.ir.graph_view import ARGUMENT, RESULT, GraphView, Shape
from graph_passes.ops.node_types import COLOCATION

_AT = "loc:@"


@dataclasses.dataclass
class Edits:
    """Changes of a graph.

    Attributes:
        redirect: tensor -> the tensor that its readers shall read instead, itself redirected where
            two units stand in a row.
        inputs: node -> all its new data inputs.
        controls: node -> control inputs that it gets besides those it has.
        in_place: number of a node -> what takes its place under its name; reads no new tensor
            that is redirected.
        new_nodes: nodes to add; their inputs are redirected too.
        shapes: name of a new node -> static shapes of its outputs.
    """

    redirect: dict[str, str] = dataclasses.field(default_factory=dict)
    inputs: dict[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    controls: dict[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    in_place: dict[int, node_def_pb2.NodeDef] = dataclasses.field(default_factory=dict)
    new_nodes: list[node_def_pb2.NodeDef] = dataclasses.field(default_factory=list)
    shapes: dict[str, tuple[Shape | None, ...]] = dataclasses.field(default_factory=dict)

    def final(self, tensor: str) -> str:
        """What is read in the end where a tensor was to be read."""
        while tensor in self.redirect:
            tensor = self.redirect[tensor]
        return tensor


def make_edits(view: GraphView, edits: Edits, unread: Unread) -> GraphView:
    """A graph in which tensors come from elsewhere.

    Args:
        view: the graph; it is not changed.
        edits: what changes; new nodes then read what is redirected.
        unread: finds what nothing reads, and knows what must stay.

    Returns:
        The view of the new graph, which shares with the old one the nodes that are as they were.
        Nodes that made redirected tensors or fed replaced inputs, and that nothing reads any more,
        are gone with all that only they read.

    Raises:
        InvalidGraphError: a name is used twice, or an input names no tensor.
    """
    in_place, new_nodes = edits.in_place, edits.new_nodes
    redirect = {tensor: edits.final(tensor) for tensor in edits.redirect}
    orphans = {view.index[view.split(tensor)[0]] for tensor in redirect}
    touched = {view.index[name] for name in (*edits.inputs, *edits.controls)}
    for number in orphans:
        touched.update(view.reading_nodes(number))
    # What a tensor is redirected to has readers that its view does not know of.
    targets = (view.index.get(view.split(tensor)[0]) for tensor in redirect.values())
    kept = {number for number in targets if number is not None}
    reads: dict[int, list[str]] = {}  # by changed nodes
    for number in touched:
        name, read = view.names[number], view.nodes[number].input[:]
        given, more = edits.inputs.get(name), edits.controls.get(name, ())
        if given is not None or more:
            if given is not None:
                orphans.update(view.makers(number))
            data = [tensor for tensor in read if tensor[0] != "^"] if given is None else given
            waits = dict.fromkeys(tensor for tensor in read if tensor[0] == "^")
            waits.update(dict.fromkeys(more))
            read = [*data, *waits]
        elif redirect.keys().isdisjoint(read):
            continue
        reads[number] = [redirect.get(name, name) for name in read]
    for number, node in in_place.items():
        orphans.update(unread.read_before(number))
        reads[number] = node.input[:]
    added = [node.input[:] for node in new_nodes]
    for node, read in zip(new_nodes, added, strict=True):
        if not redirect.keys().isdisjoint(read):
            read[:] = [redirect.get(name, name) for name in read]
            node.input[:] = read
    dead = unread.after(reads, added, kept, orphans)
    owner = graph_pb2.GraphDef()  # messages of one owner share memory
    changed = {
        number: _with_inputs(owner, view.nodes[number], read)
        for number, read in reads.items()
        if number not in dead and number not in in_place
    }
    changed.update(in_place)
    heirs = {view.split(old)[0]: node_name(new) for old, new in redirect.items()}
    return _assembled(view, changed, new_nodes, dead, heirs, edits.shapes)


def leave_out_unread(view: GraphView, unread: Unread) -> GraphView:
    """A graph without the nodes of which nothing comes; the same view if there are none."""
    dead = unread.now()
    return _assembled(view, {}, (), dead, {}, {}) if dead else view


def _assembled(
    view: GraphView,
    changed: dict[int, node_def_pb2.NodeDef],
    new_nodes: Sequence[node_def_pb2.NodeDef],
    dead: Collection[int],
    heirs: Mapping[str, str],
    shapes: Mapping[str, tuple[Shape | None, ...]],
) -> GraphView:
    """What is left of a graph, with its changed and its new nodes.

    What was placed with nodes that are gone is placed with their heirs, in copies that join the
    changed nodes. New nodes stand behind the others, but before the results of a function.
    """
    if dead:
        gone = {view.names[number]: heirs.get(view.names[number], "") for number in dead}
        owner = graph_pb2.GraphDef()
        for number in view.located:
            if number not in dead and not gone.keys().isdisjoint(places(view.nodes[number])):
                if number not in changed:
                    changed[number] = owner.node.add()
                    changed[number].CopyFrom(view.nodes[number])
                relocate(changed[number], gone)
        for node in new_nodes:
            if COLOCATION in node.attr:
                relocate(node, gone)
    alive = np.ones(len(view.nodes), bool)
    alive[list(dead)] = False
    moved = np.where(alive, np.cumsum(alive, dtype=np.int32) - 1, -1)
    end = view.body.stop
    moved[end:] += len(new_nodes)
    first_new = int(np.count_nonzero(alive[:end]))
    all_nodes = list(view.nodes)
    for number, node in changed.items():
        all_nodes[number] = node
    nodes = list(itertools.compress(all_nodes, alive.tobytes()))
    nodes[first_new:first_new] = new_nodes
    anew = [*moved[list(changed)].tolist(), *range(first_new, first_new + len(new_nodes))]
    return view.edited(nodes, moved, sorted(anew), shapes)


def places(node: node_def_pb2.NodeDef) -> list[str]:
    """The nodes that a node is placed with."""
    return [
        place.decode(errors="replace").removeprefix(_AT) for place in node.attr[COLOCATION].list.s
    ]


def relocate(node: node_def_pb2.NodeDef, gone: Mapping[str, str]) -> None:
    """Places a node with what stands for nodes that are gone, "" for nothing."""
    now = dict.fromkeys(gone.get(name, name) for name in places(node))
    now.pop("", None)
    now.pop(node.name, None)
    if now:
        node.attr[COLOCATION].list.s[:] = [f"{_AT}{name}".encode() for name in now]
    else:
        del node.attr[COLOCATION]


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


class Unread:
    """Finds nodes of which nothing comes: no effect, no result, and none that must stay."""

    def __init__(self, view: GraphView, kept: Collection[int]) -> None:
        """Counts the uses of all nodes; those in `kept`, by number, must stay."""
        self._view = view
        self._starts, self._makers = view.edge_starts, view.maker_nodes
        ends = ("Placeholder", ARGUMENT, RESULT)
        stays = view.is_of_node_type(lambda each: each.has_effect or each.op in ends)
        stays[list(kept)] = True
        makers = np.asarray(self._makers)
        # How often each node is read, control inputs included; one that stays in any case counts
        # as read once more. The last, of number -1, stands for makers that are not known.
        read = np.concatenate([makers[makers >= 0], view.control_edges[0]])
        self._uses = np.bincount(read, minlength=len(view.nodes) + 1)
        self._uses[:-1] += stays
        self._uses[-1] = len(makers) + 1

    def now(self) -> set[int]:
        """Those of the graph as it is, by number."""
        return self.after({}, (), (), np.flatnonzero(self._uses == 0).tolist())

    def after(
        self,
        reads: Mapping[int, Sequence[str]],
        added: Iterable[Sequence[str]],
        kept: Iterable[int],
        orphans: Collection[int],
    ) -> set[int]:
        """Those among some nodes, and among what only they read, once the graph is edited.

        Args:
            reads: number of a changed node -> what it reads then.
            added: what each new node reads.
            kept: numbers of more nodes that must stay.
            orphans: numbers of the nodes to begin with.
        """
        uses: list[int] = self._uses.tolist()
        for number in kept:
            uses[number] += 1
        for number in reads:
            for read in self.read_before(number):
                uses[read] -= 1
        for read in numbers_of(self._view, itertools.chain(*reads.values(), *added)):
            uses[read] += 1
        pending = [number for number in orphans if not uses[number]]
        dead: set[int] = set()
        read_before, view = self.read_before, self._view
        while pending:
            number = pending.pop()
            dead.add(number)
            is_changed = number in reads
            for read in numbers_of(view, reads[number]) if is_changed else read_before(number):
                uses[read] -= 1
                if not uses[read]:
                    pending.append(read)
        return dead

    def read_before(self, number: int) -> Sequence[int]:
        """The nodes that a node read before the edits, each as often as it did."""
        read = self._makers[self._starts[number] : self._starts[number + 1]]
        waits = self._view.waits.get(number)
        return read if waits is None else [*read, *numbers_of(self._view, waits)]
