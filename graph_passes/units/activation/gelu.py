"""Both forms of GELU, and their gradients.

    tanh form:  0.5 * x * (1 + Tanh(c * (x + b * Pow(x, 3))))      gradient: Pow(x, 2)
    erf form:   0.5 * x * Erfc(-x / sqrt(2)), or 1 + Erf           gradient: Exp(-Square(v))

Pow, Square and Exp are denied, and with them all that is behind, the next matrix product's operand
included. Here they do no harm:

- Rounding. With everything in the target dtype, values and gradients are within 5 and 8 units of
  2^-9 (bfloat16) or within 9 and 9 units of 2^-12 (float16) on [-12, 12], where float32 inside and
  one rounding at the end give 4 and 2: a few roundings of a number near 1. Exp(-v^2) turns the
  rounding of v into at most 2 v^2 Exp(-v^2) < 0.74 times as much.
- Range, tanh form. float16 overflows at |x| = 40, and the gradient multiplies infinity by 0. In
  float16 the powers read x clamped to `CLAMP`. Beyond it, the tanh is at least that of
  c * (10 + b * 1000) > 43, which is exactly 1 in float32 already, and its slope exactly 0: neither
  the value nor the gradient changes. bfloat16 has float32's range.
- Range, erf form. v^2 may overflow to infinity; then Exp(-v^2) is 0, as it is in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from graph_passes.ir.adjacency import walk
from graph_passes.rewriter.matcher import ADDS, SIZES, Matcher, NoMatchError
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.unit_pass import UnitSearch

RULE = "gelu"
CLAMP = 10.0
"""How far from 0 the argument of the powers may be in float16: 10^3 is well within its range."""

_INNER = 0.044715
_OUTER = float(np.sqrt(2 / np.pi))


def lower_gelus(search: UnitSearch) -> None:
    """Lets the powers of GELUs, and the exponentials in their gradients, go low."""
    edits = search.edits
    for number in edits.view.of_op("Tanh") if search.infers("Tanh") else ():
        edits.propose(RULE, number, _lower_powers, number, search.is_float16)
    erfs = [op for op in ("Erf", "Erfc") if search.infers(op)]
    for number in edits.view.of_op(*erfs):
        edits.propose(RULE, number, _lower_exponential, number)


def _lower_powers(new: Replacement, tanh: int, clamp: bool) -> None:
    m = new.matcher
    cube = _cube_in(m, tanh)
    if cube is None:
        return
    x, exponent = m.inputs(cube)
    behind = set(walk([tanh], lambda n: [r for r in m.makers(n) if r != m.source(cube, 0)]))
    # Where it is clamped, so is what is made of it.
    changed = [n for n in behind if n != tanh and m.op(n) != "Const"] if clamp else [cube]
    if not all(behind.issuperset(_value_readers(new, number)) for number in changed):
        raise NoMatchError("more than the tanh reads the cube")
    squares = [n for n in m.readers(m.maker(x)) if _is_slope_of(new, n, x, exponent)]
    powers, slopes = [cube, *squares], set(_slopes(m, tanh))
    if not all(slopes.issuperset(_value_readers(new, number)) for number in squares):
        raise NoMatchError("more than the slope of the tanh is multiplied by the square")
    for number in (*powers, *(behind | slopes if clamp else ())):
        if number in new.accepted.kept:
            raise NoMatchError(f"{m.node(number).name!r} is to be preserved")
    names = [m.node(number).name for number in powers]
    if clamp:
        new.stem = f"{names[0]}/clamped"
        sides = ("least", -CLAMP), ("most", CLAMP)
        bounds = [new.constant(bound, name=side, beside=x) for side, bound in sides]
        clamped = new.op.ClipByValue(x, *bounds, name="")
        for number, name in zip(powers, names, strict=True):
            new.inputs[name] = (clamped, m.tensor(number, 1))
    new.node_lists.update(dict.fromkeys(names, "infer"))


def _value_readers(new: Replacement, number: int) -> list[int]:
    """The readers of a node that ask for more than its shape, and of which something comes."""
    m, is_idle = new.matcher, new.accepted.gate.is_idle
    readers = (reader for reader in m.readers(number) if m.op(reader) not in SIZES)
    return [reader for reader in readers if not is_idle(reader)]


def _cube_in(m: Matcher, tanh: int) -> int | None:
    """The cube in tanh(c * (x + b * x^3)); None where a tanh is of something else."""
    total = _scaled(m, m.tensor(tanh, 0), _OUTER)
    if total is None or m.op(m.maker(total)) not in ADDS:
        return None
    operands = m.inputs(m.maker(total))
    for x, cubic in (operands, operands[::-1]):
        cube = _scaled(m, cubic, _INNER)
        if cube is None:
            continue
        number = m.maker(cube)
        if m.op(number) != "Pow":
            raise NoMatchError(f"the cube is made by {m.op(number)}, not by Pow")
        if m.tensor(number, 0) != x or m.scalar(m.tensor(number, 1)) != 3:
            raise NoMatchError("the power inside the tanh is not the cube of what it is added to")
        return number
    return None


def _slopes(m: Matcher, tanh: int) -> Iterator[int]:
    """What makes the slope 0 where the clamp changes the square."""
    slopes = [reader for reader in m.readers(tanh) if m.op(reader) == "TanhGrad"]
    steps = ("Mul", "Reshape", "Sum")
    return walk(slopes, lambda n: [r for r in m.readers(n) if m.op(r) in steps])


def _scaled(m: Matcher, tensor: str, factor: float) -> str | None:
    """What a product multiplies by a constant factor; None where it is no such product."""
    number = m.maker(tensor)
    if m.op(number) != "Mul":
        return None
    operands = m.inputs(number)
    for constant, other in (operands, operands[::-1]):
        value = m.scalar(constant)
        if value is not None and abs(value / factor - 1) < 1e-2:
            return other
    return None


def _is_slope_of(new: Replacement, number: int, x: str, exponent: str) -> bool:
    """Whether a node is the Pow(x, 3 - 1) that the gradient of Pow(x, 3) makes.

    Where TensorFlow has folded the 3 - 1, what the square is multiplied by has the 3 in it. A
    square of x that a model takes forward is none, and must not be clamped.
    """
    m = new.matcher
    if m.op(number) != "Pow" or m.tensor(number, 0) != x:
        return False
    lowered = m.source(number, 1)
    if m.op(lowered) == "Sub":
        whole, part = m.inputs(lowered)
        return whole == exponent and m.scalar(part) == 1
    readers = _value_readers(new, number)
    makers = {m.maker(tensor) for reader in readers for tensor in m.inputs(reader)} - {number}
    return m.scalar(m.output(lowered)) == 2 and all(
        m.op(maker) == "Mul" and 3 in map(m.scalar, m.inputs(maker)) for maker in makers
    )


def _lower_exponential(new: Replacement, erf: int) -> None:
    """Lists Exp(-v^2) in the gradient of Erf(v) or Erfc(v)."""
    m = new.matcher
    for square in m.readers(m.source(erf, 0)):
        if m.op(square) != "Square":
            continue
        negated = m.readers(square)
        exponentials = [n for number in negated for n in m.readers(number)]
        if [m.op(n) for n in negated] != ["Neg"] or [m.op(n) for n in exponentials] != ["Exp"]:
            raise NoMatchError("the square is not only negated and taken to a power of e")
        new.node_lists.update((m.node(n).name, "infer") for n in (square, exponentials[0]))
