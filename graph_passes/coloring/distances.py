"""Squared distances: matrix products that meet the squares of what they multiply.

    |a - b|^2 = Sum(a * a) + Sum(b * b) - 2 * a b^T

What is left is small against each term where a is close to b: in bfloat16 the product alone is off
by more, so that distances are negative, a square root of them is NaN and near pairs are all the
same. So a product stays float32 where its result, moved or scaled, is added to sums of squares of
its own operand, or to the diagonal of a product of that. So do these squares, and the products that
the gradient makes of the operands: they too are subtracted from almost the same, 2 (a - b). A Gram
matrix, the product of a tensor with itself, stays float32 where a difference from it is squared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import filterfalse, islice

from graph_passes.coloring.linear_steps import MATRIX_PRODUCTS
from graph_passes.coloring.moments import moments
from graph_passes.coloring.state import ALLOW, CLEAR, Coloring
from graph_passes.ir.adjacency import walk
from graph_passes.ops.reasons import Reason

MOST_OPS = 24
"""Ops between a product, its operands and the squares, each way."""

_DIAGONAL = "MatrixDiagPart"
_SETS_DIAGONAL = ("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3", "MatrixSetDiagV3")
_SUMS = ("AddV2", "Add", "Sub", "AddN", "BiasAdd")
_SQUARED = "SquaredDifference"
_SCALES = ("Mul", "RealDiv")
# What a sum of squares may still go through: the square of a norm, further sums.
_PARTS = (*_SUMS, "Sqrt", "Square", "Pow")


def keep_distances(coloring: Coloring) -> None:
    """Keeps squared distances, their products and their squares in float32."""
    search = _Search(coloring)
    for number in coloring.view.of_op(*MATRIX_PRODUCTS):
        product = coloring.view.base[number]
        if coloring.list_codes[product] == ALLOW:
            coloring.block(sorted(search.distance(product)), Reason.DISTANCE)
            coloring.block(sorted(search.difference(product)), Reason.DISTANCE)
    coloring.block(sorted(moments(coloring)), Reason.DISTANCE)


class _Search:
    def __init__(self, coloring: Coloring) -> None:
        self._codes, self._view, self._edges = coloring.list_codes, coloring.view, coloring.edges

    def distance(self, product: int) -> set[int]:
        """A product, the sums that it is part of and the squares in them; nothing otherwise."""
        sums = self._sums_with(product)
        terms = [v for v in _near(sums, self._parts) if self._may_be_squares(v, product)]
        own = self._origins(self._edges.producers(product)) if terms else set()
        squares = {v for term in terms for v in self._squares(term, own)}
        if not squares:
            return set()
        others = {r for v in self._edges.producers(product) for r in self._edges.readers(v)}
        gradients = [self._gradient(v, own) for v in others if self._codes[v] == ALLOW]
        return {product} | sums | squares.union(*gradients)

    def difference(self, product: int) -> set[int]:
        """A product of a tensor with itself and what it is subtracted from, if that is squared."""
        near = [{v, *self._before(v)} for v in self._edges.producers(product)]
        if len(near) < 2 or near[0].isdisjoint(near[1]):
            return set()
        sums = self._sums_with(product, _SQUARED)
        readers = self._edges.readers
        squared = {
            v
            for v in sums
            if self._view.op_of(v) == _SQUARED or any(map(self._is_square, readers(v)))
        }
        return {product} | squared if squared else set()

    def _gradient(self, product: int, own: set[int]) -> set[int]:
        """A product for the gradient of a distance, with what it is added to; nothing otherwise.

        It is added to an operand of the distance times the gradient of its squares, or it reads the
        gradient of a diagonal.
        """
        sums, op_of = self._sums_with(product), self._view.op_of
        factors = {
            v
            for v in _near(sums, lambda v: self._parts(v, "Mul"))
            if v != product
            and op_of(v) in ("Mul", "Einsum")
            and own & self._origins(_near(self._edges.producers(v), self._parts))
        }
        read = _near(self._edges.producers(product), self._parts)
        is_gradient = factors or any(op_of(v) in _SETS_DIAGONAL for v in read)
        return {product} | sums | factors if is_gradient else set()

    def _sums_with(self, product: int, *further: str) -> set[int]:
        """The sums, or further ops, that a product is a term of, moved or scaled."""
        way = _near([product], lambda v: filter(self._hands_on, self._edges.readers(v)))
        ops = (*_SUMS, *further)
        return {r for v in way for r in self._edges.readers(v) if self._view.op_of(r) in ops}

    def _squares(self, term: int, own: set[int]) -> list[int]:
        """What squares operands of a product for a term: below a sum by rows, or a diagonal."""
        op = self._view.op_of(term)
        inside = _near(self._edges.producers(term), self._before)
        found = [term] if op == "Einsum" else inside
        is_square = self._is_gram if op.startswith(_DIAGONAL) else self._is_square
        return [v for v in found if is_square(v) and own & self._origins(self._edges.producers(v))]

    def _may_be_squares(self, term: int, product: int) -> bool:
        op = self._view.op_of(term)
        if op == "Sum":
            return self._view.shape(self._view.node_of(term).name) != ()
        return op.startswith(_DIAGONAL) or (op == "Einsum" and term != product)

    def _is_square(self, vertex: int) -> bool:
        op, makers = self._view.op_of(vertex), self._edges.producers(vertex)
        if op in ("Mul", "Einsum"):
            return len(makers) > 1 and len({*map(self._key, makers)}) == 1
        return op in ("Square", "Pow")

    def _is_gram(self, vertex: int) -> bool:
        if self._view.op_of(vertex) not in MATRIX_PRODUCTS:
            return False
        sides = [self._origins([maker]) for maker in self._edges.producers(vertex)]
        return len(sides) > 1 and not sides[0].isdisjoint(sides[1])

    def _origins(self, vertices: Iterable[int]) -> set[int]:
        """Where tensors come from, moved or scaled; reads of one variable are one origin."""
        return {*map(self._key, _near(vertices, self._before))}

    def _key(self, vertex: int) -> int:
        number = self._view.vertex_nodes[vertex]
        is_read = self._view.op_of(vertex) == "ReadVariableOp"
        return -1 - self._view.makers(number)[0] if is_read else vertex

    def _before(self, vertex: int) -> Iterable[int]:
        makers = self._edges.producers(vertex) if self._hands_on(vertex) else ()
        return makers if len(makers) == 1 else filterfalse(self._is_constant, makers)

    def _parts(self, vertex: int, *further: str) -> Iterable[int]:
        goes_on = self._view.op_of(vertex) in (*_PARTS, *further)
        return self._edges.producers(vertex) if goes_on else self._before(vertex)

    def _hands_on(self, vertex: int) -> bool:
        """Whether an op gives the values of a tensor, moved or scaled by a constant."""
        if self._view.op_of(vertex) in _SCALES:
            return any(map(self._is_constant, self._edges.producers(vertex)))
        return self._codes[vertex] == CLEAR

    def _is_constant(self, vertex: int) -> bool:
        return self._view.op_of(vertex) == "Const"


def _near(starts: Iterable[int], steps: Callable[[int], Iterable[int]]) -> list[int]:
    # Many products may be terms of one sum, and each looks at the others.
    few = walk(starts, lambda vertex: islice(steps(vertex), MOST_OPS))
    return list(islice(few, MOST_OPS))
