"""Where tensors come from: through what moves or scales them, and no further."""

from __future__ import annotations

import pytest
from graph_text import graph, inferred_shapes

from graph_passes import PrecisionConfig
from graph_passes.coloring.state import Coloring
from graph_passes.coloring.ways import Ways, terms
from graph_passes.ir.view import view_body

TEXT = """
x = Placeholder(dtype=float32, shape=[8, 8])
n = Placeholder(dtype=float32, shape=[])
r = Reshape(x, [64])
c = Mul(r, 2.0)
s = RealDiv(c, n)
m = Mul(x, x)
j = ConcatV2(x, m, 0)
v = VarHandleOp(dtype=float32, shape=[8, 8])
a = ReadVariableOp(v, dtype=float32)
b = ReadVariableOp(v, dtype=float32)
p = MatMul(a, b)
q = MatMul(x, m)
"""
SHAPES = """
a = Placeholder(dtype=float32, shape=[2, 3])
b = Placeholder(dtype=float32, shape=[3, 7])
c = Placeholder(dtype=float32, shape=[2, 9])
d = Placeholder(dtype=float32, shape=[5, 2, 3])
u = Placeholder(dtype=float32, shape=[-1, 3])
v = Placeholder(dtype=float32, shape=[9, -1])
"""
INFINITY = float("inf")


@pytest.fixture
def found() -> tuple[Ways, dict[str, int]]:
    graph_def = graph(TEXT)
    view = view_body(graph_def, inferred_shapes(graph_def))
    coloring = Coloring(view, PrecisionConfig(device="GPU"), {})
    coloring.connect([])
    vertices = {
        node.name: coloring.float_vertices(number) for number, node in enumerate(view.nodes)
    }
    return Ways(coloring), {name: of[0] for name, of in vertices.items() if of}


def test_moves_and_scalings_by_a_number_hand_on(found: tuple[Ways, dict[str, int]]) -> None:
    ways, vertex = found
    assert [ways.origin(vertex[name]) for name in "rcs"] == [vertex["x"]] * 3
    assert [ways.origin(vertex[name]) for name in "mj"] == [vertex[name] for name in "mj"]


def test_reads_of_one_variable_are_one(found: tuple[Ways, dict[str, int]]) -> None:
    ways, vertex = found
    assert ways.multiplies_itself(vertex["p"]) and ways.multiplies_itself(vertex["m"])
    assert not ways.multiplies_itself(vertex["q"])


def test_what_a_tensor_meets_is_behind_what_hands_it_on(
    found: tuple[Ways, dict[str, int]],
) -> None:
    ways, vertex = found
    way, met = ways.met(vertex["x"], {"MatMul", "ConcatV2"})
    assert {vertex[name] for name in "xrcsj"} == {*way}
    assert met == {vertex["q"], vertex["j"]}


@pytest.mark.parametrize(
    ("product", "count"),
    [
        ("MatMul(a, b)", 3),
        ("MatMul(a, a, transpose_b=True)", 3),
        ("MatMul(a, c, transpose_a=True)", 2),
        ("MatMul(u, b)", 3),
        ("MatMul(v, u)", INFINITY),
        ("BatchMatMulV2(d, d, adj_y=True)", 3),
        ('Einsum(a, b, equation="ik,kj->ij")', 3),
        ('Einsum(d, d, equation="...ik,...jk->...ij")', 3),
        ('Einsum(d, d, equation="bij,bij->b")', 6),
        ('Einsum(d, d, equation="b...k,b...k->b...")', 3),
        ('Einsum(d, equation="bij->i")', 15),
        ('Einsum(a, b, equation="ik,lj->iklj")', 0),
        ('Einsum(u, b, equation="ik,kj->ij")', 3),
    ],
)
def test_terms_of_products(product: str, count: float) -> None:
    graph_def = graph(f"{SHAPES}\np = {product}\n")
    view = view_body(graph_def, inferred_shapes(graph_def))
    assert terms(view, view.index["p"]) == count
