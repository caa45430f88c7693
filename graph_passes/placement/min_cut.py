"""The cheapest choice between float32 and the target dtype for many variables at once.

A *variable* is a set of vertices that get one colour. It has a gain of its own, and *links* tell
what a Cast between a producer and its readers costs. Because every link only punishes
disagreement, the cheapest colouring is a minimum cut between low, the source, and float32, the sink
(Kolmogorov and Zabih, 2004, "What energy functions can be minimized via graph cuts?"; Casts that
readers share are an auxiliary node each). Of several cheapest colourings the one with most
variables low is taken, which makes the result independent of any order.

What has its colour from the start divides the network into small parts. Since networks repeat their
layers, most of them are alike, and each kind is cut once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from graph_passes.placement.max_flow import sink_side

FLOAT32, LOW = 0, 1
"""The colours, and the two variables that have them from the start."""

_UNBOUNDED = 1 << 62
_WAVES = 1000
"""After so many waves of flow a part is given up, which bounds the time by the graph's size. The
parts of real networks take less than ten."""


@dataclasses.dataclass(frozen=True)
class LinkTable:
    """Tensors: who makes each, who reads it, and what a Cast of it costs. Columns of int64.

    Attributes:
        producers: of each link the variable that makes the tensor; [links].
        starts: of each link the position of its first reader, and the number of all; [links + 1].
        readers: the variables that read the tensors, one link after another, at least one for each
            and each once for one link, the producer not among them.
        to_low: of each link the price, at least 0 in any unit, if the producer is float32 and a
            reader low; [links].
        to_float32: of each link the price if the producer is low and a reader float32; [links].
    """

    producers: np.ndarray
    starts: np.ndarray
    readers: np.ndarray
    to_low: np.ndarray
    to_float32: np.ndarray


def cheapest_colours(gains: np.ndarray, links: LinkTable) -> tuple[np.ndarray, int]:
    """Colours all variables.

    Args:
        gains: for each variable what it saves by being low, negative for a loss; int64 [variables].
            The first two variables have their colour: 0 is float32 and 1 is low.
        links: the links between variables.

    Returns:
        For each variable `FLOAT32` or `LOW`, int64 [variables]; and how many variables are low
        only because weighing them would have taken too long.
    """
    excess, arcs = _network(gains, links)
    colours = np.where(excess < 0, FLOAT32, LOW)
    colours[[FLOAT32, LOW]] = FLOAT32, LOW
    skipped = 0
    solved: dict[tuple[bytes, bytes], list[int] | None] = {}
    for nodes, inside in _parts(excess, arcs):
        key = excess[nodes].tobytes(), inside.tobytes()
        if key not in solved:
            solved[key] = sink_side(excess[nodes].tolist(), inside, _WAVES)
        float32 = solved[key]
        colours[nodes] = LOW
        if float32 is None:
            skipped += int(np.count_nonzero(nodes < len(gains)))
        else:
            colours[nodes[float32]] = FLOAT32
    return colours[: len(gains)], skipped


def _network(gains: np.ndarray, links: LinkTable) -> tuple[np.ndarray, np.ndarray]:
    """Makes the flow network whose cuts cost what colourings do.

    An arc has to be paid for if its tail is low and its head float32.

    Returns:
        For each node, variables first, the excess as `max_flow.sink_side` takes it, int64 [nodes];
        and the arcs between nodes other than the first two, int64 [arcs, 4].
    """
    counts, first = np.diff(links.starts), links.starts[:-1]
    of_reader = np.repeat(np.arange(len(counts)), counts)
    alone, shared = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
    columns = links.producers, links.readers[first], links.to_float32, links.to_low
    arcs = [[column[alone] for column in columns]]
    nodes = len(gains)
    for side, prices in ((FLOAT32, links.to_float32), (LOW, links.to_low)):
        # A price is due once if the producer is not on this side and any of the readers is.
        due = shared[links.producers[shared] != side]
        is_met = np.bincount(of_reader[links.readers == side], minlength=len(counts)) > 0
        new = due[~is_met[due]]
        inner = np.full(len(counts), side)
        inner[new] = np.arange(nodes, nodes + len(new))
        nodes += len(new)
        ends = np.flatnonzero(inner[of_reader] > LOW)
        tails = np.concatenate((links.producers[due], inner[of_reader[ends]]))
        heads = np.concatenate((inner[due], links.readers[ends]))
        there = np.concatenate((prices[due], np.full(len(ends), _UNBOUNDED)))
        back = np.zeros_like(there)
        capacities = (there, back) if side == FLOAT32 else (back, there)
        arcs.append([tails, heads, *capacities])
    tails, heads, there, back = map(np.concatenate, zip(*arcs, strict=True))
    excess = np.zeros(nodes, np.int64)
    excess[: len(gains)] = gains
    # An arc to a variable that has its colour is a gain or a loss of the other one.
    for ends, others, gain, loss in ((heads, tails, there, back), (tails, heads, back, there)):
        np.add.at(excess, ends, np.where(others == LOW, gain, 0))
        np.subtract.at(excess, ends, np.where(others == FLOAT32, loss, 0))
    is_open = np.minimum(tails, heads) > LOW
    return excess, np.stack((tails, heads, there, back), axis=1)[is_open]


def _parts(excess: np.ndarray, arcs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The parts of a network that have no arc to each other. What nobody wants float32 is left out.

    Yields:
        For each part with arcs its nodes, in order, and the arcs, in which they go by their
        position.
    """
    part_of = connected(len(excess), arcs[:, 0], arcs[:, 1])
    lacks, has_arcs = np.zeros((2, len(excess)), bool)  # of parts
    lacks[part_of[excess < 0]] = True
    arcs = arcs[lacks[part_of[arcs[:, 0]]]]
    arcs = arcs[np.argsort(part_of[arcs[:, 0]], kind="stable")]
    of_arc = part_of[arcs[:, 0]]
    has_arcs[of_arc] = True
    nodes = np.flatnonzero(has_arcs[part_of])
    nodes = nodes[np.argsort(part_of[nodes], kind="stable")]
    ranges = []
    for parts in (part_of[nodes], of_arc):
        starts = np.flatnonzero(np.diff(parts, prepend=-1))
        ranges.append(itertools.pairwise((*starts.tolist(), len(parts))))
    place = np.empty(len(excess), np.int64)
    for (start, end), (first, last) in zip(*ranges, strict=True):
        inside = nodes[start:end]
        place[inside] = np.arange(end - start)
        local = arcs[first:last]
        local[:, :2] = place[local[:, :2]]
        yield inside, local


def connected(nodes: int, tails: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """For each node the lowest of those that arcs connect it to, itself included; int64 [nodes]."""
    name = np.arange(nodes)
    while True:
        lower = name.copy()
        lowest = np.minimum(name[tails], name[heads])
        # What a node has been named after gets the lower name, and passes it on.
        np.minimum.at(lower, name[tails], lowest)
        np.minimum.at(lower, name[heads], lowest)
        lower = lower[lower]
        if np.array_equal(lower, name):
            return name
        name = lower
