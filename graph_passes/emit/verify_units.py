"""Post-conditions of the replacement of units: what is compared with the body the caller gave."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

import numpy as np

from graph_passes.ir.adjacency import Neighbours, walk
from graph_passes.ir.copying import Graph
from graph_passes.ir.eligibility import numbers_of
from graph_passes.ir.graph_view import GraphView
from graph_passes.ir.node_order import order_edges, without_order
from graph_passes.ops.node_types import NodeType
from graph_passes.rewriter.surgery import places


class VerificationError(Exception):
    """The rewritten graph breaks a post-condition; it must not run.

    Attributes:
        rejected: that graph.
    """

    rejected: Graph | None = None


def verify_units(original: GraphView, fused: GraphView, preserve: Collection[str] = ()) -> None:
    """Checks what became of a body when its units were replaced, in time linear in its size.

    Preserved nodes, everything that has an effect, control inputs and devices are still there;
    what a fetched node made happen still happens, no location names a node that is gone, and no
    circle was made. Dtypes are left to `verify`, which takes and raises the same.
    """
    if original is not fused:
        _Comparison(original, fused).check(preserve)


class _Comparison:
    def __init__(self, original: GraphView, fused: GraphView) -> None:
        self._original, self._fused = original, fused
        numbers = map(fused.index.get, original.index, itertools.repeat(-1))
        self._numbers = np.fromiter(numbers, np.int64, len(original.index))
        self._is_added = np.ones(len(fused.nodes), bool)
        self._is_added[self._numbers[self._numbers >= 0]] = False

    def check(self, preserve: Collection[str]) -> None:
        """Runs all checks."""
        self._check_nodes()
        self._check_preserved(preserve)
        self._check_controls()
        self._check_locations()
        self._check_effects(preserve)
        place = np.where(self._is_added, -1.0, np.arange(len(self._fused.nodes)))
        if without_order(*order_edges(self._fused), place):
            raise VerificationError("nodes read each other in a circle")

    def _check_nodes(self) -> None:
        original, fused = self._original, self._fused
        lost = _has_effect(original) & (self._numbers < 0)
        if lost.any():
            name = original.names[int(np.argmax(lost))]
            raise VerificationError(f"node {name!r}, which has an effect, is gone")
        kept = np.flatnonzero(self._numbers >= 0)
        devices = np.asarray(original.node_index.device_of)[kept]
        moved = devices != np.asarray(fused.node_index.device_of)[self._numbers[kept]]
        if moved.any():
            name = original.names[int(kept[np.argmax(moved)])]
            raise VerificationError(f"node {name!r} has another device")

    def _check_preserved(self, preserve: Collection[str]) -> None:
        original, fused = self._original, self._fused
        for number in numbers_of(original, preserve):
            now = int(self._numbers[number])
            if now < 0:
                raise VerificationError(f"the preserved node {original.names[number]!r} is gone")
            require_same_outputs(original, number, fused.node_type(now))

    def _check_controls(self) -> None:
        """No node has lost a control input, and none waits for a node that is not there."""
        original, fused = self._original, self._fused
        numbers = self._numbers.tolist()
        for number, before in original.waits.items():
            if numbers[number] >= 0:
                after = fused.waits.get(numbers[number], ())
                require_controls(original.names[number], before, after)
        for name in fused.awaited - fused.index.keys():
            raise VerificationError(f"a node waits for {name!r}, which is not there")

    def _check_locations(self) -> None:
        original, fused = self._original, self._fused
        for node in [fused.nodes[number] for number in fused.located]:
            for name in places(node):
                if name in original.index and name not in fused.index:
                    raise VerificationError(f"{node.name!r} is to stand beside {name!r}, now gone")

    def _check_effects(self, preserve: Collection[str]) -> None:
        """What nodes that are gone waited for is still made to happen by what is fetched."""
        original, fused = self._original, self._fused
        gone = [names for number, names in original.waits.items() if self._numbers[number] < 0]
        left = set().union(*gone).difference(fused.awaited)
        if all(fused.reading_nodes(number) for number in numbers_of(fused, left)):
            return  # an effect is lost where the last that asks for it goes
        read = np.zeros(len(original.nodes) + 1, bool)  # the maker of number -1 is not known
        read[np.asarray(original.maker_nodes)] = True
        read[numbers_of(original, original.awaited)] = True
        ends = np.flatnonzero(~read[:-1] & (self._numbers >= 0)).tolist()
        ends.extend(numbers_of(original, preserve))
        before = _needed_for(original, ends)
        after = _needed_for(fused, self._numbers[ends].tolist())
        for number in np.flatnonzero(_has_effect(original)).tolist():
            if number in before and not self._happens(int(self._numbers[number]), after):
                raise VerificationError(
                    f"what is fetched no longer needs {original.names[number]!r}"
                )

    def _happens(self, number: int, needed: set[int]) -> bool:
        """Whether a node is needed, or what was added and does in its place what it did."""
        fused = self._fused
        stands_in = fused.node_type(number).op == "NoOp"
        instead = [fused.index[name] for name in fused.waits.get(number, ()) if stands_in]
        return number in needed or any(self._is_added[n] and n in needed for n in instead)


def require_same_outputs(view: GraphView, number: int, now: NodeType) -> None:
    """Checks that a preserved node makes tensors of the dtypes that it made, perhaps with more.

    Raises:
        VerificationError: it does not.
    """
    old = view.node_type(number)
    if old is now:  # as of nearly all
        return
    before, after = ([t.dtypes[slot] for slot in t.layout.out_slots] for t in (old, now))
    if before != after[: len(before)]:
        raise VerificationError(f"the preserved node {view.names[number]!r} was retyped")


def require_controls(name: str, before: Iterable[str], after: Iterable[str]) -> None:
    """Checks that a node waits for all that it waited for.

    Raises:
        VerificationError: it does not.
    """
    if not set(before).issubset(after):
        raise VerificationError(f"node {name!r} has lost a control input")


def _has_effect(view: GraphView) -> np.ndarray:
    """For each node whether it may do more than make tensors; bool [nodes]."""
    return view.is_of_node_type(lambda node_type: node_type.has_effect)


def _needed_for(view: GraphView, ends: Iterable[int]) -> set[int]:
    """Some nodes and all that run before them."""
    makers, readers = order_edges(view)
    return set(walk(ends, Neighbours(len(view.nodes), readers, makers).__getitem__))
