"""The state of one search for a unit, and the steps that all of its parts take."""

from __future__ import annotations

from collections.abc import Callable, Collection

from graph_passes.patterns.matching import Matcher, NoMatchError

SHAPERS = ("Reshape", "Squeeze", "ExpandDims", "Identity", "StopGradient")
"""Ops that give the elements of their first input as they are."""

ADDS = ("AddV2", "Add")
"""Sums of two tensors."""

SUMS = ("AddN", *ADDS)
"""Sums of any number of tensors."""

PARAMETERS = ("ReadVariableOp", "Identity", "_Arg", "Cast")
"""Ops that make a stored scale or offset."""


class Search:
    """What one search has found so far.

    Attributes:
        m: reads the graph.
        inside: nodes of the unit.
        ends: nodes outside that are fed from inside.
        open: nodes that stay and may be read outside.
        replaced: nodes whose tensors the unit will make.
    """

    def __init__(self, matcher: Matcher) -> None:
        self.m = matcher
        self.inside: set[int] = set()
        self.ends: set[int] = set()
        self.open: set[int] = set()
        self.replaced: set[int] = set()

    def name(self, number: int) -> str:
        """The tensor that a single-output node makes, as its readers write it."""
        return self.m.output(number)

    def only(self, number: int, fits: Callable[[int], bool], what: str) -> int:
        """The one reader of a node that fits."""
        found = [reader for reader in self.m.readers(number) if fits(reader)]
        if len(found) != 1:
            raise NoMatchError(f"found {len(found)} nodes that make {what}, not 1")
        return found[0]

    def shapes_between(self, tensor: str, end: int) -> None:
        """Counts the shape ops on the way back from a tensor to a node as inside."""
        number = self.m.maker(tensor)
        while number != end and self.m.op(number) in SHAPERS:
            self.inside.add(number)
            number = self.m.source(number, 0)

    def one(self, found: list[int], what: str) -> int:
        """The one node of a list; NoMatchError says what is missing or ambiguous otherwise."""
        if len(found) != 1 and len(set(found)) != 1:
            raise NoMatchError(f"found {len(set(found))} nodes that make {what}, not 1")
        return found[0]

    def reading(self, number: int, *ops: str) -> list[int]:
        """The readers of a node that have one of the ops."""
        of_node = self.m.ops
        return [reader for reader in self.m.readers(number) if of_node[reader] in ops]

    def sums_of(self, tensor: str) -> list[int]:
        """The Sum nodes that read a tensor."""
        m = self.m
        return [n for n in self.reading(m.maker(tensor), "Sum") if m.tensor(n, 0) == tensor]

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

    def require_closed(self, preserve: Collection[str], *outputs: int) -> None:
        """Nothing outside may read, fetch or depend on what will no longer be computed.

        Args:
            preserve: names of nodes that must stay.
            outputs: nodes whose tensors the unit will make, and which read what is inside.

        Raises:
            NoMatchError: something does.
        """
        m, known = self.m, self.inside.union(self.ends, outputs)
        names, ops = m.view.names, m.ops
        for number in self.inside | self.replaced | set(outputs):
            if names[number] in preserve:
                raise NoMatchError(f"{names[number]!r} is to be preserved")
        for number in self.inside:
            if ops[number] == "Squeeze":
                continue  # the stored statistics, which the fused op makes as well
            for reader in m.readers(number):
                if reader in known or ops[reader] in ("Shape", "ShapeN"):
                    continue
                if ops[number] in SHAPERS and ops[reader] in SHAPERS:
                    continue
                raise NoMatchError(f"{names[reader]!r} outside the unit reads {names[number]!r}")
