"""The axes along which the elements of a normalization share a statistic, and what follows.

Sums over them are told from sums over others, and the number of elements along them from other
divisors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from graph_passes.ir.graph_view import Shape
from graph_passes.rewriter.matcher import SPREADS, Matcher
from graph_passes.units.normalization.statistics import Statistics


class UnitAxes:
    """The axes of one unit's x.

    Attributes:
        shape: the static shape of x, None where it is not known.
        own: the axes of the statistics, those left out along which x is known to have one element.
        is_assumed: whether the axes of a sum, or a count, could not be told for want of shapes.
    """

    def __init__(
        self, matcher: Matcher, statistics: Statistics, axes: Iterable[int], shape: Shape | None
    ) -> None:
        """As `UnitAlgebra` takes them."""
        self._m, self._statistics, self.shape = matcher, statistics, shape
        self.own = self.counted(axes)
        self.is_assumed = False

    def counted(self, axes: Iterable[int]) -> frozenset[int]:
        """Axes of x, those left out along which it is known to have one element."""
        return frozenset(axes) if self.shape is None else self._without_single(axes, self.shape)

    def is_single(self, tensor: str, axes: Iterable[int]) -> bool:
        """Whether a tensor is known to have no more than one element along some axes of x."""
        shape = self._m.shape_of(tensor)
        known = shape is not None and self.shape is not None
        return known and is_single(shape, len(self.shape), axes)  # type: ignore[arg-type]

    def keeps_places(self, number: int, *, must_show: bool) -> bool:
        """Whether an op that gives the elements of a tensor leaves each on its axis.

        It may add and drop axes of size 1, and spread what has one element along an axis.

        Args:
            number: the op.
            must_show: whether sizes must show it, or need only not show the contrary.
        """
        new, old = self._m.shape(number), self._m.shape_of(self._m.tensor(number, 0))
        if must_show and self._m.ops[number] == "Reshape":
            before, after = ([n for n in s or (None, None) if n != 1] for s in (old, new))
            return before == after and before.count(None) < 2
        return old is None or new is None or _keeps_places(old, new, self._m.ops[number] in SPREADS)

    def of_sum(self, number: int) -> frozenset[int]:
        """The axes that a Sum is over, without those of size 1; taken for `own` if not known."""
        axes = self._of_sum(number)
        self.is_assumed |= axes is None
        return self.own if axes is None else axes

    def _of_sum(self, number: int) -> frozenset[int] | None:
        m = self._m
        maker = m.makers(number)[1]
        if self.shape is None:
            return None
        if (axes := m.numbers_at(number, 1)) is not None:
            own = m.shape_of(m.tensor(number, 0))
            if own is None:
                return None
            behind = len(self.shape) - len(own)
            return self._without_single([axis % len(own) + behind for axis in axes], own)
        if m.ops[maker] != "BroadcastGradientArgs":
            return None
        shapes = [self._shape_held_by(tensor) for tensor in m.inputs(maker)]
        port = m.view.split(m.tensor(number, 1))[1]
        one, other = shapes[port], shapes[1 - port]
        if one is None or other is None:
            return None
        pairs = list(zip(one, other, strict=True))
        if any(a is None and b not in (None, 1) for a, b in pairs):
            return None  # of one element, perhaps
        return frozenset(axis for axis, (a, b) in enumerate(pairs) if a == 1 and b != 1)

    def _without_single(self, axes: Iterable[int], shape: Shape) -> frozenset[int]:
        """Axes counted from 0, those left out along which a tensor has one element."""
        rank = len(self.shape or ())
        behind = rank - len(shape)
        counted = (axis % rank for axis in axes)
        return frozenset(a for a in counted if a < behind or shape[a - behind] != 1)

    def _shape_held_by(self, tensor: str) -> Shape | None:
        """The shape whose sizes a tensor holds, with as many axes as x has."""
        m = self._m
        maker = m.maker(tensor)
        rank = len(self.shape or ())
        shape: Shape | None = None
        if m.ops[maker] == "Const":
            shape = tuple(m.constant(tensor).ravel().tolist())
        elif m.ops[maker] == "Shape":
            shape = m.shape_of(m.tensor(maker, 0))
        if shape is None or len(shape) > rank:
            return None
        return (1,) * (rank - len(shape)) + tuple(shape)

    def is_count(self, number: int) -> bool:
        """Whether a node makes the number of elements behind a statistic."""
        m = self._m
        if number in self._statistics.counts:
            return True
        if m.ops[number] == "Const":
            value = m.constant(m.output(number))
            return value.size == 1 and self._may_be_count(value.item())
        return m.ops[number] == "Cast" and self._counts_elements(m.source(number, 0))

    def _may_be_count(self, value: float) -> bool:
        """Whether a number is that of the elements of a statistic, as far as their sizes tell."""
        sizes = [None if self.shape is None else self.shape[axis] for axis in self.own]
        known = math.prod(size for size in sizes if size is not None)
        if None not in sizes:
            return value == known
        may_be = known > 0 and value % known == 0
        self.is_assumed |= may_be
        return may_be

    def _counts_elements(self, number: int) -> bool:
        """Whether a node multiplies the sizes of the statistics' axes when the graph runs."""
        m = self._m
        if m.op(number) != "Prod" or m.op(m.source(number, 0)) != "GatherV2":
            return False
        gathered = m.source(number, 0)
        axes = m.source(gathered, 1)
        if m.op(m.source(gathered, 0)) != "Shape" or m.op(axes) != "FloorMod":
            return False
        given = m.shape_of(m.tensor(m.source(gathered, 0), 0))
        if given is None or self.shape is None:
            self.is_assumed = True
            return True
        if given != self.shape:
            return False
        rank = len(self.shape)
        summed, own = m.source(axes, 0), {axis % rank for axis in self._statistics.axes}
        held = (m.numbers_at(summed, port) for port in range(len(m.inputs(summed))))
        return any(found is not None and {axis % rank for axis in found} == own for found in held)


def is_single(shape: Shape, rank: int, axes: Iterable[int]) -> bool:
    """Whether a tensor has one element along some axes of another of some rank."""
    behind = rank - len(shape)
    return all(axis < behind or shape[axis - behind] == 1 for axis in axes)


@functools.lru_cache(maxsize=1024)
def _keeps_places(old: Shape, new: Shape, spreads: bool) -> bool:
    """Whether elements stay on their axes from one shape to another of as many, or spread out."""
    if spreads:
        spread = zip(old[::-1], new[::-1], strict=False)
        return all(one in (1, other) or None in (one, other) for one, other in spread)
    before, after = ([size for size in shape if size != 1] for shape in (old, new))
    differ = [(one, other) for one, other in zip(before, after, strict=False) if one != other]
    # Where each knows a size that the other does not, these may have changed places.
    agree = all(None in pair for pair in differ) and len({one is None for one, _ in differ}) < 2
    return agree and (len(before) == len(after) or None in before or None in after)
