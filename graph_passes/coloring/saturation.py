"""Saturated values: how far one is from its bound is computed in float32 where that is asked.

    p = Sigmoid(x);  Log(1 - p), Log1p(-p), p / (1 - p);  Atanh(Tanh(x));  Sqrt(1 - Tanh(x) ** 2)
    Acos(Minimum(x, 1 - 1e-7)), whose slope is infinite at 1;  Log(1 - Minimum(x, 1 - 1e-7))

In bfloat16 the sigmoid of 6 is 1, and so is the 1 - 1e-7 that programs clip it to: the logarithm is
that of 0. What lies between a saturating op and one that takes a difference from it, or has a pole
there itself, stays float32, that op included, and so does the gradient y * (1 - y).

Gradients take such a distance themselves, y * (g - Sum(g * y)) of a softmax, y * (1 - y) of a
sigmoid: a probability that is rounded to 1 has none. Where no product follows, as for what a class
depends on, y is float32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import islice

from graph_passes.coloring.comparisons import EXACT
from graph_passes.coloring.state import ALLOW, DENY, Coloring
from graph_passes.coloring.ways import MOST_NEAR, SQUARES
from graph_passes.ir.adjacency import walk
from graph_passes.ops.reasons import Reason

_LOGARITHMS = ("Log", "Log1p")
_SATURATING = frozenset(("Erf", "Erfc", "Exp", "Sigmoid", "Softmax", "Tanh"))
_BOUNDS = frozenset(("ClipByValue", "Maximum", "Minimum", "Relu6"))
"""They saturate as well, but may be put behind an op that does."""
_RANKS = frozenset(("Max", "Min"))
_DIFFERENCE = frozenset(("Neg", "Sub"))
_DISTANCES: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("Acos", "Acosh", "Asin", "Atanh", "Erfinv", "Ndtri"), _SATURATING | _BOUNDS),
    **dict.fromkeys(("Log", "RealDiv", "Reciprocal", "Rsqrt", "Sqrt"), _DIFFERENCE),
    "Log1p": _DIFFERENCE | {"Mul"},
}
"""What has a pole -> the ops by which it takes the distance to a bound; some take it themselves."""


def keep_saturated(coloring: Coloring) -> None:
    """Keeps what the distance to a bound is taken of in float32."""
    edges, op_of = coloring.edges, coloring.view.op_of
    for number in coloring.view.of_op(*_DISTANCES):
        root = coloring.view.base[number]
        if coloring.why[root] == Reason.VARIABLE_UPDATE:
            continue
        made_of = functools.partial(_made_of, coloring, root)
        way = list(islice(walk([root], made_of), MOST_NEAR))
        taken = [vertex for vertex in way if op_of(vertex) in _DISTANCES[op_of(root)]]
        # A divisor is often bounded itself, behind the difference: (x - least) / max(range, 1e-6).
        behind = way if op_of(root) in _LOGARITHMS else islice(walk(taken, made_of), MOST_NEAR)
        if not taken or (_SATURATING | _BOUNDS).isdisjoint(map(op_of, behind)):
            continue
        # Gradients ask whether what was clipped was beyond the bound.
        clipped = {m for v in way if op_of(v) in _BOUNDS for m in edges.producers(v)}
        asked = [r for v in clipped for r in edges.readers(v) if op_of(r) in EXACT]
        saturated = [v for v in way if op_of(v) in _SATURATING]
        gradients = [r for v in saturated for r in edges.readers(v) if op_of(r).endswith("Grad")]
        coloring.block([*way, *asked, *gradients], Reason.SATURATION)
    softmaxes = [coloring.view.base[number] for number in coloring.view.of_op("Softmax")]
    coloring.block([v for v in softmaxes if _asks_for_rest(coloring, v)], Reason.SATURATION)
    for number in coloring.view.of_op("SigmoidGrad", "TanhGrad"):
        gradient = coloring.view.base[number]
        for y in edges.producers(gradient)[:1]:  # none where it is not float32
            if op_of(y) in _SATURATING and not _is_hidden(coloring, y, gradient):
                coloring.block([y, gradient], Reason.SATURATION)


def _asks_for_rest(coloring: Coloring, softmax: int) -> bool:
    """Whether its gradient subtracts a sum that is denied: behind a product it is so no more."""
    op_of, readers = coloring.view.op_of, coloring.edges.readers
    weighted = [r for r in readers(softmax) if op_of(r) == "Mul"]
    sums = [r for v in weighted for r in readers(v) if op_of(r) == "Sum"]
    return any(coloring.list_codes[v] == DENY and "Sub" in map(op_of, readers(v)) for v in sums)


def _is_hidden(coloring: Coloring, y: int, gradient: int) -> bool:
    """Whether a product is made of what an activation gives, and not by its gradient alone."""
    readers = coloring.edges.readers
    behind = walk([y], lambda v: [reader for reader in readers(v) if reader != gradient])
    near = list(islice(behind, MOST_NEAR))
    return len(near) == MOST_NEAR or any(coloring.list_codes[v] == ALLOW for v in near)


def _made_of(coloring: Coloring, root: int, vertex: int) -> list[int]:
    """What a tensor is made of; of a quotient that is a root itself, what the divisor is.

    Logarithms of sums and means are taken of probabilities; other sums end in norms, and what lies
    between the largest and the least of some numbers is no distance to a bound.
    """
    codes, op_of = coloring.list_codes, coloring.view.op_of
    if op_of(vertex) in _SATURATING:
        return []
    makers = coloring.edges.producers(vertex)
    found = [m for m in (makers[-1:] if vertex == root else makers) if codes[m] not in (0, ALLOW)]
    if op_of(root) in _LOGARITHMS:
        return found
    return [m for m in found if op_of(m) in SQUARES or not (codes[m] == DENY or op_of(m) in _RANKS)]
