"""Gradients of weights and biases that are shared over a batch.

Automatic differentiation of `x @ w + b`, with x of rank 3 and w of rank 2, makes one product
x[i]^T dy[i] for each i of the batch and sums them, and sums dy over all axes but the last. Sums
are denied, since float16 kernels may add up in float16; so each product and each dy would be cast
to float32 first. Both sums have ops that add up in float32 inside:

    Sum(BatchMatMul(x, dy, adj_x))  is  MatMul([rows, k]^T, [rows, n]) over the rows of all x[i]
    Sum(dy, all axes but the last)  is  BiasAddGrad(dy)

Neither is a loss: what is summed is reshaped to the shape of a weight or a bias afterwards, and
the search asks for that.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.patterns.edits import GraphEdits, NearMiss
from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.view import FLOAT, Shape

_PRODUCTS = ("BatchMatMulV2", "BatchMatMul")


def merge_weight_gradients(edits: GraphEdits, preserve: Collection[str]) -> None:
    """Replaces sums of matrix products over a batch by one product.

    Args:
        edits: receives the changes, the units and the near misses.
        preserve: names of nodes that must stay.
    """
    matcher = Matcher(edits.view)
    for number in _sums(edits):
        if matcher.op(matcher.maker(matcher.tensor(number, 0))) in _PRODUCTS:
            _attempt(edits, matcher, number, preserve, _merge)


def use_bias_gradients(edits: GraphEdits, preserve: Collection[str]) -> None:
    """Replaces sums of a gradient over all axes but the last by BiasAddGrad.

    Args:
        edits: receives the changes and the units.
        preserve: names of nodes that must stay.
    """
    matcher = Matcher(edits.view)
    for number in _sums(edits):
        if matcher.op(matcher.maker(matcher.tensor(number, 0))) not in _PRODUCTS:
            _attempt(edits, matcher, number, preserve, _sum_of_bias)


def _sums(edits: GraphEdits) -> list[int]:
    view = edits.view
    return [
        number
        for number, op_type in enumerate(view.op_types)
        if op_type is not None
        and op_type.name == "Sum"
        and view.is_float[view.base[number]]
        and edits.output(view.nodes[number].name, "Sum") not in edits.redirect
    ]


def _attempt(edits, matcher, number, preserve, replace) -> None:  # type: ignore[no-untyped-def]
    name = matcher.node(number).name
    if name in preserve:
        return
    try:
        replace(edits, matcher, number)
    except NoMatchError as miss:
        edits.misses.append(NearMiss(name, str(miss)))


def _target_shape(matcher: Matcher, number: int) -> list[int]:
    """The constant shape that all readers of a sum reshape it to."""
    shapes = set()
    for reader in matcher.readers(number):
        matcher.expect(reader, "Reshape")
        shapes.add(tuple(matcher.constant(matcher.tensor(reader, 1)).ravel().tolist()))
    if len(shapes) != 1:
        raise NoMatchError("the sum is not reshaped to one constant shape")
    return list(shapes.pop())


def _reduces(matcher: Matcher, number: int, axes: int, rank: int) -> bool:
    """Whether a sum is over its first `axes` axes, or over those that broadcasting added."""
    maker = matcher.maker(matcher.tensor(number, 1))
    if matcher.op(maker) == "BroadcastGradientArgs":
        return True
    found = matcher.constant(matcher.tensor(number, 1)).ravel()
    return sorted(int(axis) % rank for axis in found) == list(range(axes))


def _merge(edits: GraphEdits, matcher: Matcher, number: int) -> None:
    view = edits.view
    product = matcher.maker(matcher.tensor(number, 0))
    node, op_type = matcher.node(product), view.op_types[product]
    if op_type is None or not op_type.attr(node, "adj_x").b or op_type.attr(node, "adj_y").b:
        return  # a sum of other products is none of a weight's gradient
    if matcher.readers(product) != [number]:
        raise NoMatchError("more than the sum reads the products")
    left, right = matcher.inputs(product)
    shapes = [_known(view.shape(tensor), tensor) for tensor in (left, right)]
    rank = len(shapes[0])
    target = [shapes[0][-1], shapes[1][-1]]
    if None in target or _target_shape(matcher, number) != target:
        raise NoMatchError("the sum is not reshaped to a matrix of the operands' last axes")
    if shapes[0][:-1] != shapes[1][:-1] or not _reduces(matcher, number, rank - 2, rank):
        raise NoMatchError("the sum is not over the whole batch of products")
    stem = f"{node.name}/MatMul"
    flat = []
    for side, tensor, width in (("x", left, target[0]), ("y", right, target[1])):
        shape = edits.add_constant(
            f"{stem}/{side}_shape", np.array([-1, width], np.int32), node.device, tensor
        )
        name = f"{stem}/{side}"
        dtypes = {"T": FLOAT, "Tshape": types_pb2.DT_INT32}
        rows = _product(shapes[0][:-1])
        edits.add("Reshape", name, (tensor, shape), node.device, dtypes, [(rows, width)])
        flat.append(edits.output(name, "Reshape"))
    merged = edits.add("MatMul", stem, flat, node.device, {"T": FLOAT}, [tuple(target)])
    merged.attr["transpose_a"].b = True
    merged.attr["transpose_b"].b = False
    edits.redirect[edits.output(matcher.node(number).name, "Sum")] = edits.output(stem, "MatMul")
    edits.units.append(f"weight-gradient: {matcher.node(number).name}")


def _sum_of_bias(edits: GraphEdits, matcher: Matcher, number: int) -> None:
    view = edits.view
    tensor = matcher.tensor(number, 0)
    shape = view.shape(tensor)
    if shape is None or len(shape) < 2:
        return
    channels = shape[-1]
    try:
        wanted = _target_shape(matcher, number)
    except NoMatchError:
        return  # most sums are no gradient of a bias: no near misses
    if channels in (None, 1) or wanted[-1:] != [channels] or set(wanted[:-1]) - {1}:
        return
    if not _reduces(matcher, number, len(shape) - 1, len(shape)):
        return
    node = matcher.node(number)
    name = f"{node.name}/BiasAddGrad"
    gradient = edits.add("BiasAddGrad", name, (tensor,), node.device, {"T": FLOAT}, [(channels,)])
    gradient.attr["data_format"].s = b"NHWC"
    edits.redirect[edits.output(node.name, "Sum")] = edits.output(name, "BiasAddGrad")
    edits.units.append(f"bias-gradient: {node.name}")


def _known(shape: Shape | None, tensor: str) -> Shape:
    if shape is None or len(shape) < 3:
        raise NoMatchError(f"the shape of {tensor!r} is not known to have a rank of 3 or more")
    return shape


def _product(dimensions: Shape) -> int | None:
    total = 1
    for dimension in dimensions:
        if dimension is None:
            return None
        total *= dimension
    return total
