"""Gradients of weights that are shared over a batch.

Automatic differentiation of `x @ w`, with x of rank 3 and w of rank 2, makes one product
x[i]^T dy[i] for each i of the batch and sums them. Sums are denied, since float16 kernels may add
up in float16; so each product would be cast to float32 first. One product adds up in float32
inside:

    Sum(BatchMatMul(x, dy, adj_x))  is  MatMul([rows, k]^T, [rows, n]) over the rows of all x[i]

The sum is none of a loss: it is reshaped to the shape of a weight afterwards, and the search asks
for that.
"""

from __future__ import annotations

from graph_passes.ir.graph_view import elements
from graph_passes.rewriter.matcher import NoMatchError
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.reduction.sums import BroadcastGradients, float_sums, reduces, reshaped_to
from graph_passes.units.unit_pass import UnitSearch

RULE = "weight-gradient"
PRODUCTS = ("BatchMatMulV2", "BatchMatMul")
"""Ops that make a batch of matrix products."""


def merge_weight_gradients(search: UnitSearch) -> None:
    """Replaces sums of matrix products over a batch by one product."""
    edits, m = search.edits, search.edits.matcher
    gradients = BroadcastGradients(m)
    for number in float_sums(edits):
        product = m.source(number, 0)
        if m.op(product) not in PRODUCTS:
            continue
        sides = [m.attr(product, side).b for side in ("adj_x", "adj_y")]
        # A sum of other products is none of a weight's gradient.
        if sides == [True, False] and gradients.has(number):
            stem = f"{m.node(product).name}/MatMul"
            edits.propose(RULE, number, _merge, number, product, stem=stem)


def _merge(new: Replacement, number: int, product: int) -> None:
    m = new.matcher
    left, right = m.inputs(product)
    one, other = m.shape_of(left), m.shape_of(right)
    if one is None or other is None:
        raise NoMatchError(f"the shapes of {left!r} and {right!r} are not both known")
    rank, widths = len(one), [one[-1], other[-1]]
    if reshaped_to(m, number) != widths:
        raise NoMatchError("the sum is not reshaped to a matrix of the operands' last axes")
    if one[:-1] != other[:-1] or not reduces(m, number, rank - 2, rank):
        raise NoMatchError("the sum is not over the whole batch of products")
    rows = elements(one[:-1])
    x = new.reshape(left, (None, widths[0]), name="x", shape=(rows, widths[0]))
    y = new.reshape(right, (None, widths[1]), name="y", shape=(rows, widths[1]))
    new.replace(number, new.op.MatMul(x, y, name="", transpose_a=True))
