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

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.policy.op_lists import OpLists
from graph_passes.rewriter.editor import GraphEdits
from graph_passes.rewriter.matcher import MOVES, SELECTS, SUMS, NoMatchError
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.unit_pass import UnitSearch

RULE = "softmax-gradient"
LONGEST_WAY = 16
"""Ops between the gradient of a softmax and the matrix product it comes from."""

_PRODUCTS = ("Mul", "RealDiv")
_PASSES = (*MOVES, *_PRODUCTS, *SELECTS, *SUMS)


def lower_softmax_gradients(search: UnitSearch) -> None:
    """Lets the sums inside gradients of softmaxes go low."""
    if not search.infers("Softmax"):
        return
    edits, gradients = search.edits, _GradientSearch(search.edits, search.lists)
    for number in edits.view.of_op("Softmax"):
        for total in gradients.sums_of(number):
            if gradients.m.output(total) in edits.redirect:
                continue

            def lower(new: Replacement, number: int = number, total: int = total) -> None:
                gradients.require_gradient(number, total)
                if search.is_bfloat16_cpu:
                    new.node_lists[new.view.names[total]] = "infer"
                else:
                    _multiply_by_ones(new, total)

            edits.propose(RULE, total, lower)


class _GradientSearch:
    """Finds what belongs to the gradient of a softmax."""

    def __init__(self, edits: GraphEdits, lists: OpLists) -> None:
        self.m = edits.matcher
        self._edits = edits
        self._lists = lists

    def sums_of(self, softmax: int) -> list[int]:
        """The sums of something times the softmax that are subtracted from that something."""
        m = self.m
        own = m.output(softmax)
        found: list[int] = []
        for product in m.readers(softmax):
            if m.op(product) != "Mul" or m.inputs(product).count(own) != 1:
                continue
            flowing = m.other_input(product, own)
            totals = [n for n in m.readers(product) if m.op(n) == "Sum"]
            found.extend(n for n in totals if self._differences(n, flowing))
        return found

    def _differences(self, total: int, flowing: str) -> list[int]:
        m = self.m
        wanted = [flowing, m.output(total)]
        return [n for n in m.readers(total) if m.op(n) == "Sub" and m.inputs(n) == wanted]

    def require_gradient(self, softmax: int, total: int) -> None:
        """Checks the rest of the pattern.

        Raises:
            NoMatchError: something is amiss.
        """
        m = self.m
        own = m.output(softmax)
        product = m.source(total, 0)
        flowing = m.other_input(product, own)
        differences = self._differences(total, flowing)
        if m.readers(total) != differences:
            raise NoMatchError("more than the gradient of the softmax reads the sum")
        for difference in differences:
            readers = m.readers(difference)
            if any(m.op(n) != "Mul" or not m.reads(n, own) for n in readers):
                raise NoMatchError("the difference is not multiplied by the softmax")
        shape = m.shape_of(own)
        axes = m.constant(m.tensor(total, 1)).ravel().tolist()
        if axes != [-1] and (shape is None or axes != [len(shape) - 1]):
            raise NoMatchError("the sum is not over the last axis")
        if not m.attr(total, "keep_dims").b:
            raise NoMatchError("the sum does not keep its axis")
        if not self._is_from_product(flowing):
            raise NoMatchError("what flows into the softmax is from no matrix product")

    def _is_from_product(self, tensor: str) -> bool:
        """Whether a gradient comes from a matrix product, through what may all be low."""
        m = self.m
        pending, seen, met = [m.maker(tensor)], {m.maker(tensor)}, False
        while pending:
            number = pending.pop()
            op = m.op(number)
            if self._lists.list_of(op) == "allow":
                met = True
                continue
            if op == "Const" or self._is_of_booleans(number):
                continue
            if len(seen) > LONGEST_WAY or not (op in _PASSES or self._is_idle(number)):
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

    def _is_of_booleans(self, number: int) -> bool:
        """Whether a node makes the zeros and ones by which a mask is multiplied."""
        view = self.m.view
        if self.m.op(number) != "Cast":
            return False
        return view.dtypes[view.producers(number)[0]] == types_pb2.DT_BOOL

    def _is_idle(self, number: int) -> bool:
        """Whether a sum is known to move values only."""
        m = self.m
        if m.op(number) != "Sum":
            return False
        list_name = self._edits.node_lists.get(m.node(number).name)
        return list_name == "clear" or m.output(number) in self._edits.redirect


def _multiply_by_ones(new: Replacement, total: int) -> None:
    tensor = new.matcher.tensor(total, 0)
    shape = new.matcher.shape_of(tensor)
    if shape is None or len(shape) < 2 or shape[-1] is None:
        raise NoMatchError("the size of the last axis is not known")
    ones = new.constant(
        np.ones((shape[-1], 1), np.float32), name="ones_product/ones", beside=tensor
    )
    op = "MatMul" if len(shape) == 2 else "BatchMatMulV2"
    new.replace(total, new.add(op, tensor, ones, name="ones_product"))
