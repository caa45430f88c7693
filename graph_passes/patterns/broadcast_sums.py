"""Sums over the axes that broadcasting added, where it added none.

The gradient of an op that may broadcast is summed over the axes along which an operand was
repeated, and reshaped to the operand. Which axes these are is worked out when the graph runs:

    axes = BroadcastGradientArgs(shape of x, shape of y)
    dx   = Reshape(Sum(gradient, axes), shape of x)

Mostly there are none: `x @ w` with w of rank 2 repeats w alone, and `x + y` of an unknown batch
repeats neither. Sums are denied, so each such gradient would be cast to float32 and back for
nothing. Where static shapes prove that nothing is summed, the Sum goes. Where the gradient and the
operand agree in all but unknown dimensions, it stays, for the case that a batch of 1 meets another,
but counts as an op that moves values.
"""

from __future__ import annotations

from collections.abc import Collection

from graph_passes.patterns.edits import GraphEdits
from graph_passes.patterns.gradient_sums import PRODUCTS
from graph_passes.patterns.matching import Matcher
from graph_passes.patterns.sums import control_inputs, float_sums
from graph_passes.view import Shape


def leave_out_idle_sums(edits: GraphEdits, preserve: Collection[str]) -> None:
    """Takes sums over no axes out, and lets those that are very likely such go low.

    Args:
        edits: receives the changes, the lists and the units.
        preserve: names of nodes that must stay as they are.
    """
    view, matcher = edits.view, edits.matcher
    for number in float_sums(edits):
        node = matcher.node(number)
        axes = matcher.source(number, 1)
        if node.name in preserve or matcher.op(axes) != "BroadcastGradientArgs":
            continue
        gradient = view.shape(matcher.tensor(number, 0))
        if gradient is None or _operand(matcher, number) != gradient:
            continue
        edits.units.append(f"idle-sum: {node.name}")
        waited_for = node.name in view.control_readers or control_inputs(node)
        if not waited_for and (None not in gradient or _meets_a_matrix(matcher, number)):
            edits.redirect[edits.output(node.name, "Sum")] = matcher.tensor(number, 0)
            if matcher.op(matcher.source(number, 0)) in PRODUCTS:
                # What follows the product follows a clear op now, and would be painted too late.
                for reader in matcher.readers(number):
                    edits.listed[matcher.node(reader).name] = "infer"
        else:
            edits.listed[node.name] = "clear"


def _operand(matcher: Matcher, number: int) -> Shape | None:
    """The shape that all readers of a sum reshape it to, None where it is not known."""
    readers = matcher.readers(number)
    if not readers or any(matcher.op(reader) != "Reshape" for reader in readers):
        return None
    shapes = {matcher.view.shape(matcher.output(reader)) for reader in readers}
    return shapes.pop() if len(shapes) == 1 else None


def _meets_a_matrix(matcher: Matcher, number: int) -> bool:
    """Whether the other operand has no axes that could repeat this one.

    A product of matrices broadcasts all axes but the last two; a shape without entries is what is
    left of a matrix's.
    """
    tensor = matcher.tensor(number, 1)
    port = matcher.view.split(tensor)[1]
    other = matcher.inputs(matcher.maker(tensor))[1 - port]
    return matcher.view.shape(other) == (0,)
