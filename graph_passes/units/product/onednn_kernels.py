"""Ops in float32 by oneDNN's kernels, on CPUs for which TensorFlow takes none of them.

By itself it takes them where a CPU has AVX512_VNNI or the like. Elsewhere gradients and attention
run by kernels that take up to many times as long. Two cores with AVX2, in milliseconds by those and
by oneDNN's (`benchmarks/onednn_kernels.py`, which has the least sizes, too):

    gradient to 32 images of 3 x 3 x 512, filter 3 x 3          104  11
    gradient of the filter, volumes 32 x 32 x 32 x 32, stride   441  13
    gradient of a batch normalization, 32 x 48 x 48 x 96         27  17
    pooling of 32 x 56 x 56 x 64 by 3 x 3, with its gradient     40  11
    gradient to 128 rows of 512, of a layer of 512 units        1.1  0.5
    scores of attention, 16 x 12 heads, 197 x 64                 34  19

Conv2D, products of two matrices whose second is not turned, the forward normalization and the
gradients of depthwise filters gain little or lose. What a pooling's gradient picks where elements
are equal is the same one. That of MaxPool3D picks another, and stays as it is.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from graph_passes.ir.eligibility import find_ineligible
from graph_passes.ir.graph_view import FLOAT, elements
from graph_passes.ops.kernels import ONEDNN_LABEL, has_kernel
from graph_passes.ops.op_types import of_onednn
from graph_passes.policy.config import PrecisionConfig
from graph_passes.rewriter.matcher import Matcher
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.unit_pass import UnitSearch

RULE = "onednn-kernel"
_VOLUMES = "Conv3D"
_POOL, _POOL_GRADIENT = "MaxPool", "MaxPoolGrad"
_MATRICES = ("MatMul", "BatchMatMul", "BatchMatMulV2", "Einsum")
_FILTERS: dict[str, int | None] = {
    "Conv2DBackpropFilter": None,
    "Conv2DBackpropInput": 1,
    "Conv3D": 1,
    "Conv3DBackpropFilterV2": None,
    "Conv3DBackpropInputV2": 1,
    "DepthwiseConv2dNative": 1,
    "DepthwiseConv2dNativeBackpropInput": 1,
}
"""Op -> the input that is its filter, None for the one that it makes."""
OPS = (*_FILTERS, *_MATRICES, "AvgPool", _POOL_GRADIENT, "FusedBatchNormGradV3", "Softmax")
_LAYOUTS = (b"", b"NHWC", b"NDHWC")
_FEW_PRODUCTS = 1 << 24
"""Of fewer, oneDNN's kernel takes up to 0.4 ms longer: what it does before it starts."""
_FEW_OF_DEPTHWISE = 1 << 20
_FEW_OF_TURNED = 1 << 19
_FEW_OF_BATCHED, _FEW_OF_EACH = 1 << 21, 1 << 15
_FEW_ELEMENTS = 1 << 16
_FEW_OF_SOFTMAX = 1 << 18


def name_kernels(search: UnitSearch) -> None:
    """Lets ops name oneDNN's kernels where they have much to do.

    What units before have made is looked at, too: this is the last pass for float32.
    """
    config = search.config
    if not search.has_cpu_kernels:
        return
    edits = search.edits = search.edits.onto(search.edits.apply())
    view, m = edits.view, edits.matcher
    kept = {*find_ineligible(view, (), config), *edits.kept}
    for number in view.of_op(*OPS, _POOL):
        op = m.op(number)
        if number in kept or op == _POOL_GRADIENT or not _may_run(m, number, config):
            continue
        if op == _POOL:
            gradients = [n for n in m.readers(number) if _is_gradient(m, n, number)]
            gradients.sort(key=view.names.__getitem__)  # their order in the graph decides nothing
            if gradients and kept.isdisjoint(gradients):
                edits.propose(RULE, number, _write_forward, number, gradients)
        elif op == _VOLUMES or _multiplies_channels(m, number):
            edits.propose(RULE, number, _write_forward, number, [])
        else:
            edits.propose(RULE, number, _write, number)


