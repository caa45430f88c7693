"""Exact comparisons: a tensor and what was picked from it must have been rounded alike.

The gradient of a maximum looks for it among the values that it was picked from, and shares what
comes back among those that it finds:

    found = Cast(Equal(y, x));  gradient = found / Sum(found) * dy        with y = Max(x)
    SelectV2(Less(x, y), -inf, x)                                         with y = TopKV2(x)[k]

If y was picked from rounded values and x was not rounded, or the other way round, none is equal,
and 0 / 0 is NaN, or y itself is less. Values that a loop or a branch keeps for its gradient stand
in lists and optionals, each with a dtype of its own. Rounding keeps the order of numbers, so that a
comparison in the target dtype finds what it looks for wherever on the way its operands were
rounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from graph_passes.coloring import tensor_lists
from graph_passes.coloring.state import CLEAR, Coloring
from graph_passes.ir.adjacency import Adjacency, walk
from graph_passes.ops.reasons import Reason

MOST_OPS = 1000
"""On the way from an origin to a comparison; on a longer one it is not looked for."""

EXACT = ("Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual")
_WRITERS = tensor_lists.WRITERS | {"OptionalFromValue"}
_HAND_ON = _WRITERS | {"_SwitchN"}
_READERS = tensor_lists.READERS | {"OptionalGetValue"}


def paint_comparisons(coloring: Coloring) -> None:
    """Comparisons of two tensors with one origin go low if either was rounded since."""
    view, low = coloring.view, coloring.low
    may_follow = coloring.eligible & ~coloring.is_denied & ~coloring.is_low & coloring.has_kernel
    vertices = [view.base[number] for number in view.of_op(*EXACT)]
    vertices = [vertex for vertex in vertices if may_follow[vertex]]
    origins = _Origins(coloring)
    for vertex in vertices if any(low) else ():
        sides = [origins.of(maker) for maker in coloring.edges.producers(vertex)]
        either = set().union(*sides)
        if either.intersection(*sides) and any(low[origin] for origin in either):
            coloring.paint((vertex,), Reason.COMPARISON)


class _Origins:
    """Where tensors come from: through ops that hand values on, and what keeps them."""

    def __init__(self, coloring: Coloring) -> None:
        self._coloring = coloring
        self._handles: Adjacency | None = None  # made for the first container

    def of(self, vertex: int) -> set[int]:
        """The vertices that a tensor's values come through, up to those that compute them."""
        return set(itertools.islice(walk([vertex], self._before), MOST_OPS))

    def _before(self, vertex: int) -> Sequence[int]:
        op = self._coloring.view.op_of(vertex)
        if op in _READERS:
            return self._put_in(vertex)
        if self._coloring.list_codes[vertex] == CLEAR or op in _HAND_ON:
            return self._coloring.edges.producers(vertex)
        return ()

    def _put_in(self, vertex: int) -> list[int]:
        """What is put into the lists or optionals that a vertex may take its value out of.

        Eligible or not: the implicit edges of a colouring leave out what runs through other nodes.
        """
        view = self._coloring.view
        if self._handles is None:
            self._handles = view.adjacency(tensor_lists.HANDLE, tensor_lists.nested(view))
        ends = view.vertices_of(view.vertex_nodes[vertex], tensor_lists.HANDLE)
        shared = tensor_lists.connected(self._handles, ends)
        numbers = {view.vertex_nodes[handle] for handle in shared}
        writers = [number for number in numbers if view.nodes[number].op in _WRITERS]
        return [v for number in writers for v in self._coloring.float_vertices(number)]
