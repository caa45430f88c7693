"""Matrix decompositions and solvers: what they are given, and products with their results.

They take small differences of large numbers. A kernel matrix whose entries are off by a rounding of
bfloat16 is no longer positive definite, and its Cholesky factor is NaN; in a solution, an error of
the right side is larger by the condition of the matrix. So all that lies between the last matrix
products and such an op stays float32, these products and their gradients too, and so does a product
that reads what the op gives, as the op's own gradient does, and a product of that. What an inverse
is multiplied with is the right side of its equation: the products that it is a sum of do too.
What leads from one step of a Kalman filter to the next is a recurrence. What is divided by a sum
with `x' A x` solves one equation: the gain of a Kalman filter for one observation,
`P h / (h' P h + r)`, an inverse that one more row changes, a step of conjugate gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from graph_passes.coloring.state import ALLOW, Coloring
from graph_passes.coloring.ways import (
    ADDITIONS,
    MATRIX_PRODUCTS,
    SCALINGS,
    Ways,
    linear,
    moves,
    near,
)
from graph_passes.ir.adjacency import walk
from graph_passes.ir.graph_view import ARGUMENT
from graph_passes.ops.reasons import Reason
from graph_passes.policy.op_classes import ops_of

DECOMPOSITIONS, DIVISIONS = ops_of("decompositions"), ops_of("divisions")


def keep_decompositions(coloring: Coloring) -> None:
    """Keeps what decompositions are made of, and products with what they give, in float32."""
    edges, move, is_product = coloring.edges, moves(coloring), coloring.list_codes == ALLOW
    divided, forms = _solved_by_division(coloring, move)
    roots = set(coloring.floats_of(DECOMPOSITIONS)) | divided
    if not roots:
        return
    onto = move | coloring.has_op(MATRIX_PRODUCTS)
    before = set(walk(roots, edges.producers, (~is_product).__getitem__)) | forms
    operands = {maker for v in before if is_product[v] for maker in edges.producers(v)}
    handed_on = walk(roots, edges.readers, lambda v: onto[v] or v in roots)
    behind = {vertex for vertex in handed_on if is_product[vertex]}
    back = move | coloring.view.is_vertex_of(lambda node_type: node_type.is_inlined_call)

    def origins(vertices: Iterable[int]) -> set[int]:
        return set(walk(vertices, edges.producers, back.__getitem__))

    fed = origins(operands)
    fed.update(coloring.floats_of({ARGUMENT}))  # a gradient's function is given what fed the op
    onward = walk(roots | behind, edges.readers, lambda v: v in behind or not is_product[v])
    gradients = {
        vertex
        for vertex in onward
        if is_product[vertex] and not fed.isdisjoint(origins(edges.producers(vertex)))
    }
    found = before | behind | gradients | _right_sides(coloring, roots, move)
    coloring.block(sorted(found - roots), Reason.DECOMPOSITION)


def _right_sides(coloring: Coloring, roots: set[int], move: np.ndarray) -> set[int]:
    """The products that are handed on or added up to what a decomposition is multiplied with."""
    edges, is_product = coloring.edges, coloring.list_codes == ALLOW
    sums = linear(coloring, move) & ~is_product
    given = walk(roots, edges.readers, lambda v: move[v] or v in roots)
    meets = coloring.has_op(MATRIX_PRODUCTS | {"Mul"})
    met = [maker for v in given if meets[v] for maker in edges.producers(v)]
    summed = walk(met, edges.producers, sums.__getitem__)
    return {vertex for vertex in summed if is_product[vertex]}


def _solved_by_division(coloring: Coloring, move: np.ndarray) -> tuple[set[int], set[int]]:
    """The quotients by sums with `x' A x`, and the products that these and what they divide are."""
    ways, products = Ways(coloring), coloring.has_op(MATRIX_PRODUCTS)
    added = ADDITIONS | {"Sum"}

    def moved(vertex: int) -> Sequence[int]:
        return ways.makers(vertex) if move[vertex] else ()

    def summed(vertex: int) -> Sequence[int]:
        if ways.op_of(vertex) in added:
            return ways.makers(vertex)
        return ways.handed(vertex) if ways.op_of(vertex) in SCALINGS else moved(vertex)

    def is_met(product: int, term: int) -> bool:
        return not ways.origins(term).isdisjoint(ways.origins(product))

    def forms(divisor: Sequence[int]) -> Iterable[int]:
        for term in near(divisor, summed):
            if products[term] or ways.op_of(term) == "Mul":
                for factor in near(ways.makers(term), moved):
                    if products[factor] and is_met(factor, term):
                        yield factor

    found = {v: {*forms(ways.makers(v)[-1:])} for v in coloring.floats_of(DIVISIONS)}
    quotients = {v for v in found if found[v]}
    divided = [maker for v in quotients for maker in ways.makers(v)[:1]]
    chains = walk(divided, lambda v: ways.makers(v) if move[v] or products[v] else ())
    return quotients, set(filter(products.__getitem__, chains)).union(*found.values())
