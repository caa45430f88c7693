"""The order in which the nodes of a graph can run."""

from __future__ import annotations

import numpy as np

from graph_passes.ir.adjacency import in_order
from graph_passes.ir.graph_view import GraphView
from graph_passes.ir.indexing import InvalidGraphError

_STEP = 2.0**-16
"""How far behind what it reads a node that is out of order counts as standing."""
_MOST_ROUNDS = 64
"""Longer chains of nodes that are out of order are rare."""


def require_acyclic(view: GraphView) -> None:
    """Checks that no node reads itself, but by the back edge of a loop of TensorFlow 1.

    Raises:
        InvalidGraphError: nodes read each other in a circle; the message names one of them.
    """
    makers, readers = _forward_edges(view)
    stuck = without_order(makers, readers, np.arange(len(view.nodes), dtype=np.float64))
    if stuck:
        name = view.names[min(stuck)]
        raise InvalidGraphError(f"node {name!r} reads what is made of its own output")


def order_edges(view: GraphView) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of nodes of which the first runs before the second; int32 [pairs] each."""
    makers, readers = _forward_edges(view)
    awaited, waiting = view.control_edges
    return np.concatenate([makers, awaited]), np.concatenate([readers, waiting])


def _forward_edges(view: GraphView) -> tuple[np.ndarray, np.ndarray]:
    """Maker and reader of each tensor, but of those that go round a loop of TensorFlow 1."""
    makers = np.asarray(view.maker_nodes)
    is_back = np.zeros(len(view.nodes) + 1, bool)  # the maker of number -1 is not known
    is_back[view.of_op("NextIteration")] = is_back[-1] = True
    kept = ~is_back[makers]
    return makers[kept], view.edge_readers[kept]


def without_order(makers: np.ndarray, readers: np.ndarray, place: np.ndarray) -> set[int]:
    """The nodes that cannot stand behind what they read: those in circles, and all behind them.

    The nodes are put in an order in which each stands behind what it reads, starting from one that
    is right but for a few. Where that takes many steps, all are counted.

    Args:
        makers: for each edge the node that is read.
        readers: for each edge the node that reads it.
        place: for each node where it stands; changed to where it stands in that order, if it
            can. float64 [nodes].
    """
    for _ in range(_MOST_ROUNDS):
        (wrong,) = (place[makers] >= place[readers]).nonzero()
        if not len(wrong):
            return set()
        if len(wrong) > len(place) // 2 + 64:
            break
        np.maximum.at(place, readers[wrong], place[makers[wrong]] + _STEP)
    order = in_order(len(place), makers, readers)
    place[order] = np.arange(len(order))
    return set(range(len(place))).difference(order)
