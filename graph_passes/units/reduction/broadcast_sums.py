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

from graph_passes.ir.graph_view import Shape
from graph_passes.rewriter.matcher import Matcher
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.reduction.gradient_sums import PRODUCTS
from graph_passes.units.reduction.sums import float_sums
from graph_passes.units.unit_pass import UnitSearch

RULE = "idle-sum"


def leave_out_idle_sums(search: UnitSearch) -> None:
    """Takes sums over no axes out, and lets those that are very likely such go low."""
    edits, view, m = search.edits, search.edits.view, search.edits.matcher
    for number in float_sums(edits):
        if m.op(m.source(number, 1)) != "BroadcastGradientArgs":
            continue
        gradient = view.shape(m.tensor(number, 0))
        if gradient is None or _operand(m, number) != gradient:
            continue
        is_certain = None not in gradient or _meets_a_matrix(m, number)
        if is_certain and not view.is_ordered(number):
            edits.propose(RULE, number, _leave_out, number)
        else:
            search.list_nodes(RULE, number, [view.names[number]], "clear")


def _leave_out(new: Replacement, number: int) -> None:
    m = new.matcher
    new.replace(number, m.tensor(number, 0))
    if m.op(m.source(number, 0)) in PRODUCTS:
        # What follows the product follows a clear op now, and would be painted too late.
        for reader in m.readers(number):
            new.node_lists[m.node(reader).name] = "infer"


def _operand(matcher: Matcher, number: int) -> Shape | None:
    """The shape that all readers of a sum reshape it to, None where it is not known."""
    readers = matcher.readers(number)
    if any(matcher.op(reader) != "Reshape" for reader in readers):
        return None
    shapes = {matcher.shape_of(matcher.output(reader)) for reader in readers}
    return shapes.pop() if len(shapes) == 1 else None


def _meets_a_matrix(matcher: Matcher, number: int) -> bool:
    """Whether the other operand has no axes that could repeat this one.

    A product of matrices broadcasts all axes but the last two; a shape without entries is what is
    left of a matrix's.
    """
    tensor = matcher.tensor(number, 1)
    port = matcher.view.split(tensor)[1]
    other = matcher.inputs(matcher.maker(tensor))[1 - port]
    return matcher.shape_of(other) == (0,)
