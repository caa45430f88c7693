"""Matrix decompositions and solvers: what they are given, and products with their results.

They take small differences of large numbers. A kernel matrix whose entries are off by a rounding of
bfloat16 is no longer positive definite, and its Cholesky factor is NaN; in a solution, an error of
the right side is larger by the condition of the matrix. So all that lies between the last matrix
products and such an op stays float32, these products and their gradients too, and so does a product
that reads what the op gives, as the op's own gradient does. In a loop that hands on what is made
of it, as a Kalman filter's does, products of one round are what the op is given in the next.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from graph_passes.coloring.state import ALLOW, CLEAR, Coloring
from graph_passes.ir.adjacency import walk
from graph_passes.ir.graph_view import ARGUMENT
from graph_passes.ops.reasons import Reason

DECOMPOSITIONS = (
    "BandedTriangularSolve",
    "Cholesky",
    "CholeskyGrad",
    "Eig",
    "LogMatrixDeterminant",
    "Lu",
    "MatrixDeterminant",
    "MatrixInverse",
    "MatrixSolve",
    "MatrixSolveLs",
    "MatrixSquareRoot",
    "MatrixTriangularSolve",
    "Qr",
    "SelfAdjointEigV2",
    "Svd",
    "TridiagonalSolve",
)


def keep_decompositions(coloring: Coloring) -> None:
    """Keeps what decompositions are made of, and products with what they give, in float32."""
    codes, edges, view = coloring.list_codes, coloring.edges, coloring.view
    roots = {
        vertex
        for number in view.of_op(*DECOMPOSITIONS)
        for vertex in coloring.float_vertices(number)
    }

    def made_of(vertex: int) -> Iterable[int]:
        return () if codes[vertex] == ALLOW else edges.producers(vertex)

    def handed_on(vertex: int) -> Iterable[int]:
        return edges.readers(vertex) if codes[vertex] == CLEAR or vertex in roots else ()

    before = set(walk(roots, made_of))
    operands = {maker for v in before if codes[v] == ALLOW for maker in edges.producers(v)}
    behind = {vertex for vertex in walk(roots, handed_on) if codes[vertex] == ALLOW}

    def onward(vertex: int) -> Iterable[int]:
        ends = codes[vertex] == ALLOW and vertex not in behind
        return () if ends else edges.readers(vertex)

    def back(vertex: int) -> Iterable[int]:
        call = view.node_type(view.vertex_nodes[vertex]).is_inlined_call
        return edges.producers(vertex) if call or codes[vertex] == CLEAR else ()

    def origins(vertices: Iterable[int]) -> set[int]:
        return set(walk(vertices, back))

    fed = origins(operands)
    # The function of a gradient is given what fed the op.
    fed.update(v for number in view.of_op(ARGUMENT) for v in coloring.float_vertices(number))
    gradients = {
        vertex
        for vertex in walk(roots | behind, onward)
        if codes[vertex] == ALLOW and not fed.isdisjoint(origins(edges.producers(vertex)))
    }
    found = before | behind | gradients | _rounds(coloring, roots)
    coloring.block(sorted(found - roots), Reason.DECOMPOSITION)


def _rounds(coloring: Coloring, roots: set[int]) -> set[int]:
    """All that leads round a loop from a decomposition back to it."""
    carriers, found = coloring.carriers(), set[int]()
    if not carriers:
        return found

    def circle(through: list[int]) -> set[int]:
        reach = functools.partial(coloring.edges.reach, through, coloring.view.is_float)
        return set(coloring.where(reach(forward=True) & reach(backward=True)))

    for root in sorted(roots & circle(carriers)):
        if root not in found and len(way := circle([root])) > 1:
            found |= way
    return found
