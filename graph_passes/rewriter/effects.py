"""The conditions under which nodes that have effects may become one node.

A `Contraction` takes reads and writes of variables, and the arithmetic between them, together in
the place of the last write: one new op, or several in a row. Each read or write becomes a NoOp of
its name behind the new op, so that whoever waited for one waits for all, whether by a control
input, as a function's control result or as what a session runs. The new op has a name of its own:
a session makes a graph of each set of fetches, and keeps one kernel for all stateful nodes of a
name.

That is equal to what was there, in all orders in which the graph may run, if

1. the new op computes what was written from what was read: the unit's own proof;
2. the variables are different ones, each written once by the nodes, and a read of a written value
   waits for that write;
3. what is computed from what they read is read by the nodes alone, and no one waits for it, fetches
   it or feeds it;
4. all nodes made one, no node waits for itself: then each order in which the new graph may run is
   one of the old graph's, in which nothing outside came between the nodes. Several new ops in a row
   are as one where all that reads or writes a variable is in order, as in a function.

Two handles that are not the same tensor count as two variables, as they do where control inputs
are made for the order in which a function was written.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence

import numpy as np
from tensorflow.core.framework import node_def_pb2

from graph_passes.ir.adjacency import in_order, walk
from graph_passes.ir.graph_view import GraphView
from graph_passes.ir.node_order import order_edges, without_order
from graph_passes.ops.node_types import COLOCATION
from graph_passes.rewriter.matcher import Matcher, NoMatchError

WRITES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
READ = "ReadVariableOp"
_NAMES = ("container", "shared_name")


@dataclasses.dataclass(frozen=True)
class Contraction:
    """Nodes that are to become one.

    Attributes:
        last: the write in whose place the new op comes.
        writes: all writes: handle -> node.
        reads: reads of the written variables -> whether they read what was written.
        inside: the nodes that compute with what was read.
        beside: nodes that compute with other tensors alone, and constants, for the nodes above.
    """

    last: int
    writes: dict[str, int]
    reads: dict[int, bool]
    inside: frozenset[int]
    beside: frozenset[int] = frozenset()

    @functools.cached_property
    def effects(self) -> frozenset[int]:
        """The reads and the writes."""
        return frozenset((*self.reads, *self.writes.values()))

    @functools.cached_property
    def members(self) -> frozenset[int]:
        """All that becomes one node."""
        return self.effects | self.inside


def admit_contraction(
    m: Matcher, unit: Contraction, preserved: Collection[int], taken: Collection[int]
) -> None:
    """Checks conditions 2 and 3, given the nodes that are fed or fetched, or are part of others.

    Raises:
        NoMatchError: they must not become one; the message says why.
    """
    names = m.view.names
    _require_variables(m, unit)
    if not unit.effects.isdisjoint(taken):
        raise NoMatchError(f"{names[unit.last]!r} is part of another update")
    for number in sorted(unit.members | unit.beside):
        if number in preserved:
            raise NoMatchError(f"{names[number]!r} is to be preserved")
    for number in sorted(unit.members):
        for reader in m.readers(number):
            if reader not in unit.members:
                raise NoMatchError(f"{names[reader]!r} outside the update reads {names[number]!r}")
    for number in sorted(unit.inside):
        if names[number] in m.view.awaited:
            raise NoMatchError(f"something waits for {names[number]!r}")


def _require_variables(m: Matcher, unit: Contraction) -> None:
    view, names, device_of = m.view, m.view.names, m.view.node_index.device_of
    if len({device_of[number] for number in unit.writes.values()}) > 1:
        raise NoMatchError(f"{names[unit.last]!r} updates variables of several devices")
    variables: set[tuple[str | bytes, ...]] = set()
    for handle in unit.writes:
        maker = m.maker(handle)
        is_handle = m.ops[maker] == "VarHandleOp"
        known = [m.attr(maker, name).s for name in _NAMES] if is_handle else [b""]
        variables.add(tuple(known) if known[-1] else (handle,))
    if len(variables) < len(unit.writes):
        raise NoMatchError(f"{names[unit.last]!r} updates a variable by two names")
    for number, is_new in unit.reads.items():
        write = unit.writes[m.tensor(number, 0)]
        first, then = (write, number) if is_new else (number, write)
        # What is made of it inside may be what the write reads.
        used = walk([number], lambda n: [r for r in m.readers(n) if r in unit.inside])
        leads = not is_new and any(write in m.readers(n) for n in used)
        if not leads and names[first] not in view.waits.get(then, ()):
            raise NoMatchError(f"{names[then]!r} does not wait for {names[first]!r}")


def write_contraction(
    m: Matcher,
    unit: Contraction,
    new: node_def_pb2.NodeDef,
    first: Sequence[node_def_pb2.NodeDef] = (),
) -> dict[int, node_def_pb2.NodeDef]:
    """What takes the place of the reads and writes, by number.

    The new op, and the new nodes that come first, wait for all that any of the nodes waited for.
    """
    names, waits = m.view.names, m.view.waits
    members = {names[number] for number in unit.members}
    new.input.extend(f"^{node.name}" for node in first)
    waiting = (unit.last, *sorted(unit.members | unit.beside))
    awaited = dict.fromkeys(name for number in waiting for name in waits.get(number, ()))
    for node in (*first, new):
        node.input.extend(f"^{name}" for name in awaited if name not in members)
    nodes = {}
    for number in unit.effects:
        old = m.node(number)
        empty = node_def_pb2.NodeDef(name=names[number], op="NoOp", device=old.device)
        behind = dict.fromkeys((*waits.get(number, ()), new.name))
        empty.input.extend([f"^{name}" for name in behind])
        if COLOCATION in old.attr:
            empty.attr[COLOCATION].CopyFrom(old.attr[COLOCATION])
        nodes[number] = empty
    return nodes


def in_circles(view: GraphView, units: Sequence[Contraction]) -> list[bool]:
    """For each of several contractions whether a node would wait for itself, were all made.

    Those for which it is False may be made together: a circle of the graph with these alone would
    be one of the graph with all, and name one of the others. Linear in the size of the graph.
    """
    if not units:
        return []
    count = len(view.nodes)
    ends, place = np.arange(count), np.arange(count, dtype=np.float64)
    for unit in units:
        members = list(unit.members)
        ends[members] = unit.last
        place[unit.last] = max(members)
    makers, readers = order_edges(view)
    makers, readers = ends[makers], ends[readers]
    across = makers != readers
    makers, readers = makers[across], readers[across]
    behind = without_order(makers, readers, place)
    ahead = set(range(count)).difference(in_order(count, readers, makers)) if behind else set[int]()
    return [unit.last in ahead and unit.last in behind for unit in units]
