"""Squared distances: matrix products that meet the squares of what they multiply.

    |a - b|^2 = Sum(a * a) + Sum(b * b) - 2 * a b^T

What is left is small against each term where a is close to b: in bfloat16 the product alone is off
by more, so that distances are negative, a square root of them is NaN and near pairs are all the
same. So a product stays float32 where its result, moved or scaled, is added to sums of squares of
its own operand, or to the diagonal of a product of that. So do these squares, and the products that
the gradient makes of the operands: they too are subtracted from almost the same, 2 (a - b). A Gram
matrix, the product of a tensor with itself, stays float32 where a difference from it is squared, as
does the product of two such tensors: a polynomial kernel compares two samples by all three.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from graph_passes.coloring.moments import moments
from graph_passes.coloring.offsets import offsets
from graph_passes.coloring.state import ALLOW, Coloring
from graph_passes.coloring.ways import ADDITIONS, DIAGONALS, MATRIX_PRODUCTS, Ways, near
from graph_passes.ops.reasons import Reason

_DIAGONAL = "MatrixDiagPart"
_SUMS = ADDITIONS | {"BiasAdd"}
_SQUARED = "SquaredDifference"
_PARTS = _SUMS | {"Sqrt", "Square", "Pow"}
"""What a sum of squares may still go through: the square of a norm, further sums."""


def keep_distances(coloring: Coloring) -> None:
    """Keeps squared distances, their products and their squares in float32."""
    ways = Ways(coloring)
    search = _Search(coloring, ways)
    products = [v for v in ways.products() if ways.op_of(v) in MATRIX_PRODUCTS]
    compared: set[int] = set()
    for product in products:
        difference = search.difference(product)
        compared |= ways.origins(product) if difference else set()
        coloring.block(search.distance(product) | difference, Reason.DISTANCE)
    if len(compared) > 1:
        coloring.block({v for v in products if ways.origins(v) <= compared}, Reason.DISTANCE)
    coloring.block(moments(coloring, ways) | offsets(coloring, ways), Reason.DISTANCE)


class _Search:
    def __init__(self, coloring: Coloring, ways: Ways) -> None:
        self._codes, self._view, self._ways = coloring.list_codes, coloring.view, ways
        self._makers, self._readers, self._op_of = ways.makers, ways.readers, ways.op_of

    def distance(self, product: int) -> set[int]:
        """A product, the sums that it is part of and the squares in them; nothing otherwise."""
        _, sums = self._ways.met(product, _SUMS)
        terms = [v for v in near(sums, self._parts) if self._may_be_squares(v, product)]
        own = self._ways.origins(product) if terms else set()
        squares = {v for term in terms for v in self._squares(term, own)}
        if not squares:
            return set()
        others = {r for v in self._makers(product) for r in self._readers(v)}
        gradients = [self._gradient(v, own) for v in others if self._codes[v] == ALLOW]
        return {product} | sums | squares.union(*gradients)

    def difference(self, product: int) -> set[int]:
        """A product of a tensor with itself and what it is subtracted from, if that is squared."""
        read = [{v, *self._ways.handed(v)} for v in self._makers(product)]
        if len(read) < 2 or read[0].isdisjoint(read[1]):
            return set()
        _, sums = self._ways.met(product, _SUMS | {_SQUARED})
        squared = {
            v
            for v in sums
            if self._op_of(v) == _SQUARED or any(map(self._is_square, self._readers(v)))
        }
        return {product} | squared if squared else set()

    def _gradient(self, product: int, own: set[int]) -> set[int]:
        """A product for the gradient of a distance, with what it is added to; nothing otherwise.

        It is added to an operand of the distance times the gradient of its squares, or it reads the
        gradient of a diagonal.
        """
        _, sums = self._ways.met(product, _SUMS)
        factors = {
            v
            for v in near(sums, lambda v: self._parts(v, {"Mul"}))
            if v != product
            and self._op_of(v) in ("Mul", "Einsum")
            and not own.isdisjoint(map(self._ways.origin, self._parts_of(v)))
        }
        is_gradient = factors or any(self._op_of(v) in DIAGONALS for v in self._parts_of(product))
        return {product} | sums | factors if is_gradient else set()

    def _squares(self, term: int, own: set[int]) -> list[int]:
        """What squares operands of a product for a term: below a sum by rows, or a diagonal."""
        op, ways = self._op_of(term), self._ways
        found = [term] if op == "Einsum" else ways.origins(term)
        is_square = ways.multiplies_itself if op.startswith(_DIAGONAL) else self._is_square
        return [v for v in found if is_square(v) and own & ways.origins(v)]

    def _may_be_squares(self, term: int, product: int) -> bool:
        op = self._op_of(term)
        if op == "Sum":
            return self._view.shape(self._view.node_of(term).name) != ()
        return op.startswith(_DIAGONAL) or (op == "Einsum" and term != product)

    def _is_square(self, vertex: int) -> bool:
        op, makers = self._op_of(vertex), self._makers(vertex)
        if op in ("Mul", "Einsum"):
            return len(makers) > 1 and len({*map(self._ways.one_read, makers)}) == 1
        return op in ("Square", "Pow")

    def _parts_of(self, vertex: int) -> list[int]:
        """What a vertex reads, and the parts that it is made of."""
        return near(self._makers(vertex), self._parts)

    def _parts(self, vertex: int, further: Set[str] = frozenset()) -> Iterable[int]:
        goes_on = self._op_of(vertex) in _PARTS | further
        return self._makers(vertex) if goes_on else self._ways.handed(vertex)
