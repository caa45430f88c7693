"""The state of one search for a unit, and the steps that all of its parts take."""

from __future__ import annotations

from collections.abc import Callable, Collection

from graph_passes.rewriter.matcher import Matcher, NoMatchError

SHAPERS = ("Reshape", "Squeeze", "ExpandDims", "Identity", "StopGradient")
"""Ops that give the elements of their first input as they are."""

ADDS = ("AddV2", "Add")
"""Sums of two tensors."""

SUMS = ("AddN", *ADDS)
"""Sums of any number of tensors."""


class Search:
    """What one search has found so far.

    Attributes:
        m: reads the graph.
        inside: nodes of the unit.
    """

    def __init__(self, matcher: Matcher) -> None:
        self.m = matcher
        self.inside: set[int] = set()

    def name(self, number: int) -> str:
        """The tensor that a single-output node makes, as its readers write it."""
        return self.m.output(number)

    def only(self, number: int, fits: Callable[[int], bool], what: str) -> int:
        """The one reader of a node that fits."""
        found = [reader for reader in self.m.readers(number) if fits(reader)]
        if len(found) != 1:
            raise NoMatchError(f"found {len(found)} nodes that make {what}, not 1")
        return found[0]

    def one(self, found: list[int], what: str) -> int:
        """The one node of a list; NoMatchError says what is missing or ambiguous otherwise."""
        if len(found) != 1 and len(set(found)) != 1:
            raise NoMatchError(f"found {len(set(found))} nodes that make {what}, not 1")
        return found[0]

    def reading(self, number: int, *ops: str) -> list[int]:
        """The readers of a node that have one of the ops."""
        of_node = self.m.ops
        return [reader for reader in self.m.readers(number) if of_node[reader] in ops]

    def all_behind(
        self,
        start: int,
        passes: Collection[str],
        fits: Callable[[int], bool],
        came_from: dict[int, int],
    ) -> list[int]:
        """The fitting nodes behind a node and ops of some types; records the way to each."""
        m, pending, found = self.m, [start], []
        while pending:
            last = pending.pop()
            for reader in m.readers(last):
                if reader in came_from:
                    continue
                if fits(reader):
                    found.append(reader)
                    came_from[reader] = last
                elif m.ops[reader] in passes:
                    came_from[reader] = last
                    pending.append(reader)
        return found

    def behind(
        self,
        start: int,
        fits: Callable[[int], bool],
        what: str,
        passed: set[int],
        passes: Collection[str] = SHAPERS,
    ) -> int:
        """The one fitting node behind a node and ops to pass, which are added to `passed`."""
        came_from: dict[int, int] = {}
        found = self.one(self.all_behind(start, passes, fits, came_from), what)
        last = came_from[found]
        while last != start:
            passed.add(last)
            last = came_from[last]
        return found
