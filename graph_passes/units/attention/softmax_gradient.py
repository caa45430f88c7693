"""The sum inside the gradient of a softmax.

Automatic differentiation of y = Softmax(x), with g flowing in, makes

    dx = (g - Sum(g * y, last axis)) * y

Sums are denied, and with the sum all that is behind it. This one is no loss and cannot leave the
range: y is at least 0 and adds up to 1, so the sum is an average of g. Only how it is added up
matters. The CPU's bfloat16 kernel adds up in float32, so there the sum goes low as it is. Kernels
of a GPU add up in the dtype itself, so there it becomes a product with a column of ones, which
adds up in float32.

A softmax that a loss reads instead of a matrix product keeps its gradient: g is then made of
denied ops, and may be larger than float16 holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.rewriter.editor import GraphEdits
from graph_passes.rewriter.matcher import MOVES, SELECTS, SUMS, NoMatchError
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.reduction.ones_product import NAME
from graph_passes.units.unit_pass import UnitSearch

RULE = "softmax-gradient"
LONGEST_WAY = 16
"""Ops between the gradient of a softmax and the matrix product it comes from."""

_PRODUCTS = ("Mul", "RealDiv")
_PASSES = (*MOVES, *_PRODUCTS, *SELECTS, *SUMS)


def lower_softmax_gradients(search: UnitSearch) -> None:
    """Lets the sums inside gradients of softmaxes go low."""
    edits, m = search.edits, search.edits.matcher
    for number in edits.view.of_op("Softmax") if search.infers("Softmax") else ():
        own = m.output(number)
        for product in m.readers(number):
            if m.op(product) != "Mul" or m.inputs(product).count(own) != 1:
                continue
            flowing = m.other_input(product, own)
            for total in m.readers(product):
                if m.op(total) != "Sum":
                    continue
                wanted, readers = [flowing, m.output(total)], m.readers(total)
                differences = [n for n in readers if m.op(n) == "Sub" and m.inputs(n) == wanted]
                if differences:
                    edits.propose(RULE, total, _lower, search, own, flowing, total, differences)


def _lower(
    new: Replacement,
    search: UnitSearch,
    own: str,
    flowing: str,
    total: int,
    differences: Sequence[int],
) -> None:
    """Checks the rest of the pattern around a sum, and lets it go low."""
    m = new.matcher
    if m.readers(total) != differences:
        raise NoMatchError("more than the gradient of the softmax reads the sum")
    for reader in (r for difference in differences for r in m.readers(difference)):
        if m.op(reader) != "Mul" or not m.reads(reader, own):
            raise NoMatchError("the difference is not multiplied by the softmax")
    shape = m.shape_of(own)
    axes = m.constant(m.tensor(total, 1)).ravel().tolist()
    if axes != [-1] and (shape is None or axes != [len(shape) - 1]):
        raise NoMatchError("the sum is not over the last axis")
    if not m.attr(total, "keep_dims").b:
        raise NoMatchError("the sum does not keep its axis")
    if not _is_from_product(search, flowing):
        raise NoMatchError("what flows into the softmax is from no matrix product")
    if search.is_bfloat16_cpu:
        new.node_lists[new.view.names[total]] = "infer"
    else:
        _multiply_by_ones(new, total)


def _is_from_product(search: UnitSearch, tensor: str) -> bool:
    """Whether a gradient comes from a matrix product, through what may all be low."""
    m = search.edits.matcher
    pending, seen, met = [m.maker(tensor)], {m.maker(tensor)}, False
    while pending:
        number = pending.pop()
        op = m.op(number)
        if search.lists.list_of(op) == "allow":
            met = True
            continue
        if op == "Const" or m.attr(number, "SrcT").type == types_pb2.DT_BOOL:
            continue  # as the zeros and ones by which a mask is multiplied
        if len(seen) > LONGEST_WAY or not (op in _PASSES or _is_idle(search.edits, number)):
            return False
        if op in SUMS or op in _PRODUCTS:
            operands = m.inputs(number)
        else:
            operands = m.inputs(number)[1:] if op in SELECTS else m.inputs(number)[:1]
        for maker in map(m.maker, operands):
            if maker not in seen:
                seen.add(maker)
                pending.append(maker)
    return met


def _is_idle(edits: GraphEdits, number: int) -> bool:
    """Whether a sum is known to move values only."""
    m = edits.matcher
    if m.op(number) != "Sum":
        return False
    list_name = edits.node_lists.get(m.node(number).name)
    return list_name == "clear" or m.output(number) in edits.redirect


def _multiply_by_ones(new: Replacement, total: int) -> None:
    tensor = new.matcher.tensor(total, 0)
    shape = new.matcher.shape_of(tensor)
    if shape is None or shape[-1] is None:
        raise NoMatchError("the size of the last axis is not known")
    ones = new.constant(np.ones((shape[-1], 1), np.float32), name=f"{NAME}/ones", beside=tensor)
    op = "MatMul" if len(shape) == 2 else "BatchMatMulV2"
    new.replace(total, new.add(op, tensor, ones, name=NAME))
