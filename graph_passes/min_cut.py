"""The cheapest choice between float32 and the target dtype for many variables at once.

A *variable* is a set of vertices that get one colour. It has a gain of its own, and *links* tell
what a Cast between a producer and its readers costs. Because every link only punishes
disagreement, the cheapest colouring is a minimum cut (Kolmogorov and Zabih, 2004, "What energy
functions can be minimized via graph cuts?"; Casts that readers share are an auxiliary node each).
Of several cheapest colourings the one with most variables low is taken, which makes the result
independent of any order.

Most variables need no flow: one whose gain or loss is larger than all that its links could cost is
decided at once, which decides others. The rest falls apart into small components. Since networks
repeat their layers, most components are alike, and each kind is solved once, by a maximum flow.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from graph_passes.max_flow import Network

FLOAT32, LOW = 0, 1
"""The colours, and the two variables that have them from the start."""

_OPEN = -1
_UNBOUNDED = 1 << 62
_WORK_PER_END = 100
"""After so many steps for each variable and reader no more flows are sought, which bounds the time
by the graph's size. Large networks take less than ten steps for each, tiny ones up to fifty."""
_SWEEPS = 16
"""How often clear cases are looked for. What is left then is no loss: the flow decides it."""


class Link(NamedTuple):
    """One tensor: who makes it, who reads it, and what a Cast of it costs.

    Attributes:
        producer: a variable.
        readers: variables, each once, without the producer.
        to_low: the price if the producer is float32 and a reader low, in any unit, at least 0.
        to_float32: the price if the producer is low and a reader float32.
    """

    producer: int
    readers: tuple[int, ...]
    to_low: int
    to_float32: int


@dataclasses.dataclass(frozen=True)
class LinkTable:
    """Many links, as columns; all int64.

    Attributes:
        producers: of each link the producer; [links].
        starts: of each link the position of its first reader, and the number of all; [links + 1].
        readers: the readers of all links, one link after another.
        to_low: of each link the price of a Cast to the target dtype; [links].
        to_float32: of each link the price of a Cast to float32; [links].
    """

    producers: np.ndarray
    starts: np.ndarray
    readers: np.ndarray
    to_low: np.ndarray
    to_float32: np.ndarray

    @classmethod
    def of(cls, links: Sequence[Link]) -> LinkTable:
        """The table of some links."""
        columns = (
            [link.producer for link in links],
            [0, *itertools.accumulate(len(link.readers) for link in links)],
            [reader for link in links for reader in link.readers],
            [link.to_low for link in links],
            [link.to_float32 for link in links],
        )
        return cls(*(np.array(column, np.int64) for column in columns))

    def of_rows(self, rows: np.ndarray, names: np.ndarray) -> LinkTable:
        """Some of the links, with other names for the variables."""
        counts = np.diff(self.starts)[rows]
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        places = np.arange(starts[-1]) + np.repeat(self.starts[rows] - starts[:-1], counts)
        return LinkTable(
            names[self.producers[rows]],
            starts,
            names[self.readers[places]],
            self.to_low[rows],
            self.to_float32[rows],
        )

    def key(self) -> tuple[bytes, ...]:
        """The same for tables that are equal."""
        return tuple(column.tobytes() for column in self._columns())

    def to_list(self) -> list[Link]:
        """The links one by one."""
        producers, starts, readers, to_low, to_float32 = (c.tolist() for c in self._columns())
        return [
            Link(producer, tuple(readers[start:end]), down, up)
            for producer, (start, end), down, up in zip(
                producers, itertools.pairwise(starts), to_low, to_float32, strict=True
            )
        ]

    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.producers, self.starts, self.readers, self.to_low, self.to_float32


