"""Moments about a mean, made of raw ones: products that meet products of their own parts.

    X'X / n - m'm                  covariances, with the means m of X
    W (x * y) - (W x) * (W y)      those in windows, as of SSIM, whatever the window W is

What is left is small against both terms where the mean is large: in bfloat16 the product alone is
off by more, and variances are negative. So these products stay float32, and so do what they are
subtracted from, the square that a window is laid on, and all that reads the window. Layers of a
network multiply by a variable, of which no mean is taken, and none is laid on a tensor, on its
square, and squared itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np

from graph_passes.coloring.linear_steps import MATRIX_PRODUCTS, SCALINGS, is_by_a_tensor
from graph_passes.coloring.state import ALLOW, CLEAR, Coloring
from graph_passes.ir.adjacency import walk
from graph_passes.ops.reasons import Reason

MOST_OPS = 24
"""Ops between a product and the difference, and between the means and that."""

_MEANS = ("Mean", "Sum")
_ONES = ("Const", "Fill", "OnesLike")
_SQUARES = ("Mul", "Square", "Pow")


def moments(coloring: Coloring) -> set[int]:
    """The vertices of moments, between the products and the differences of which they are terms."""
    search = _Search(coloring)
    products = coloring.where(coloring.eligible & (coloring.list_codes == ALLOW))
    two = [v for v in products if len(coloring.edges.producers(v)) == 2]
    found = set[int]()
    near = _before_differences(coloring)
    for product in filter(near.__getitem__, two):
        for way, other in search.differences(product):
            found |= search.covariance(product, way, other)
            found |= search.window(product, way, other, two)
    return found


def _before_differences(coloring: Coloring) -> np.ndarray:
    """The vertices that may be terms of differences, moved or scaled; bool.

    Steps of variables, from which gradients are taken, are no moments.
    """
    view, why = coloring.view, coloring.why
    differences = [view.base[number] for number in view.of_op("Sub")]
    differences = [v for v in differences if why[v] != Reason.VARIABLE_UPDATE]
    scales = view.is_vertex_of(lambda node_type: node_type.op in SCALINGS)
    ways = scales | (coloring.list_codes == CLEAR)
    reached = coloring.edges.reach(differences, ways, backward=True)
    found = np.zeros(len(reached), bool)
    found[view.sources[reached[view.targets]]] = True
    return found


class _Search:
    def __init__(self, coloring: Coloring) -> None:
        self._codes, self._view, self._edges = coloring.list_codes, coloring.view, coloring.edges
        self._origins: dict[int, int] = {}

    def differences(self, product: int) -> Iterable[tuple[set[int], int]]:
        """For each difference that a product is a term of: what leads there, and the other term."""
        way = _few([product], lambda v: filter(self._hands_on, self._edges.readers(v)))
        for vertex in {r for v in way for r in self._edges.readers(v)}:
            if self._view.op_of(vertex) == "Sub":
                for other in self._edges.producers(vertex):
                    if other not in way:
                        yield {*way, vertex}, other

    def covariance(self, product: int, way: set[int], other: int) -> set[int]:
        """A product from which one of the means of its operands is taken; nothing otherwise."""
        if self._view.op_of(product) not in MATRIX_PRODUCTS:
            return set()
        near = [v for v in _few([other], self._factors) if v != product]
        averaged = {v for term in near for v in self._averaged(term)}
        sides = {*map(self._origin, self._edges.producers(product))} if averaged else {-1}
        if min(sides) < 0 or not sides <= averaged:
            return set()
        return way.union(v for v in near if self._view.op_of(v) not in _MEANS)

    def _averaged(self, vertex: int) -> set[int]:
        """What a vertex is a mean of, or a sum, also by a product with ones."""
        op, makers = self._view.op_of(vertex), self._edges.producers(vertex)
        origins = {*map(self._origin, makers)} if op in (*_MEANS, *MATRIX_PRODUCTS) else set()
        ones = {v for v in origins if v >= 0 and self._view.op_of(v) in _ONES}
        return origins - ones if op in _MEANS or ones else set()

    def window(self, product: int, way: set[int], other: int, others: Iterable[int]) -> set[int]:
        """What a window makes of a square, and of its parts, whose product is taken off."""
        terms = _few([other], self._handed)
        found = [(term, laid) for term in terms if (laid := self._products_of(term))]
        sides = [*map(self._origin, self._edges.producers(product))] if found else []
        squares = [v for v in sides if v >= 0 and self._view.op_of(v) in _SQUARES]
        if len(squares) != 1 or len({*sides}) < 2:
            return set()
        square, window = squares[0], sides[1 - sides.index(squares[0])]
        factors = {*map(self._origin, self._edges.producers(square))}
        for term, laid in found:
            if all(self._lays(v, window, factors) for v in laid):
                same = (v for v in others if self._reads(v, window))
                return way.union({square, term}, terms, same)
        return set()

    def _products_of(self, vertex: int) -> list[int]:
        """The products that a square, or a product of two, is made of, if it is of nothing else."""
        if self._view.op_of(vertex) not in _SQUARES:
            return []
        made = [*map(self._origin, self._edges.producers(vertex))]
        return made if all(v >= 0 and self._codes[v] == ALLOW for v in made) else []

    def _lays(self, vertex: int, window: int, factors: set[int]) -> bool:
        """Whether a product lays a window on one of some tensors."""
        sides = {*map(self._origin, self._edges.producers(vertex))}
        return window in sides and not factors.isdisjoint(sides)

    def _reads(self, product: int, window: int) -> bool:
        return window in map(self._origin, self._edges.producers(product))

    def _factors(self, vertex: int) -> Iterable[int]:
        """What a product of means is made of."""
        multiplies = self._view.op_of(vertex) in (*MATRIX_PRODUCTS, *_SQUARES, *SCALINGS)
        return self._edges.producers(vertex) if multiplies else self._handed(vertex)

    def _handed(self, vertex: int) -> Sequence[int]:
        return self._edges.producers(vertex) if self._hands_on(vertex) else ()

    def _hands_on(self, vertex: int) -> bool:
        """Whether an op moves a tensor, or scales it by a single number."""
        if self._view.op_of(vertex) in SCALINGS:
            return not is_by_a_tensor(self._view, vertex)
        return self._codes[vertex] == CLEAR

    def _origin(self, vertex: int) -> int:
        """Where a tensor comes from, moved or scaled; less than 0 for a variable, of any read."""
        if vertex not in self._origins:
            origin, makers = vertex, self._scaled(vertex)
            for _ in range(MOST_OPS):
                if len(makers) != 1:
                    break
                origin, makers = makers[0], self._scaled(makers[0])
            is_read = self._view.op_of(origin) == "ReadVariableOp"
            number = self._view.vertex_nodes[origin]
            self._origins[vertex] = -1 - self._view.makers(number)[0] if is_read else origin
        return self._origins[vertex]

    def _scaled(self, vertex: int) -> Sequence[int]:
        """What an op moves or scales, without the number that it scales by."""
        makers = self._handed(vertex)
        return makers if len(makers) < 2 else [v for v in makers if not self._is_number(v)]

    def _is_number(self, vertex: int) -> bool:
        number = self._view.vertex_nodes[vertex]
        return number >= 0 and self._view.shape(self._view.names[number]) == ()


def _few(starts: Iterable[int], steps: Callable[[int], Iterable[int]]) -> list[int]:
    return list(islice(walk(starts, steps), MOST_OPS))
