"""What element-wise ops make of one tensor, as polynomials in it and in functions of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from graph_passes.rewriter.algebra import Polynomial, combined, constant, symbol
from graph_passes.rewriter.matcher import Matcher

X = symbol("x")
MOST_STEPS = 16
"""More than an activation and what is made with its gradient have."""

OwnOps = Callable[[str, Polynomial], Polynomial | None]
"""What an op that is no sum or product makes of its operand, None where that has no name."""


def made_of(m: Matcher, x: str, own: OwnOps) -> dict[str, Polynomial]:
    """The tensors that are made of x alone, in the order in which they are found; x is `X`."""
    values, pending = {x: X}, [m.maker(x)]
    for number in pending:  # grows as it goes
        for reader in m.readers(number):
            made = m.output(reader)
            value = None if made in values else _value_of(m, reader, values, x, own)
            if value is not None:
                values[made] = value
                pending.append(reader)
        if len(pending) > MOST_STEPS:
            break
    return values


def _value_of(
    m: Matcher, number: int, values: Mapping[str, Polynomial], x: str, own: OwnOps
) -> Polynomial | None:
    """What a node makes of tensors of the shape of x, None if that is not known."""
    op, operands, axes = m.op(number), [], len(m.shape_of(x) or ())
    for tensor in m.inputs(number):
        value = values.get(tensor)
        if value is None:
            scalar = m.scalar(tensor)
            if scalar is None or not math.isfinite(scalar) or m.constant(tensor).ndim > axes:
                return None
            value = constant(scalar)
        operands.append(value)
    found = own(op, operands[0]) if len(operands) == 1 else None
    return combined(op, operands) if found is None else found