def cheapest_colours(gains: Sequence[int], links: LinkTable) -> tuple[np.ndarray, int]:
    """Colours all variables.

    Args:
        gains: for each variable what it saves by being low, negative for a loss. The first two
            variables have their colour: 0 is float32 and 1 is low.
        links: the links between variables.

    Returns:
        For each variable `FLOAT32` or `LOW`, int64 [variables]; and how many variables are low
        only because weighing them would have taken too long.
    """
    worth = np.array(gains, np.int64)
    colours = np.full(len(gains), _OPEN)
    colours[[FLOAT32, LOW]] = FLOAT32, LOW
    _decide_clear_ones(worth, links, colours)
    work = _WORK_PER_END * (len(gains) + len(links.readers))
    skipped = 0
    solved: dict[tuple[bytes, ...], list[int]] = {}
    for variables, inside in sorted(_parts(links, colours), key=lambda part: len(part[0])):
        key = worth[variables].tobytes(), *inside.key()
        if key not in solved:
            solved[key], work = _cut([0, 0, *worth[variables].tolist()], inside, work)
        skipped += 0 if work else len(variables)
        colours[variables] = solved[key][2:]
    return colours, skipped


def total_cost(gains: Sequence[int], links: Iterable[Link], colours: Sequence[int]) -> int:
    """What a colouring costs: all Casts, less the gains of low variables."""
    cost = -sum(gain for gain, colour in zip(gains, colours, strict=True) if colour == LOW)
    for link in links:
        if colours[link.producer] == LOW:
            cost += link.to_float32 * any(colours[r] == FLOAT32 for r in link.readers)
        else:
            cost += link.to_low * any(colours[r] == LOW for r in link.readers)
    return cost


def _decide_clear_ones(gains: np.ndarray, links: LinkTable, colours: np.ndarray) -> None:
    """Colours each variable whose best colour does not depend on those still open.

    Args:
        gains: of the variables; int64 [variables].
        links: between them.
        colours: receives the colours; int64 [variables], `_OPEN` where there is none.
    """
    count, of_link = len(gains), np.repeat(np.arange(len(links.producers)), np.diff(links.starts))
    down, up = links.to_low, links.to_float32
    for _ in range(_SWEEPS):
        makers, readers = colours[links.producers], colours[links.readers]
        low, full, still_open = (
            np.bincount(of_link[readers == colour], minlength=len(makers))
            for colour in (LOW, FLOAT32, _OPEN)
        )
        # What being low, not float32, costs a producer at least and at most.
        least = np.where(full > 0, up, 0) - np.where(low + still_open > 0, down, 0)
        most = np.where(full + still_open > 0, up, 0) - np.where(low > 0, down, 0)
        # The same for a reader, below a producer that is low and below one that is float32.
        others = still_open - 1
        low_least, low_most = -np.where(full > 0, 0, up), -np.where(full + others > 0, 0, up)
        full_least, full_most = np.where(low + others > 0, 0, down), np.where(low > 0, 0, down)
        cases = makers == FLOAT32, makers == LOW
        reads_least = np.select(cases, (full_least, low_least), np.minimum(low_least, full_least))
        reads_most = np.select(cases, (full_most, low_most), np.maximum(low_most, full_most))
        lower, upper = (
            np.bincount(links.producers, of_producer, count)
            + np.bincount(links.readers, of_reader[of_link], count)
            - gains
            for of_producer, of_reader in ((least, reads_least), (most, reads_most))
        )
        is_open = colours == _OPEN
        colours[is_open & (upper <= 0)] = LOW
        colours[is_open & (lower > 0)] = FLOAT32
        if np.array_equal(is_open, colours == _OPEN):
            return


