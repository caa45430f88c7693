"""Readers and producers of vertices, and what can be reached along them."""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence

import numpy as np


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


class Adjacency:
    """Readers and producers of each vertex, over a chosen set of edges."""

    def __init__(self, vertices: int, sources: np.ndarray, targets: np.ndarray) -> None:
        self.successors = Neighbours(vertices, sources, targets)
        self.predecessors = Neighbours(vertices, targets, sources)

    def reach(
        self,
        roots: Sequence[int],
        enter: Callable[[int], object] | bytes | bytearray,
        *,
        forward: bool = False,
        backward: bool = False,
        parents: dict[int, int] | None = None,
    ) -> bytearray:
        """The vertices that paths from the roots lead to, the roots included.

        Args:
            roots: where the paths start.
            enter: for each vertex whether a path may go through it, as one byte each or as a
                function; roots need no leave.
            forward: follow edges to readers.
            backward: follow edges to producers.
            parents: where given, receives for each vertex reached the one before it on a path.

        Returns:
            One byte a vertex, 1 where it is reached.
        """
        vertices = len(self.successors.starts) - 1
        still_open = bytearray(map(bool, map(enter, range(vertices))) if callable(enter) else enter)
        tables = [self.successors] * forward + [self.predecessors] * backward
        flat = [(table.starts, table.flat) for table in tables]
        reached = bytearray(vertices)
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
        return reached
