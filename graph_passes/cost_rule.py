"""Float32 for what the target dtype makes slower on this device, Casts included.

After painting, the kernel times and Cast times of a measured table decide which of the painted
vertices are worth it. What must have one colour (the ends of a tensor list, both ends of a loop's
back edge, an op that TensorFlow fuses into its producer) is decided as one. Nothing is painted
that was not painted before, so no rule about accuracy is touched.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence

import numpy as np

from graph_passes.canvas import ALLOW, Canvas
from graph_passes.costs import CostTable
from graph_passes.min_cut import FLOAT32, LOW, Link, cheapest_colours
from graph_passes.reasons import Reason
from graph_passes.view import GraphView
from graph_passes.work_sizes import WorkSizes

_LOGGER = logging.getLogger(__name__)

UNKNOWN_ELEMENTS = 1 << 18
"""What counts for a tensor whose shape is not known: neither in a cache nor large."""
UNKNOWN_FLOPS = 1 << 26
"""The same for the work of a matrix product or convolution."""
DOUBT = 1.5
"""How many times slower the target dtype must be before that counts. An op measured alone does not
show what smaller tensors save the ops beside it: at up to 1.5 times, networks do not gain from
taking it out."""
COMPILED_MARGIN = 1.1
"""How many times faster the target dtype must be in what XLA compiles before that counts. What it
costs the fused element-wise ops around a product is in no table, and it is no saving on a CPU."""

_PER_SECOND = 1e9
# Folded into the constant by TensorFlow, but one step dearer than no Cast at all.
_CONSTANT_CAST = 1
_FUSED_WITH_PRODUCER = {
    "BiasAdd": frozenset(("Conv2D", "DepthwiseConv2dNative", "MatMul")),
    "Relu": frozenset(("BiasAdd",)),
    "Relu6": frozenset(("BiasAdd",)),
    "Elu": frozenset(("BiasAdd",)),
}


def keep_fast_ones(canvas: Canvas, clusters: Iterable[Sequence[int]] = ()) -> None:
    """Takes the colour from vertices that are faster in float32.

    Args:
        canvas: the painting.
        clusters: groups of vertices that share a tensor list, each of one colour.
    """
    table = canvas.config.cost_table
    if table is None or not any(canvas.low):
        return
    problem = _Problem(canvas, table, (*clusters, *_loop_groups(canvas.view)))
    colours = cheapest_colours(problem.gains, problem.links)
    if colours is None:
        _LOGGER.warning(
            "Costs are left out of account for a graph of %d nodes: weighing its ops against each "
            "other would take too long.",
            len(canvas.view.nodes),
        )
        return
    slower = (v for v, variable in problem.variables.items() if colours[variable] == FLOAT32)
    canvas.erase(slower, Reason.SLOWER_HERE)


class _Problem:
    """The painted vertices as variables, and the tensors between them as links.

    Attributes:
        variables: vertex -> variable, for each vertex that may lose its colour.
        gains: for each variable the nanoseconds that it saves by staying low.
        links: the tensors that may need a Cast.
    """

    def __init__(self, canvas: Canvas, table: CostTable, bound: Iterable[Sequence[int]]) -> None:
        self._canvas = canvas
        self._view = canvas.view
        self._table = table
        self._sizes = WorkSizes(canvas.view)
        low = canvas.where(np.frombuffer(bytes(canvas.low), np.uint8))
        representative = self._merged(low, bound)
        numbers: dict[int, int] = {}
        self.variables: dict[int, int] = {}
        self.gains = [0, 0]
        for vertex in low:
            root = representative.get(vertex, vertex)
            if root not in numbers:
                numbers[root] = len(self.gains)
                self.gains.append(0)
            self.variables[vertex] = numbers[root]
        for vertex in low:
            gain = self._gain(vertex)
            if gain is None:
                self._pin(vertex)
            else:
                self.gains[self.variables[vertex]] += round(gain * _PER_SECOND)
        self.links = self._make_links()

    def _merged(self, low: list[int], bound: Iterable[Sequence[int]]) -> dict[int, int]:
        """Vertex -> the vertex that stands for its group."""
        parents: dict[int, int] = {}

        def find(vertex: int) -> int:
            while vertex in parents:
                vertex = parents[vertex]
            return vertex

        painted = self._canvas.low
        for group in bound:
            first = group[0]
            for vertex in group[1:]:
                if painted[first] and painted[vertex] and find(first) != find(vertex):
                    parents[find(vertex)] = find(first)
        for vertex in low:
            producer = self._fusing_producer(vertex)
            if producer is not None:
                parents[find(vertex)] = find(producer)
        return {vertex: find(vertex) for vertex in parents}

    def _fusing_producer(self, vertex: int) -> int | None:
        """The vertex of the op that TensorFlow computes this one together with."""
        producers = _FUSED_WITH_PRODUCER.get(self._view.op_of(vertex))
        if producers is None:
            return None
        source = self._view.producers(self._view.vertex_nodes[vertex])[0]
        if (
            self._canvas.low[source]
            and self._view.op_of(source) in producers
            and len(self._view.readers(source)) == 1
        ):
            return source
        return None

    def _pin(self, vertex: int) -> None:
        """Makes a vertex stay low, whatever it costs."""
        self.variables[vertex] = LOW

    def _gain(self, vertex: int) -> float | None:
        """The seconds that a vertex saves by being low; None if it is not to be judged."""
        view = self._view
        number = view.vertex_nodes[vertex]
        if vertex != view.base[number] and view.is_float[view.base[number]]:
            return 0.0  # its node is judged by the first float32 vertex
        if self._fusing_producer(vertex) is not None:
            return 0.0
        op = view.kind(number).op
        cost = self._table.cost_of(op, self._sizes.variant(number))
        if cost is None:
            return None if self._canvas.listed[vertex] == ALLOW else 0.0
        if cost.measure == "elements" and self._canvas.config.fused:
            return 0.0
        size = self._sizes.size(number, cost)
        assumed = UNKNOWN_FLOPS if cost.measure == "flops" else UNKNOWN_ELEMENTS
        if self._table.compiled:
            return cost.gain_beyond(assumed if size is None else size, COMPILED_MARGIN)
        if size is not None:
            return cost.gain(size, DOUBT)
        gain = cost.clear_gain(assumed, DOUBT)
        return None if not gain and self._canvas.listed[vertex] == ALLOW else gain

    def _make_links(self) -> list[Link]:
        view, low = self._view, np.frombuffer(bytes(self._canvas.low), bool)
        touched = np.flatnonzero(low[view.sources] | low[view.targets]).tolist()
        sources, targets = view.sources, view.targets
        nodes = np.searchsorted(np.array(view.edge_starts), touched, side="right") - 1
        readers: dict[tuple[str, int], set[int]] = {}
        origin: dict[tuple[str, int], tuple[int, str]] = {}
        taken = [self.variables.get(target, FLOAT32) for target in targets[touched].tolist()]
        for edge, reader, variable in zip(touched, nodes.tolist(), taken, strict=True):
            name = view.nodes[reader].input[edge - view.edge_starts[reader]]
            tensor = view.split(name)
            if tensor in readers:
                readers[tensor].add(variable)
            else:
                readers[tensor] = {variable}
                origin[tensor] = int(sources[edge]), name
        links = []
        for tensor, (source, name) in origin.items():
            producer = self.variables.get(source, FLOAT32)
            others = readers[tensor] - {producer}
            if others and (producer > LOW or others - {FLOAT32, LOW}):
                links.append(Link(producer, tuple(sorted(others)), *self._prices(source, name)))
        return links

    def _prices(self, source: int, tensor: str) -> tuple[int, int]:
        if self._view.op_of(source) == "Const":
            return _CONSTANT_CAST, _CONSTANT_CAST
        elements = self._sizes.elements(tensor)
        return self._cast_prices(UNKNOWN_ELEMENTS if elements is None else elements)

    @functools.lru_cache(maxsize=1024)  # noqa: B019  lives as long as one rewrite
    def _cast_prices(self, elements: int) -> tuple[int, int]:
        curves = (self._table.to_low, self._table.to_float32)
        to_low, to_float32 = (round(curve.at(elements) * _PER_SECOND) for curve in curves)
        return to_low, to_float32


def _loop_groups(view: GraphView) -> list[list[int]]:
    """The vertices at both ends of each back edge of a TensorFlow 1 loop."""
    groups = []
    for number in view.of_op("NextIteration"):
        back = view.base[number] + view.layout(number).out_slots[0]
        groups.append([back, *view.readers(back)])
    return groups
