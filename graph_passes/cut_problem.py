"""What is painted as a problem for a minimum cut: vertices with gains, tensors with Cast prices.

Whichever prices there are (measured times, or bytes), what must have one colour is decided as one:
the ends of a tensor list, both ends of a loop's back edge, an op that TensorFlow fuses into its
producer. Nothing is painted that was not painted before, so no rule about accuracy is touched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from graph_passes.canvas import Canvas
from graph_passes.min_cut import FLOAT32, LOW, LinkTable, cheapest_colours
from graph_passes.reasons import Reason
from graph_passes.view import GraphView

_LOGGER = logging.getLogger(__name__)

# Folded into the constant by TensorFlow, but one step dearer than no Cast at all.
_CONSTANT_CAST = 1
_FUSED_WITH_PRODUCER = {
    "BiasAdd": frozenset(("Conv2D", "DepthwiseConv2dNative", "MatMul")),
    "Relu": frozenset(("BiasAdd",)),
    "Relu6": frozenset(("BiasAdd",)),
    "Elu": frozenset(("BiasAdd",)),
}


class Prices(Protocol):
    """What the two colours cost, in one unit of the caller's choice."""

    def gain(self, number: int, listed: int) -> int | None:
        """What a node saves by being low; None if it stays low whatever it costs.

        Args:
            number: of the node.
            listed: the code of its list.
        """

    def casts(self, tensor: str) -> tuple[int, int]:
        """The prices of a Cast of a tensor to the target dtype and to float32."""


def keep_cheap_ones(
    canvas: Canvas, prices: Prices, clusters: Iterable[Sequence[int]], reason: Reason
) -> None:
    """Takes the colour from the vertices that are cheaper in float32, Casts included.

    Args:
        canvas: the painting.
        prices: what decides.
        clusters: groups of vertices that share a tensor list, each of one colour.
        reason: why what loses its colour does.
    """
    if not any(canvas.low):
        return
    problem = _Problem(canvas, prices, (*clusters, *_loop_groups(canvas.view)))
    colours, skipped = cheapest_colours(np.array(problem.gains), problem.links)
    if skipped:
        _LOGGER.warning(
            "Costs are left out of account for %d ops of a graph of %d nodes: weighing them "
            "against each other would take too long.",
            skipped,
            len(canvas.view.nodes),
        )
    canvas.erase(problem.vertices[colours[problem.variables] == FLOAT32].tolist(), reason)


class _Problem:
    """The painted vertices as variables, and the tensors between them as links.

    Attributes:
        vertices: the painted vertices; int64 [painted].
        variables: for each of them its variable; int64 [painted].
        gains: for each variable what it saves by staying low.
        links: the tensors that may need a Cast.
    """

    def __init__(self, canvas: Canvas, prices: Prices, bound: Iterable[Sequence[int]]) -> None:
        self._canvas = canvas
        self._view = canvas.view
        self._prices = prices
        self.vertices = np.flatnonzero(np.frombuffer(bytes(canvas.low), np.uint8))
        followers = self._followers()
        roots = self._merged(bound, followers)
        gains: dict[int, int | None] = {}
        for vertex in self.vertices.tolist():
            root = roots.get(vertex, vertex)
            before = gains.get(root, 0)
            gain = 0 if vertex in followers else self._gain(vertex)
            gains[root] = None if before is None or gain is None else before + gain
        numbers: dict[int, int] = {}
        self.gains = [0, 0]
        for root, gain in gains.items():
            numbers[root] = LOW if gain is None else len(self.gains)
            if gain is not None:
                self.gains.append(gain)
        self.variables = np.array(
            [numbers[roots.get(vertex, vertex)] for vertex in self.vertices.tolist()], np.int64
        )
        self.links = self._make_links()

    def _followers(self) -> dict[int, int]:
        """Vertex -> the vertex of the op that TensorFlow computes this one together with."""
        view, low, found = self._view, self._canvas.low, {}
        for number in view.of_op(*_FUSED_WITH_PRODUCER):
            vertex = view.base[number]
            if not low[vertex]:
                continue
            source = view.producers(number)[0]
            fused = view.op_of(source) in _FUSED_WITH_PRODUCER[view.kind(number).op]
            if low[source] and fused and len(view.readers(source)) == 1:
                found[vertex] = source
        return found

    def _merged(
        self, bound: Iterable[Sequence[int]], followers: Mapping[int, int]
    ) -> dict[int, int]:
        """Vertex -> the vertex that stands for its group, for those in one."""
        parents: dict[int, int] = {}

        def find(vertex: int) -> int:
            while vertex in parents:
                vertex = parents[vertex]
            return vertex

        low = self._canvas.low
        pairs = [(group[0], vertex) for group in bound for vertex in group[1:]]
        for first, second in (*followers.items(), *pairs):
            if low[first] and low[second] and find(first) != find(second):
                parents[find(first)] = find(second)
        return {vertex: find(vertex) for vertex in parents}

    def _gain(self, vertex: int) -> int | None:
        view = self._view
        number = view.vertex_nodes[vertex]
        if vertex != view.base[number] and view.is_float[view.base[number]]:
            return 0  # its node is judged by the first float32 vertex
        return self._prices.gain(number, int(self._canvas.listed[vertex]))

    def _make_links(self) -> LinkTable:
        view = self._view
        variable_of = np.zeros(len(view.dtypes), np.int64)
        variable_of[self.vertices] = self.variables
        makers, readers = variable_of[view.sources], variable_of[view.targets]
        crossing = np.flatnonzero(makers != readers)
        tensors, readers = view.tensors_read(crossing), readers[crossing]
        order = np.lexsort((readers, tensors))
        tensors, makers, readers = tensors[order], makers[crossing][order], readers[order]
        is_new = np.diff(tensors, prepend=-1) != 0
        once = is_new | (np.diff(readers, prepend=-1) != 0)
        tensors, makers, readers, is_new = tensors[once], makers[once], readers[once], is_new[once]
        firsts = np.flatnonzero(is_new)
        of_row = np.cumsum(is_new) - 1
        is_open = np.zeros(len(firsts), bool)
        is_open[of_row[np.maximum(makers, readers) > LOW]] = True
        kept = is_open[of_row]
        prices = np.array([self._casts(t) for t in tensors[firsts[is_open]].tolist()], np.int64)
        to_low, to_float32 = prices.reshape(-1, 2).T
        return LinkTable(
            makers[firsts[is_open]],
            np.append(np.flatnonzero(is_new[kept]), kept.sum()),
            readers[kept],
            to_low,
            to_float32,
        )

    def _casts(self, tensor: int) -> tuple[int, int]:
        view = self._view
        port, number = divmod(tensor, len(view.nodes))
        if view.kind(number).op == "Const":
            return _CONSTANT_CAST, _CONSTANT_CAST
        name = view.nodes[number].name
        return self._prices.casts(f"{name}:{port}" if port else name)


def _loop_groups(view: GraphView) -> list[list[int]]:
    """The vertices at both ends of each back edge of a TensorFlow 1 loop."""
    groups = []
    for number in view.of_op("NextIteration"):
        back = view.base[number] + view.layout(number).out_slots[0]
        groups.append([back, *view.readers(back)])
    return groups
