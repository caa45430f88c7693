"""The cheapest choice between float32 and the target dtype for many variables at once.

A *variable* is a set of vertices that get one colour. It has a gain of its own, and *links* tell
what a Cast between a producer and its readers costs. Because every link only punishes
disagreement, the cheapest colouring is a minimum cut (Kolmogorov and Zabih, 2004, "What energy
functions can be minimized via graph cuts?"; Casts that readers share are an auxiliary node each).
Of several cheapest colourings the one with most variables low is taken, which makes the result
independent of any order.

Most variables need no flow: one whose gain or loss is larger than all that its links could cost is
decided at once, which decides others. A maximum flow (Dinic's algorithm) is left for the rest.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence

FLOAT32, LOW = 0, 1
"""The colours, and the two variables that have them from the start."""

_OPEN = -1
_UNBOUNDED = 1 << 62
_WORK_PER_ARC = 50
"""After so many steps for each arc the flow is given up, which bounds the time by the graph's size.
Real networks leave few variables open and take a handful of steps for each."""


@dataclasses.dataclass(frozen=True)
class Link:
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


def cheapest_colours(gains: Sequence[int], links: Sequence[Link]) -> list[int] | None:
    """Colours all variables.

    Args:
        gains: for each variable what it saves by being low, negative for a loss. The first two
            variables have their colour: 0 is float32 and 1 is low.
        links: the links between variables.

    Returns:
        For each variable `FLOAT32` or `LOW`; None if the work got out of hand, which a caller
        takes as "leave everything as it is".
    """
    colours = [FLOAT32, LOW, *[_OPEN] * (len(gains) - 2)]
    _decide_clear_ones(gains, links, colours)
    if _OPEN in colours and not _cut(gains, links, colours):
        return None
    return colours


def total_cost(gains: Sequence[int], links: Iterable[Link], colours: Sequence[int]) -> int:
    """What a colouring costs: all Casts, less the gains of low variables."""
    cost = -sum(gain for gain, colour in zip(gains, colours, strict=True) if colour == LOW)
    for link in links:
        if colours[link.producer] == LOW:
            cost += link.to_float32 * any(colours[r] == FLOAT32 for r in link.readers)
        else:
            cost += link.to_low * any(colours[r] == LOW for r in link.readers)
    return cost


def _decide_clear_ones(gains: Sequence[int], links: Sequence[Link], colours: list[int]) -> None:
    """Colours each variable whose best colour does not depend on those still open."""
    of_variable: list[list[int]] = [[] for _ in gains]
    low_readers, full_readers = [0] * len(links), [0] * len(links)
    for number, link in enumerate(links):
        for variable in (link.producer, *link.readers):
            of_variable[variable].append(number)
        low_readers[number] = LOW in link.readers
        full_readers[number] = FLOAT32 in link.readers

    def bounds(variable: int, number: int) -> tuple[int, int]:
        """The least and the most that being low, not float32, costs at one link."""
        link = links[number]
        others_open = len(link.readers) - low_readers[number] - full_readers[number]
        if variable == link.producer:
            least_up, most_up = _range(full_readers[number], others_open, link.to_float32)
            least_down, most_down = _range(low_readers[number], others_open, link.to_low)
            if not full_readers[number] and not low_readers[number]:
                return -most_down, most_up  # all readers may agree on either colour
            return least_up - most_down, most_up - least_down
        others_open -= 1
        found = []
        if colours[link.producer] != FLOAT32:
            least, most = _range(full_readers[number], others_open, link.to_float32)
            found += [least - link.to_float32, most - link.to_float32]
        if colours[link.producer] != LOW:
            least, most = _range(low_readers[number], others_open, link.to_low)
            found += [link.to_low - most, link.to_low - least]
        return min(found), max(found)

    pending = deque(range(2, len(gains)))
    waiting = bytearray([1]) * len(gains)
    while pending:
        variable = pending.popleft()
        waiting[variable] = 0
        if colours[variable] != _OPEN:
            continue
        least = most = -gains[variable]
        for number in of_variable[variable]:
            low, high = bounds(variable, number)
            least, most = least + low, most + high
        if most > 0 >= least:
            continue
        colours[variable] = LOW if most <= 0 else FLOAT32
        for number in of_variable[variable]:
            link = links[number]
            if variable != link.producer:
                count = low_readers if colours[variable] == LOW else full_readers
                count[number] += 1
                # A second reader of a colour changes no bound, unless it leaves one open.
                still_open = len(link.readers) - low_readers[number] - full_readers[number]
                if count[number] > 1 and still_open > 1:
                    continue
            for other in (link.producer, *link.readers):
                if colours[other] == _OPEN and not waiting[other]:
                    waiting[other] = 1
                    pending.append(other)


def _range(decided: int, undecided: int, price: int) -> tuple[int, int]:
    """The least and the most of a price that is due if any reader has a certain colour."""
    return (price if decided else 0), (price if decided or undecided else 0)


def _cut(gains: Sequence[int], links: Sequence[Link], colours: list[int]) -> bool:
    """Colours what is open by a minimum cut between low (the source) and float32 (the sink)."""
    network = _Network()
    node_of = {FLOAT32: network.add_node(), LOW: network.add_node()}
    sink, source = node_of[FLOAT32], node_of[LOW]
    for variable in range(2, len(gains)):
        if colours[variable] == _OPEN:
            node = node_of[variable] = network.add_node()
            gain = gains[variable]
            network.add_arc(*((source, node) if gain > 0 else (node, sink)), abs(gain))
        else:
            node_of[variable] = node_of[colours[variable]]
    for link in links:
        producer = node_of[link.producer]
        readers = sorted({node_of[reader] for reader in link.readers} - {producer})
        if not readers:
            continue
        if link.to_float32 and producer != sink:
            _add_shared(network, producer, readers, source, sink, link.to_float32, forward=True)
        if link.to_low and producer != source:
            _add_shared(network, producer, readers, sink, source, link.to_low, forward=False)
    if not network.saturate(source, sink):
        return False
    reaches_sink = network.reaching(sink)
    for variable, colour in enumerate(colours):
        if colour == _OPEN:
            colours[variable] = FLOAT32 if reaches_sink[node_of[variable]] else LOW
    return True


def _add_shared(
    network: _Network,
    producer: int,
    readers: list[int],
    agrees: int,
    differs: int,
    price: int,
    *,
    forward: bool,
) -> None:
    """Adds arcs that cost a price once if any reader ends up on the other side of the producer.

    Args:
        network: receives the arcs.
        producer: the producer's node.
        readers: the readers' nodes.
        agrees: the terminal that stands for the producer's side.
        differs: the other terminal.
        price: what to pay.
        forward: whether the producer is on the side of the source.
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
            network.add_arc(*((inner, end) if forward else (end, inner)), _UNBOUNDED)
    network.add_arc(*((producer, inner) if forward else (inner, producer)), price)


