"""Gradients of biases that the batch normalization behind them takes away again.

A batch normalization with the statistics of its batch subtracts the mean, and with it whatever was
added to all of a channel before. So the gradient of such a bias is 0: the sum over a channel of

    dx = r g (dy - [dy] / n - z [dy z] / n)        z = r (x - m), of which the sum is 0

What a program adds up instead is the rounding of dx, which takes time and, in the target dtype,
comes out thousands of times as large as in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from graph_passes.ir.view import FLOAT
from graph_passes.rewriter.matcher import Matcher
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.normalization.fused_batch_norm import NATIVE, NATIVE_GRADIENTS
from graph_passes.units.normalization.norms import OF_BATCH
from graph_passes.units.unit_pass import UnitSearch

RULE = "cancelled-bias"
OPS = ("BiasAddGrad",)
_SAVED_MEAN = 3
"""The output of the forward op, and the input of its gradient, that is the mean of the batch."""


def cancel_bias_gradients(search: UnitSearch) -> None:
    """Puts zeros in the place of gradients of biases right before a batch normalization."""
    edits, view, m = search.edits, search.edits.view, search.edits.matcher
    centred = {*_of_units(search), *_of_ops(search)}
    for number in view.of_op(*OPS):
        tensor, shape = m.tensor(number, 0), m.shape_of(m.tensor(number, 0))
        if shape is None or number in edits.kept or view.dtypes[view.base[number]] != FLOAT:
            continue
        axis = 1 if m.attr(number, "data_format").s == b"NCHW" else len(shape) - 1
        if (tensor, axis) in centred and shape[axis] is not None:
            edits.propose(RULE, number, _write, number, shape[axis])


def _of_units(search: UnitSearch) -> Iterator[tuple[str, int]]:
    """What flows back from the normalizations that were replaced, and the axis of channels."""
    m = search.edits.matcher
    for found in search.norms:
        norm, gradient = found.forward, found.gradient
        if found.rule != OF_BATCH or norm.is_stored or norm.shape is None:
            continue
        if gradient is None or gradient.dx is None or not gradient.is_proved:
            continue
        is_whole = not gradient.dx_terms or {*m.inputs(gradient.dx)} == {*gradient.dx_terms}
        kept = [axis for axis in range(len(norm.shape)) if axis not in norm.axes]
        if is_whole and len(kept) == 1 and m.output(norm.output) in search.edits.redirect:
            yield m.output(gradient.dx), kept[0]


def _of_ops(search: UnitSearch) -> Iterator[tuple[str, int]]:
    """The same of the program's own fused ops."""
    m, kept = search.edits.matcher, search.edits.kept
    for number in search.edits.view.of_op(*NATIVE_GRADIENTS):
        forward = m.source(number, _SAVED_MEAN)
        is_own = m.op(forward) in NATIVE and m.tensor(forward, 0) == m.tensor(number, 1)
        mean = m.view.split(m.tensor(number, _SAVED_MEAN))[1]
        if not is_own or mean != _SAVED_MEAN or not kept.isdisjoint((number, forward)):
            continue
        if _is_training(m, number) and _is_training(m, forward):
            layout = m.attr(number, "data_format").s
            yield m.output(number), 1 if layout.startswith(b"NC") else len(layout) - 1


def _is_training(m: Matcher, number: int) -> bool:
    return m.attr(number, "is_training").b


def _write(new: Replacement, number: int, channels: int) -> None:
    dx, zeros = new.matcher.tensor(number, 0), np.zeros(channels, np.float32)
    new.read.add(dx)  # the sum alone is left out, not what it is of
    new.replace(number, new.constant(zeros, name="zeros", beside=dx))