def _may_run(m: Matcher, number: int, config: PrecisionConfig) -> bool:
    """Whether oneDNN's kernel takes a node, and has enough to do."""
    return (
        m.attr(number, "T").type == FLOAT
        and m.attr(number, "data_format").s in _LAYOUTS
        and m.attr(number, "padding").s in (b"", b"SAME", b"VALID")
        and all(rate == 1 for rate in m.attr(number, "dilations").list.i)
        and has_kernel(of_onednn(m.op(number)), config.device)
        and _has_much_to_do(m, number, config.unknown_dimension)
    )


def _multiplies_channels(m: Matcher, number: int) -> bool:
    """Whether a depthwise convolution makes more channels; oneDNN's kernel forgets it of no row."""
    is_depthwise = m.op(number) == "DepthwiseConv2dNative"
    return is_depthwise and (m.shape_of(m.tensor(number, 1)) or (0,))[-1] != 1


def _has_much_to_do(m: Matcher, number: int, unknown: int) -> bool:
    op = m.op(number)
    if op in _MATRICES:
        return _has_large_matrices(m, number, unknown)
    if op not in _FILTERS:
        few = _FEW_OF_SOFTMAX if op == "Softmax" else _FEW_ELEMENTS
        tensor = m.output(number) if op == "AvgPool" else m.tensor(number, 0)
        return (elements(m.shape_of(tensor) or (0,), unknown) or 0) >= few
    port, is_depthwise = _FILTERS[op], op.startswith("Depthwise")
    weights = m.shape(number) if port is None else m.shape_of(m.tensor(number, port))
    made = m.shape_of(m.tensor(number, 2)) if "Backprop" in op else m.shape(number)
    if weights is None or made is None:
        return False
    # What each element is added up of: a depthwise filter reads one channel.
    terms = elements(weights[: 2 if is_depthwise else -1]) or 0
    few = _FEW_OF_DEPTHWISE if is_depthwise else _FEW_PRODUCTS
    return terms * (elements(made, unknown) or 0) >= few


def _has_large_matrices(m: Matcher, number: int, unknown: int) -> bool:
    """Of single ones the other kernel is slow where it turns the second factor."""
    lengths = _lengths_of_einsum if m.op(number) == "Einsum" else _lengths
    matrices, rows, terms, columns = lengths(m, number, unknown)
    if min(rows, columns) < 2:
        return False
    of_each = rows * terms * columns
    if m.op(number) == "MatMul":
        return m.attr(number, "transpose_b").b and of_each >= _FEW_OF_TURNED
    return matrices > 1 and of_each >= _FEW_OF_EACH and matrices * of_each >= _FEW_OF_BATCHED


def _lengths(m: Matcher, number: int, unknown: int) -> tuple[int, ...]:
    """How many matrices a node makes; rows, terms of each sum and columns; 0 if not known."""
    inputs, made = m.inputs(number), m.shape(number)
    left, right = map(m.shape_of, inputs)
    # oneDNN's kernel has given wrong numbers where a matrix of one factor is for several.
    if left is None or right is None or made is None or left[:-2] != right[:-2]:
        return 0, 0, 0, 0
    if any(_is_turned_by_grappler(m, tensor) for tensor in inputs):
        return 0, 0, 0, 0
    turned = m.attr(number, "transpose_a").b or m.attr(number, "adj_x").b
    sides = made[-2], left[-2 if turned else -1], made[-1]
    return tuple(elements(shape, unknown) or 0 for shape in (made[:-2], *zip(sides)))


def _lengths_of_einsum(m: Matcher, number: int, unknown: int) -> tuple[int, ...]:
    read, _, made = m.attr(number, "equation").s.decode().partition("->")
    factors = read.split(",")
    shapes = [m.shape_of(tensor) for tensor in m.inputs(number)]
    if "." in read or len(factors) != 2 or None in shapes:
        return 0, 0, 0, 0
    lengths = {
        label: unknown if length is None else length
        for labels, shape in zip(factors, shapes, strict=True)
        for label, length in zip(labels, shape or (), strict=True)
    }
    left, right = map(set, factors)
    both, kept = left & right, set(made)
    groups = both & kept, left - right, both - kept, right - left
    return tuple(math.prod(lengths[label] for label in group) for group in groups)


