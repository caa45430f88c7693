"""Moments about a mean, made of raw ones: products that meet products of their own parts.

    X'X / n - m'm                  covariances, with the means m of X
    W (x * y) - (W x) * (W y)      those in windows, as of SSIM, whatever the window W is
    AvgPool(x * x) - AvgPool(x)^2  variances in them, as of a local normalization

What is left is small against both terms where the mean is large: in bfloat16 the product alone is
off by more, and variances are negative. So these products stay float32, and so do what they are
subtracted from, the square that a window is laid on, and all that reads the window. Layers of a
network multiply by a variable, of which no mean is taken, and none is laid on a tensor, on its
square, and squared itself. A square that is written as a product stays float32 where a sum or a
mean reads it, as ops that square do: beyond 255 float16 has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from graph_passes.coloring.state import ALLOW, CLEAR, DENY, Coloring
from graph_passes.coloring.ways import MATRIX_PRODUCTS, SCALINGS, SQUARES, VARIABLES, Ways, near
from graph_passes.ops.reasons import Reason

_POOLS = frozenset(("AvgPool", "AvgPool3D"))
_MEANS = _POOLS | {"Mean", "Sum"}
_ONES = frozenset(("Const", "Fill", "OnesLike"))


def moments(coloring: Coloring, ways: Ways) -> set[int]:
    """The vertices of moments, between the products and the differences of which they are terms."""
    search = _Search(coloring, ways)
    averages = [(v, maker) for v in coloring.floats_of(_MEANS) for maker in ways.makers(v)]
    squares = [(v, maker) for v, maker in averages if ways.op_of(maker) in SQUARES]
    two = [v for v in ways.products() if coloring.eligible[v] and len(ways.makers(v)) == 2]
    found = {v for _, v in squares if ways.op_of(v) == "Mul" and ways.multiplies_itself(v)}
    may_differ = _before_differences(coloring)
    for product in filter(may_differ.__getitem__, two):
        for way, other in search.differences(product):
            if ways.op_of(product) in MATRIX_PRODUCTS:
                found |= search.covariance(product, way, other)
            found |= search.window(product, way, other, two)
    for pool, square in squares:
        if ways.op_of(pool) in _POOLS:
            for way, other in search.differences(pool):
                found |= search.covariance(square, {*way, square}, other)
    return found


def _before_differences(coloring: Coloring) -> np.ndarray:
    """The vertices that may be terms of differences, moved or scaled; bool.

    Steps of variables, from which gradients are taken, are no moments.
    """
    view, why = coloring.view, coloring.why
    differences = [view.base[number] for number in view.of_op("Sub")]
    differences = [v for v in differences if why[v] != Reason.VARIABLE_UPDATE]
    ways = coloring.has_op(SCALINGS) | (coloring.list_codes == CLEAR)
    reached = coloring.edges.reach(differences, ways, backward=True)
    found = np.zeros(len(reached), bool)
    found[view.sources[reached[view.targets]]] = True
    return found


class _Search:
    def __init__(self, coloring: Coloring, ways: Ways) -> None:
        self._codes, self._ways = coloring.list_codes, ways
        self._makers, self._op_of, self._origins = ways.makers, ways.op_of, ways.origins

    def differences(self, product: int) -> Iterable[tuple[set[int], int]]:
        """For each difference that a product is a term of: what leads there, and the other term."""
        way, differences = self._ways.met(product, {"Sub"})
        for vertex in differences:
            for other in self._makers(vertex):
                if other not in way:
                    yield {*way, vertex}, other

    def covariance(self, product: int, way: set[int], other: int) -> set[int]:
        """A product from which one of the means of its operands is taken; nothing otherwise."""
        found = [v for v in near([other], self._factors) if v != product]
        averaged = {v for term in found for v in self._averaged(term)}
        if not averaged or not self._origins(product) <= averaged:
            return set()
        return way.union(v for v in found if self._codes[v] != DENY)

    def _averaged(self, vertex: int) -> set[int]:
        """What a vertex is a mean or a sum of, also by a product with ones, but for variables."""
        op = self._op_of(vertex)
        origins = self._origins(vertex) if op in _MEANS | MATRIX_PRODUCTS else set()
        tensors = {v for v in origins if self._op_of(v) not in _ONES}
        is_mean = op in _MEANS or len(tensors) < len(origins)
        return {v for v in tensors if is_mean and self._op_of(v) not in VARIABLES}

    def _factors(self, vertex: int) -> Sequence[int]:
        """What a product of means is made of."""
        multiplies = self._op_of(vertex) in MATRIX_PRODUCTS | SQUARES | SCALINGS
        return self._makers(vertex) if multiplies else self._ways.handed(vertex)

    def window(self, product: int, way: set[int], other: int, others: Iterable[int]) -> set[int]:
        """What a window makes of a square, and of its parts, whose product is taken off."""
        terms = near([other], self._ways.handed)
        found = [(term, laid) for term in terms if (laid := self._products_of(term))]
        sides = [*map(self._ways.origin, self._makers(product))] if found else []
        squares = [v for v in sides if self._op_of(v) in SQUARES]
        if len(squares) != 1:
            return set()
        square, window = squares[0], sides[1 - sides.index(squares[0])]
        factors = self._origins(square)
        for term, laid in found:
            if all(window in self._origins(v) and factors & self._origins(v) for v in laid):
                same = (v for v in others if window in self._origins(v))
                return way.union({square, term}, terms, same)
        return set()

    def _products_of(self, vertex: int) -> set[int]:
        """The products that a square, or a product of two, is made of, if it is of nothing else."""
        made = self._origins(vertex) if self._op_of(vertex) in SQUARES else set()
        return made if all(self._codes[v] == ALLOW for v in made) else set()