class _Network:
    """A flow network with whole-numbered capacities."""

    def __init__(self) -> None:
        self._arcs: list[list[int]] = []
        self._heads: list[int] = []
        self._room: list[int] = []

    def add_node(self) -> int:
        self._arcs.append([])
        return len(self._arcs) - 1

    def add_arc(self, tail: int, head: int, capacity: int) -> None:
        """Adds an arc and its reverse, which is at the next number."""
        for start, end, room in ((tail, head, capacity), (head, tail, 0)):
            self._arcs[start].append(len(self._heads))
            self._heads.append(end)
            self._room.append(room)

    def saturate(self, source: int, sink: int) -> bool:
        """Sends as much as fits from the source to the sink; False if that takes too long."""
        work = _WORK_PER_ARC * (len(self._heads) + 1)
        while work > 0:
            levels = self._levels(source, sink)
            work -= len(self._heads)
            if levels[sink] < 0:
                return True
            work -= self._block(source, sink, levels, work)
        return False

    def reaching(self, sink: int) -> bytearray:
        """For each node whether more could flow from it to the sink."""
        reached = bytearray(len(self._arcs))
        reached[sink] = 1
        pending = [sink]
        while pending:
            for arc in self._arcs[pending.pop()]:
                tail = self._heads[arc]
                if self._room[arc ^ 1] and not reached[tail]:
                    reached[tail] = 1
                    pending.append(tail)
        return reached

    def _levels(self, source: int, sink: int) -> list[int]:
        """For each node its distance from the source over arcs with room, -1 beyond the sink."""
        levels = [-1] * len(self._arcs)
        levels[source] = 0
        pending = deque((source,))
        while pending and levels[sink] < 0:
            node = pending.popleft()
            for arc in self._arcs[node]:
                head = self._heads[arc]
                if self._room[arc] and levels[head] < 0:
                    levels[head] = levels[node] + 1
                    pending.append(head)
        return levels

    def _block(self, source: int, sink: int, levels: list[int], work: int) -> int:
        """Fills every shortest path; gives the number of steps that this took."""
        heads, room = self._heads, self._room
        left = [iter(arcs) for arcs in self._arcs]
        path: list[int] = []
        node, steps = source, 0
        while steps < work:
            steps += 1
            if node == sink:
                flow = min(room[arc] for arc in path)
                full = len(path)
                for position in reversed(range(len(path))):
                    arc = path[position]
                    room[arc] -= flow
                    room[arc ^ 1] += flow
                    if not room[arc]:
                        full = position
                steps += len(path)
                node = heads[path[full] ^ 1]
                del path[full:]
                continue
            for arc in left[node]:
                if room[arc] and levels[heads[arc]] == levels[node] + 1:
                    path.append(arc)
                    node = heads[arc]
                    break
            else:
                if not path:
                    break
                levels[node] = -1
                node = heads[path.pop() ^ 1]
        return steps
