"""What the patterns of sums have in common: finding sums, and telling what they sum over."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.ir.graph_view import FLOAT, Shape
from graph_passes.rewriter.editor import GraphEdits
from graph_passes.rewriter.matcher import Matcher

_LOSSES = ("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")
"""Ops that make a loss and, as another output, its gradient."""


def float_sums(edits: GraphEdits) -> list[int]:
    """The float32 Sum nodes that may be replaced and that no unit makes yet, by number."""
    view, output = edits.view, edits.matcher.output
    return [
        number
        for number in view.of_op("Sum")
        if view.dtypes[view.base[number]] == FLOAT
        and number not in edits.kept
        and output(number) not in edits.redirect
    ]


class BroadcastGradients:
    """Tells sums that are gradients of broadcasts from those that a model takes forward.

    A model's own sum may leave float16's range where a gradient may: loss scaling skips the step.

    Automatic differentiation sums what flows back to an operand that was repeated over the axes
    that BroadcastGradientArgs finds, or where shapes are static over constant axes, which it keeps
    and reshapes away behind. A model may do the latter; but only a gradient is made of what
    differentiation makes alone.
    """

    def __init__(self, matcher: Matcher) -> None:
        self._m = matcher
        # Nodes that are made of what differentiation makes, and nodes that are not.
        self._gradients: set[int] = set()
        self._others: set[int] = set()

    def has(self, total: int) -> bool:
        """Whether a Sum is a gradient of a broadcast."""
        m = self._m
        if m.op(m.source(total, 1)) == "BroadcastGradientArgs":
            return True
        return m.attr(total, "keep_dims").b and self._is_gradient(m.source(total, 0))

    def _is_gradient(self, start: int) -> bool:
        """Whether an op that only differentiation uses is among those that make a tensor."""
        came_from, known = {start: start}, self._gradients
        pending = [start]
        for number in pending:  # grows as it goes
            if number in known or self._differentiates(number):
                while number not in known:
                    known.add(number)
                    number = came_from[number]
                return True
            for maker in self._m.makers(number):
                if maker not in came_from and maker not in self._others:
                    came_from[maker] = number
                    pending.append(maker)
        self._others.update(pending)
        return False

    def _differentiates(self, number: int) -> bool:
        """Whether a node is of such an op, or reads the gradient that a loss makes."""
        m = self._m
        if "Grad" in m.ops[number] or "Backprop" in m.ops[number]:
            return True
        return any(
            m.ops[maker] in _LOSSES and m.view.split(m.tensor(number, port))[1]
            for port, maker in enumerate(m.makers(number))
        )


def reshaped_to(matcher: Matcher, number: int) -> list[int] | None:
    """The constant shape that all readers of a sum reshape it to; None where there is none."""
    shapes = set()
    for reader in matcher.readers(number):
        sizes = matcher.numbers_at(reader, 1) if matcher.op(reader) == "Reshape" else None
        if sizes is None:
            return None
        shapes.add(tuple(sizes))
    return list(shapes.pop()) if len(shapes) == 1 else None


def reduces(matcher: Matcher, number: int, axes: int, rank: int) -> bool:
    """Whether a sum is over its first `axes` axes, or over those that broadcasting added."""
    found = matcher.numbers_at(number, 1)
    if found is None:
        return matcher.op(matcher.source(number, 1)) == "BroadcastGradientArgs"
    return sorted(axis % rank for axis in found) == list(range(axes))


def summed_axes(matcher: Matcher, number: int, shape: Shape, kept: Sequence[int]) -> int:
    """How many leading axes of a shape a Sum takes away, if it is reshaped to that of a bias.

    Returns:
        At least 1 and fewer than there are; 0 where the sum is of another kind.
    """
    for axes in range(len(shape) - 1, 0, -1):
        rest = list(shape[axes:])
        is_bias = kept[-len(rest) :] == rest and {*kept[: -len(rest)]} <= {1}
        if is_bias and reduces(matcher, number, axes, len(shape)):
            return axes
    return 0