def _is_turned_by_grappler(m: Matcher, tensor: str) -> bool:
    """Whether a product takes over what turns its factor, as Grappler has products do."""
    maker = m.maker(tensor)
    if m.op(maker) != "Transpose":
        return False
    axes = m.numbers_at(maker, 1) or []
    return axes[-2:] == [len(axes) - 1, len(axes) - 2]


def _is_gradient(m: Matcher, number: int, pool: int) -> bool:
    if m.op(number) != _POOL_GRADIENT:
        return False
    attrs = "T", "data_format", "ksize", "padding", "strides"
    return [m.tensor(pool, 0), m.output(pool)] == [*m.inputs(number)[:2]] and all(
        m.attr(number, name) == m.attr(pool, name) for name in attrs
    )


def _named(new: Replacement, number: int, *inputs: str) -> tuple[str, ...]:
    """A node that does the same by oneDNN's kernel; the tensors that it makes."""
    m, op = new.matcher, of_onednn(new.matcher.op(number))
    made = new.copy(
        m.node(number), *inputs, op=op, name=f"{m.op(number)}/onednn", shape=m.shape(number)
    )
    tensors = (made,) if isinstance(made, str) else made
    new.makers[tensors[0]].attr["_kernel"].s = ONEDNN_LABEL
    return tensors


def _write(new: Replacement, number: int) -> None:
    m = new.matcher
    made = _named(new, number, *m.inputs(number))
    for reader in m.readers(number):
        for tensor in m.inputs(reader):
            if m.maker(tensor) == number:
                new.redirect[tensor] = made[m.view.split(tensor)[1]]


def _write_forward(new: Replacement, number: int, gradients: list[int]) -> None:
    """Writes a convolution, or a pooling, which tells its gradients what it picked."""
    m, rows = new.matcher, _Rows(new, number)
    x = rows.fill(m.tensor(number, 0))
    y, *picked = _named(new, number, x, *m.inputs(number)[1:])
    new.replace(number, rows.cut(y, number))
    for gradient in gradients:
        (dx,) = _named(new, gradient, x, y, rows.fill(m.tensor(gradient, 2)), *picked)
        new.replace(gradient, rows.cut(dx, gradient))
        for tensor in (y, dx):
            new.makers[tensor].attr["workspace_enabled"].b = True


class _Rows:
    """Gives a batch that may be empty one row, and takes it off what comes out.

    Without, MaxPoolGrad ends the process, and convolutions make another shape. Where there are
    rows, neither Pad nor Slice copies anything.
    """

    def __init__(self, new: Replacement, number: int) -> None:
        """Writes what is padded and cut off what a node reads first, unless it has rows."""
        x = new.matcher.tensor(number, 0)
        shape = new.matcher.shape_of(x) or ()
        self._new, self._may_be_empty = new, None in shape[:1]
        if not self._may_be_empty:
            return
        rank = len(shape)
        first, others = np.eye(rank, 1, dtype=np.int32), np.eye(rank, dtype=np.int32)[0] - 1
        constant = functools.partial(new.constant, beside=x)
        count = new.length(x, 0, name="rows")
        lack = new.op.Maximum(
            new.op.Sub(constant(np.ones(1, np.int32), name="one"), count, name="lack"),
            constant(np.zeros(1, np.int32), name="none"),
            name="lacking",
        )
        behind = np.concatenate([np.zeros_like(first), first], 1)
        self._paddings = new.op.Mul(lack, constant(behind, name="behind"), name="paddings")
        self._begin = constant(np.zeros(rank, np.int32), name="begin")
        of_first = new.op.Mul(count, constant(first[:, 0], name="first"), name="of_first")
        self._sizes = new.op.AddV2(of_first, constant(others, name="all"), name="sizes")

    def fill(self, tensor: str) -> str:
        """A tensor of one row or more."""
        if not self._may_be_empty:
            return tensor
        filled: str = self._new.op.Pad(tensor, self._paddings, shape=self._new.fact(tensor).shape)
        return filled

    def cut(self, tensor: str, number: int) -> str:
        """A tensor of the rows that there were, in the place of what a node made."""
        if not self._may_be_empty:
            return tensor
        shape = self._new.matcher.shape(number)
        cut: str = self._new.op.Slice(tensor, self._begin, self._sizes, shape=shape)
        return cut
