"""Readers and producers of vertices, and what can be reached along them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


class Adjacency:
    """Readers and producers of each vertex, over a chosen set of edges."""

    def __init__(self, vertices: int, sources: np.ndarray, targets: np.ndarray) -> None:
        self.successors = _neighbours(vertices, sources, targets)
        self.predecessors = _neighbours(vertices, targets, sources)

    def reach(
        self,
        roots: Sequence[int],
        enter: Callable[[int], object] | Sequence[int],
        *,
        forward: bool = False,
        backward: bool = False,
        parents: dict[int, int] | None = None,
    ) -> bytearray:
        """The vertices that paths from the roots lead to, the roots included.

        Args:
            roots: where the paths start.
            enter: for each vertex whether a path may go through it; roots need no leave.
            forward: follow edges to readers.
            backward: follow edges to producers.
            parents: where given, receives for each vertex reached the one before it on a path.

        Returns:
            One byte a vertex, 1 where it is reached.
        """
        may_enter = enter.__getitem__ if not callable(enter) else enter
        tables: tuple[list[Sequence[int]], ...]
        if forward and backward:
            tables = (self.successors, self.predecessors)
        else:
            tables = (self.successors,) if forward else (self.predecessors,)
        reached = bytearray(len(self.successors))
        for root in roots:
            reached[root] = 1
        stack = list(roots)
        while stack:
            vertex = stack.pop()
            for table in tables:
                for neighbour in table[vertex]:
                    if not reached[neighbour] and may_enter(neighbour):
                        reached[neighbour] = 1
                        if parents is not None:
                            parents[neighbour] = vertex
                        stack.append(neighbour)
        return reached


def _neighbours(vertices: int, keys: np.ndarray, values: np.ndarray) -> list[Sequence[int]]:
    """For each vertex the values of the edges whose key it is, in edge order."""
    table: list[Sequence[int]] = [()] * vertices
    if not len(keys):
        return table
    order = np.argsort(keys, kind="stable")
    keys, flat = keys[order], values[order].tolist()
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    ends = np.append(starts[1:], len(keys)).tolist()
    for vertex, start, end in zip(keys[starts].tolist(), starts.tolist(), ends, strict=True):
        table[vertex] = flat[start:end]
    return table