def _parts(links: LinkTable, colours: np.ndarray) -> Iterator[tuple[np.ndarray, LinkTable]]:
    """The parts of what is open that have no link with each other.

    Args:
        links: between the variables.
        colours: of the variables, `_OPEN` where there is none; int64 [variables].

    Returns:
        For each part its variables, in order, and its links, in which they are numbered from 2.
    """
    counts = np.diff(links.starts)
    ends = np.concatenate((links.producers, links.readers))
    of_end = np.concatenate((np.arange(len(counts)), np.repeat(np.arange(len(counts)), counts)))
    is_open = colours[ends] == _OPEN
    part_of, part_of_link = _connected(len(colours), len(counts), ends[is_open], of_end[is_open])
    variables = np.flatnonzero(colours == _OPEN)
    variables = variables[np.argsort(part_of[variables], kind="stable")]
    names, first = np.unique(part_of[variables], return_index=True)
    last = np.append(first[1:], len(variables))
    local = colours.copy()
    local[variables] = np.arange(2, len(variables) + 2) - np.repeat(first, last - first)
    rows = np.argsort(part_of_link, kind="stable")
    row_starts, row_ends = (
        np.searchsorted(part_of_link[rows], names, side) for side in ("left", "right")
    )
    for part in range(len(names)):
        inside = links.of_rows(rows[row_starts[part] : row_ends[part]], local)
        yield variables[first[part] : last[part]], inside


def _connected(
    variables: int, links: int, ends: np.ndarray, of_end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Finds what hangs together.

    Args:
        variables: how many variables there are.
        links: how many links there are.
        ends: the variables at the ends of links.
        of_end: for each of them the link.

    Returns:
        For each variable the lowest of those that it hangs together with; the same for each link,
        -1 for one without ends.
    """
    name = np.arange(variables)
    while True:
        of_link = np.full(links, variables)
        np.minimum.at(of_link, of_end, name[ends])
        lower = name.copy()
        # Both the variable and what it has been named after get the lower name.
        np.minimum.at(lower, ends, of_link[of_end])
        np.minimum.at(lower, name[ends], of_link[of_end])
        lower = lower[lower]
        if np.array_equal(lower, name):
            return name, np.where(of_link == variables, -1, of_link)
        name = lower


def _cut(gains: Sequence[int], links: LinkTable, work: int) -> tuple[list[int], int]:
    """Colours the variables by a minimum cut between low (the source) and float32 (the sink).

    Args:
        gains: of the variables.
        links: between them.
        work: after how many steps to give up.

    Returns:
        For each variable its colour, `LOW` for all if that takes too long; and how many steps are
        left.
    """
    network = Network(len(gains))
    for variable in range(2, len(gains)):
        gain = gains[variable]
        ends = (LOW, variable) if gain > 0 else (variable, FLOAT32)
        network.add_arc(*ends, abs(gain))
    for link in links.to_list():
        producer, readers = link.producer, sorted({*link.readers} - {link.producer})
        if link.to_float32 and producer != FLOAT32:
            _add_shared(network, producer, readers, FLOAT32, LOW, link.to_float32)
        if link.to_low and producer != LOW:
            _add_shared(network, producer, readers, LOW, FLOAT32, link.to_low)
    work = network.saturate(LOW, FLOAT32, work)
    if not work:
        return [FLOAT32, *[LOW] * (len(gains) - 1)], 0
    reaches_float32 = network.reaching(FLOAT32)
    return [FLOAT32 if reached else LOW for reached in reaches_float32[: len(gains)]], work


def _add_shared(
    network: Network, producer: int, readers: list[int], differs: int, agrees: int, price: int
) -> None:
    """Adds arcs that cost a price once if any reader ends up on the other side of the producer.

    Args:
        network: receives the arcs.
        producer: the producer's node.
        readers: the readers' nodes.
        differs: the side that the price is for if the producer is not on it.
        agrees: the other side.
        price: what to pay.
    """
    if differs in readers:
        ends, inner = [differs], differs
    else:
        ends = [reader for reader in readers if reader != agrees]
        inner = ends[0] if len(ends) == 1 else -1
    if not ends:
        return
    if inner < 0:
        inner = network.add_node()
        for end in ends:
            network.add_arc(*((inner, end) if agrees == LOW else (end, inner)), _UNBOUNDED)
    network.add_arc(*((producer, inner) if agrees == LOW else (inner, producer)), price)
