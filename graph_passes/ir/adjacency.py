"""Readers and producers of vertices, and what can be reached along them."""

from __future__ import annotations

import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

_Place = TypeVar("_Place", bound=Hashable)


def walk(
    starts: Iterable[_Place],
    steps: Callable[[_Place], Iterable[_Place]],
    through: Callable[[_Place], object] | None = None,
) -> Iterator[_Place]:
    """Gives some places and all that steps lead to from them, each once, and asked once.

    Args:
        starts: the places to begin with.
        steps: gives for a place the next ones.
        through: tells of a place whether steps are taken from there; all are by default.
    """
    pending = list(dict.fromkeys(starts))
    seen = set(pending)
    while pending:
        place = pending.pop()
        yield place
        for step in steps(place) if through is None or through(place) else ():
            if step not in seen:
                seen.add(step)
                pending.append(step)


class Neighbours:
    """For each vertex the others that edges join it to, in edge order.

    Attributes:
        starts: for each vertex the position of its first neighbour, and the number of all.
        flat: the neighbours of all vertices, one vertex after another.
    """

    def __init__(self, vertices: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Groups the values of edges by their keys, numbers below `vertices`."""
        counts = np.bincount(keys, minlength=vertices)
        starts = np.zeros(vertices + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        # By key, then in edge order: one sort of both as one number is ten times as fast as a
        # stable sort of the keys alone.
        order = np.sort(keys.astype(np.int64) << 32 | np.arange(len(keys))) & 0xFFFFFFFF
        self.starts = array.array("i", starts.tobytes())
        self.flat = array.array("i", values[order].astype(np.int32, copy=False).tobytes())

    def __getitem__(self, vertex: int) -> array.array[int]:
        return self.flat[self.starts[vertex] : self.starts[vertex + 1]]


def in_order(vertices: int, makers: np.ndarray, readers: np.ndarray) -> list[int]:
    """The vertices in an order in which each stands behind what it reads, but those in circles.

    Edges are from the vertices that are read, `makers`, to those that read them.
    """
    left = np.bincount(readers, minlength=vertices).tolist()
    found = [vertex for vertex, count in enumerate(left) if not count]
    behind = Neighbours(vertices, makers, readers)
    for vertex in found:  # which grows
        for reader in behind[vertex]:
            left[reader] -= 1
            if not left[reader]:
                found.append(reader)
    return found


class Adjacency:
    """Readers and producers of each vertex, over a chosen set of edges.

    Many writers and many readers of one thing are joined through *relays*, so that edges are as
    many as the steps between them, not as the pairs. A path runs through relays in one direction:
    each has a number in `successors` and another in `predecessors`.

    Attributes:
        vertices: how many vertices there are; relays are numbered from there on.
        successors: for each vertex what reads it, relays among it.
        predecessors: for each vertex what it reads, relays among it.
    """

    def __init__(
        self,
        vertices: int,
        sources: np.ndarray,
        targets: np.ndarray,
        extra: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Joins sources to targets, and by `extra` vertices or relays to each other."""
        added = np.array(extra, np.int64).reshape(-1, 2)
        relays = max(int(added.max(initial=0)) + 1 - vertices, 0)
        backward = added + relays * (added >= vertices)
        total = vertices + 2 * relays
        self.vertices, self._has_relays = vertices, relays > 0
        self.successors = Neighbours(
            total, np.concatenate([sources, added[:, 0]]), np.concatenate([targets, added[:, 1]])
        )
        self.predecessors = Neighbours(
            total,
            np.concatenate([targets, backward[:, 1]]),
            np.concatenate([sources, backward[:, 0]]),
        )

    def readers(self, vertex: int, passed: set[int] | None = None) -> Sequence[int]:
        """The vertices that read a vertex, itself or through relays.

        Behind relays that were passed nothing is looked for; they receive those that were met.
        """
        return self._ends(self.successors, vertex, passed)

    def producers(self, vertex: int, passed: set[int] | None = None) -> Sequence[int]:
        """The vertices that a vertex reads, as `readers`."""
        return self._ends(self.predecessors, vertex, passed)

    def _ends(self, table: Neighbours, vertex: int, passed: set[int] | None) -> Sequence[int]:
        found = table[vertex]
        if not self._has_relays or not found or max(found) < self.vertices:
            return found
        passed = set() if passed is None else passed
        ends = [step for step in found if step < self.vertices]
        behind: set[int] = set()
        pending = [step for step in found if step >= self.vertices]
        while pending:
            relay = pending.pop()
            if relay not in passed:
                passed.add(relay)
                for step in table[relay]:
                    (behind.add if step < self.vertices else pending.append)(step)
        return ends + sorted(behind)

    def reach(
        self,
        roots: Sequence[int],
        enter: np.ndarray,
        *,
        forward: bool = False,
        backward: bool = False,
        parents: dict[int, int] | None = None,
    ) -> np.ndarray:
        """The vertices that paths from the roots lead to, the roots included.

        Args:
            roots: where the paths start.
            enter: for each vertex whether a path may go through it; bool [vertices]. Roots need
                no leave.
            forward: follow edges to readers.
            backward: follow edges to producers.
            parents: where given, receives for each vertex or relay reached the one before it on a
                path.

        Returns:
            For each vertex whether it is reached; bool [vertices].
        """
        total = len(self.successors.starts) - 1
        still_open = bytearray(enter) + b"\1" * (total - self.vertices)
        tables = [self.successors] * forward + [self.predecessors] * backward
        flat = [(table.starts, table.flat) for table in tables]
        reached = bytearray(total)
        for root in roots:
            reached[root] = 1
            still_open[root] = 0
        stack = list(roots)
        while stack:
            vertex = stack.pop()
            for starts, neighbours in flat:
                for neighbour in neighbours[starts[vertex] : starts[vertex + 1]]:
                    if still_open[neighbour]:
                        still_open[neighbour] = 0
                        reached[neighbour] = 1
                        if parents is not None:
                            parents[neighbour] = vertex
                        stack.append(neighbour)
        return np.frombuffer(reached, bool)[: self.vertices]
