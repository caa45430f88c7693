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

from collections.abc import Collection

import numpy as np

from graph_passes.patterns.edits import GraphEdits
from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.patterns.sums import attempt, elements, float_sums, reduces, target_shape
from graph_passes.view import FLOAT, Shape

PRODUCTS = ("BatchMatMulV2", "BatchMatMul")
"""Ops that make a batch of matrix products."""


def merge_weight_gradients(edits: GraphEdits, preserve: Collection[str]) -> None:
    """Replaces sums of matrix products over a batch by one product.

    Args:
        edits: receives the changes, the units and the near misses.
        preserve: names of nodes that must stay.
    """
    matcher = edits.matcher
    for number in float_sums(edits):
        if matcher.op(matcher.source(number, 0)) in PRODUCTS:
            attempt(edits, matcher, number, preserve, _merge)


def _merge(edits: GraphEdits, matcher: Matcher, number: int) -> None:
    view = edits.view
    product = matcher.source(number, 0)
    node, op_type = matcher.node(product), view.op_type(product)
    if op_type is None or not op_type.attr(node, "adj_x").b or op_type.attr(node, "adj_y").b:
        return  # a sum of other products is none of a weight's gradient
    if matcher.readers(product) != [number]:
        raise NoMatchError("more than the sum reads the products")
    left, right = matcher.inputs(product)
    shapes = [_known(view.shape(tensor), tensor) for tensor in (left, right)]
    rank = len(shapes[0])
    target = [shapes[0][-1], shapes[1][-1]]
    if None in target or target_shape(matcher, number) != target:
        raise NoMatchError("the sum is not reshaped to a matrix of the operands' last axes")
    if shapes[0][:-1] != shapes[1][:-1] or not reduces(matcher, number, rank - 2, rank):
        raise NoMatchError("the sum is not over the whole batch of products")
    stem = f"{node.name}/MatMul"
    flat = []
    for side, tensor, width in (("x", left, target[0]), ("y", right, target[1])):
        shape = edits.add_constant(
            f"{stem}/{side}_shape", np.array([-1, width], np.int32), node.device, tensor
        )
        made = (elements(shapes[0][:-1]), width)
        flat.append(edits.add_reshape(f"{stem}/{side}", tensor, shape, node.device, made))
    merged = edits.add("MatMul", stem, flat, node.device, {"T": FLOAT}, [tuple(target)])
    merged.attr["transpose_a"].b = True
    merged.attr["transpose_b"].b = False
    edits.redirect[edits.output(matcher.node(number).name, "Sum")] = edits.output(stem, "MatMul")
    edits.units.append(f"weight-gradient: {matcher.node(number).name}")


def _known(shape: Shape | None, tensor: str) -> Shape:
    if shape is None or len(shape) < 3:
        raise NoMatchError(f"the shape of {tensor!r} is not known to have a rank of 3 or more")
    return shape
