"""Matrix decompositions and solvers: what they are given, and products with their results.

They take small differences of large numbers. A kernel matrix whose entries are off by a rounding of
bfloat16 is no longer positive definite, and its Cholesky factor is NaN; in a solution, an error of
the right side is larger by the condition of the matrix. So all that lies between the last matrix
products and such an op stays float32, these products and their gradients too, and so does a product
that reads what the op gives, as the op's own gradient does.
"""

from __future__ import annotations

from collections.abc import Iterable

from graph_passes.coloring.state import ALLOW, CLEAR, Coloring
from graph_passes.ir.adjacency import walk
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
    codes, edges = coloring.list_codes, coloring.edges
    roots = {
        vertex
        for number in coloring.view.of_op(*DECOMPOSITIONS)
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

    gradients = {
        vertex
        for vertex in walk(roots | behind, onward)
        if codes[vertex] == ALLOW and not operands.isdisjoint(edges.producers(vertex))
    }
    coloring.block(sorted((before | behind | gradients) - roots), Reason.DECOMPOSITION)
