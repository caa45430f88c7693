"""What is painted as a problem for a minimum cut: vertices with gains, tensors with Cast prices.

Whichever prices there are (measured times, or bytes), what must have one colour is decided as one:
the ends of a tensor list, both ends of a loop's back edge, an op that TensorFlow fuses into its
producer, a pooling and its gradient. Nothing is painted that was not painted before, so no rule
about accuracy is touched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from graph_passes.coloring.state import ALLOW, Coloring
from graph_passes.coloring.v1_loops import back_edges
from graph_passes.ops.reasons import Reason
from graph_passes.placement.min_cut import (
    FLOAT32,
    LOW,
    LinkTable,
    cheapest_colours,
    connected,
)

_LOGGER = logging.getLogger(__name__)

# Folded into the constant by TensorFlow, or made once for all rounds of a loop, but one step dearer
# than no Cast at all.
_CONSTANT_CAST = 1
_PRODUCTS = frozenset(("Conv2D", "Conv3D", "DepthwiseConv2dNative", "MatMul"))
_FUSED_INTO = {
    **dict.fromkeys(("BiasAdd", "Relu", "Relu6", "Elu"), _PRODUCTS),
    "LeakyRelu": _PRODUCTS - {"DepthwiseConv2dNative"},
    **dict.fromkeys(("Tanh", "Sigmoid"), frozenset(("MatMul",))),
}
"""BiasAdd and the activations behind it -> the products that TensorFlow computes them with, as
partition graphs of TensorFlow 2.17 and 2.21 have it."""


class Prices(Protocol):
    """What the two colours cost, in one unit of the caller's choice."""

    def gains(self, numbers: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What nodes save by being low, and which of them stay low whatever it costs.

        Args:
            numbers: of the nodes; [n].
            codes: the codes of their lists; [n].

        Returns:
            int64 [n], and bool [n].
        """

    def casts(self, tensors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The prices of Casts to the target dtype and of those to float32.

        Args:
            tensors: their numbers, see `GraphView.tensors`; [n].

        Returns:
            int64 [n] each.
        """


def keep_cheap_ones(coloring: Coloring, prices: Prices, reason: Reason) -> None:
    """Takes the colour from the vertices that are cheaper in float32, Casts included."""
    bound = (*coloring.clusters, *back_edges(coloring.view))
    problem = _Problem(coloring, prices, bound)
    colours, skipped = cheapest_colours(problem.gains, problem.links)
    if skipped:
        _LOGGER.warning(
            "Costs are left out of account for %d ops of a graph of %d nodes: weighing them "
            "against each other would take too long.",
            skipped,
            len(coloring.view.nodes),
        )
    coloring.erase(problem.vertices[colours[problem.variables] == FLOAT32].tolist(), reason)
    low = coloring.is_low
    if not coloring.lists.force_all and not (low & (coloring.list_codes == ALLOW)).any():
        # Everything else went low for the sake of a product, and none is left.
        coloring.erase(np.flatnonzero(low).tolist(), reason)


class _Problem:
    """The painted vertices as variables, and the tensors between them as links.

    Attributes:
        vertices: the painted vertices; int64 [painted].
        variables: for each of them its variable; int64 [painted].
        gains: for each variable what it saves by staying low; int64 [variables].
        links: the tensors that may need a Cast.
    """

    def __init__(self, coloring: Coloring, prices: Prices, bound: Iterable[Sequence[int]]) -> None:
        self._coloring = coloring
        self._view = coloring.view
        self._prices = prices
        self.vertices = np.flatnonzero(coloring.is_low)
        followers = self._followers()
        roots = self._merged(bound, followers)[self.vertices]
        gains, stays_low = self._gains(followers)
        is_open = np.zeros(len(coloring.low), bool)
        is_open[roots] = True
        is_open[roots[stays_low]] = False
        self.variables = np.where(is_open, LOW + np.cumsum(is_open), LOW)[roots]
        self.gains = np.zeros(LOW + 1 + np.count_nonzero(is_open), np.int64)
        np.add.at(self.gains, self.variables, gains)
        self.links = self._make_links()

    def _followers(self) -> dict[int, int]:
        """Vertex -> the vertex of the op that TensorFlow computes this one together with."""
        view, low, found = self._view, self._coloring.low, {}
        readers = np.bincount(view.sources, minlength=len(low))
        for number in view.of_op(*_FUSED_INTO):
            vertex, op = view.base[number], view.op_names[number]
            source = product = view.producers(number)[0]
            if not (low[vertex] and low[source] and readers[source] == 1):
                continue
            if op != "BiasAdd":
                if view.op_of(source) != "BiasAdd":
                    continue
                product = view.producers(view.vertex_nodes[source])[0]
            if view.op_of(product) in _FUSED_INTO[op]:
                found[vertex] = source
        return found

    def _merged(self, bound: Iterable[Sequence[int]], followers: Mapping[int, int]) -> np.ndarray:
        """For each vertex the one that stands for its group, itself outside of any; [vertices]."""
        pairs = [(group[0], vertex) for group in bound for vertex in group[1:]]
        ends = np.array([*followers.items(), *pairs], np.int64).reshape(-1, 2)
        is_low = self._coloring.is_low
        return connected(len(is_low), *ends[is_low[ends].all(axis=1)].T)

    def _gains(self, followers: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """What painted vertices save by being low, and which stay so whatever it costs."""
        view, vertices = self._view, self.vertices
        numbers = np.asarray(view.vertex_nodes)[vertices]
        # A node is judged once, by its first vertex if that is float32.
        first = np.asarray(view.base)[numbers]
        is_judged = (vertices == first) | ~view.is_float[first]
        is_judged[np.searchsorted(vertices, [*followers])] = False
        gains, stays_low = np.zeros(len(vertices), np.int64), np.zeros(len(vertices), bool)
        gains[is_judged], stays_low[is_judged] = self._prices.gains(
            numbers[is_judged], self._coloring.list_codes[vertices[is_judged]]
        )
        if view.rounds is not None:
            gains *= view.rounds[numbers]
        return gains, stays_low

    def _make_links(self) -> LinkTable:
        view = self._view
        variable_of = np.zeros(len(view.dtypes), np.int64)
        variable_of[self.vertices] = self.variables
        makers, readers = variable_of[view.sources], variable_of[view.targets]
        crossing = np.flatnonzero(makers != readers)
        tensors, readers = np.asarray(view.tensors)[crossing], readers[crossing]
        order = np.lexsort((readers, tensors))
        tensors, makers, readers = tensors[order], makers[crossing][order], readers[order]
        is_new = _differ(tensors)
        once = is_new | _differ(readers)
        tensors, makers, readers, is_new = tensors[once], makers[once], readers[once], is_new[once]
        firsts = np.flatnonzero(is_new)
        of_row = np.cumsum(is_new) - 1
        is_open = np.zeros(len(firsts), bool)
        is_open[of_row[np.maximum(makers, readers) > LOW]] = True
        kept = is_open[of_row]
        return LinkTable(
            makers[firsts[is_open]],
            np.append(np.flatnonzero(is_new[kept]), kept.sum()),
            readers[kept],
            *self._casts(tensors[firsts[is_open]]),
        )

    def _casts(self, tensors: np.ndarray) -> np.ndarray:
        """The prices of Casts to the target dtype, and of those to float32; int64 [2, tensors]."""
        view, config = self._view, self._coloring.config
        makers = tensors % len(view.nodes)
        stored = ("Const", *(("ReadVariableOp",) * config.stores_weights))
        has_price = ~view.is_of_node_type(lambda node_type: node_type.op in stored)[makers]
        if view.unchanged and config.has_rule("loop-hoisting"):
            has_price &= ~np.isin(makers, [*view.unchanged])
        prices = np.full((2, len(tensors)), _CONSTANT_CAST)
        prices[:, has_price] = self._prices.casts(tensors[has_price])
        if view.rounds is not None:
            prices[:, has_price] *= view.rounds[makers[has_price]]
        return prices


def _differ(values: np.ndarray) -> np.ndarray:
    """For each value whether it is another than the one before; bool."""
    differ = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=differ[1:])
    return differ
