"""Saturated values: how far one is from its bound is computed in float32 where a logarithm asks.

    p = Sigmoid(x);  Log(1 - p), Log1p(-p);  Atanh(Tanh(x));  Log(1 - Minimum(x, 1 - 1e-7))

In bfloat16 the sigmoid of 6 is 1, and so is the 1 - 1e-7 that programs clip it to: the logarithm is
that of 0. What lies between a saturating op and a logarithm that takes a difference from it stays
float32, that op included. Its gradient, y * (1 - y), follows: it is behind the logarithm's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from graph_passes.coloring.comparisons import EXACT
from graph_passes.coloring.state import ALLOW, Coloring
from graph_passes.coloring.ways import MOST_NEAR
from graph_passes.ir.adjacency import walk
from graph_passes.ops.reasons import Reason

_DIFFERENCES: Mapping[str, frozenset[str]] = {
    "Atanh": frozenset(("Erf", "Sigmoid", "Tanh")),
    "Log": frozenset(("Neg", "Sub")),
    "Log1p": frozenset(("Mul", "Neg", "Sub")),
}
"""Logarithm -> the ops by which it takes the distance to a bound; that of Atanh is its own."""
_SATURATING = frozenset(("Erf", "Erfc", "Exp", "Sigmoid", "Softmax", "Tanh"))
_BOUNDS = frozenset(("ClipByValue", "Minimum", "Relu6"))
"""They saturate as well, but may be put behind an op that does."""


def keep_saturated(coloring: Coloring) -> None:
    """Keeps what a logarithm takes the distance of in float32."""
    codes, edges, op_of = coloring.list_codes, coloring.edges, coloring.view.op_of

    def made_of(vertex: int) -> list[int]:
        if op_of(vertex) in _SATURATING:
            return []
        return [maker for maker in edges.producers(vertex) if codes[maker] not in (0, ALLOW)]

    for number in coloring.view.of_op(*_DIFFERENCES):
        root = coloring.view.base[number]
        way = list(islice(walk([root], made_of), MOST_NEAR))
        ops = {op_of(vertex) for vertex in way}
        saturates = not ops.isdisjoint(_SATURATING | _BOUNDS)
        if saturates and not ops.isdisjoint(_DIFFERENCES[op_of(root)]):
            # Gradients ask whether what was clipped was beyond the bound.
            clipped = {m for v in way if op_of(v) in _BOUNDS for m in edges.producers(v)}
            asked = [r for v in clipped for r in edges.readers(v) if op_of(r) in EXACT]
            coloring.block([*way, *asked], Reason.SATURATION)
