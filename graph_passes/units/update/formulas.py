"""The updates that one op of TensorFlow computes.

    ResourceApplyGradientDescent   var -= alpha * delta
    ResourceApplyKerasMomentum     accum = accum * momentum - lr * grad; var += accum, or
                                   accum * momentum - lr * grad where it is Nesterov's
    ResourceApplyAdam              m += (grad - m) * (1 - beta1); v += (grad^2 - v) * (1 - beta2)
                                   var -= m * lr / (sqrt(v) + epsilon), with powers of beta of 0
    ResourceApplyRMSProp           ms += (grad^2 - ms) * (1 - rho)
                                   mom = mom * momentum + lr * grad / sqrt(ms + epsilon); var -= mom
    ResourceApplyCenteredRMSProp   the same with sqrt(ms - mg^2 + epsilon), mg as ms of grad

What they compute differs from what was written by rounding, and by `1 - beta`: the ops are given
beta in float32, so that the rate is a multiple of 2^-24 and up to 2^-25 from what it was. That is
1.3e-5 of the rate of 0.001 in Adam, as in all that has been trained with these ops.

No op computes what Keras does in Adagrad (`sqrt(accum + epsilon)`: the ops add epsilon to the root,
or have none), in Nadam (the momentum of its schedule is not that of its average), in RMSprop
without momentum (the op writes a slot that the optimizer does not have) and in Adam with amsgrad
(the maximum in ResourceApplyAdamWithAmsgrad drops a NaN of `v`, and training seems to go on).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from graph_passes.rewriter.algebra import Monomial, Polynomial, constant, symbol
from graph_passes.rewriter.matcher import NoMatchError
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.update.expression import Formula, Update, by_tensors

_CLOSEST = Fraction(1, 1 << 14)
"""How far from a rate that of an op may be, relative to it."""
_LOST = Fraction(1, 1 << 22)
"""How far from 1 the two factors of a moving average may add up to."""

Arguments = Mapping[str, Polynomial | str | bool]
"""Arguments of an op: a scalar, the name of a tensor or variable in a formula, or an attribute."""

ADAM = "ResourceApplyAdam"
SQUARES, SHIFT = "squares", "shift"
"""Arguments that Adam's op lacks: what is averaged where that is not the gradient's square, and
(1 - beta1) / beta1."""

_Values = Sequence[Polynomial | str | bool]
_Terms = dict[Monomial, Polynomial]


class _OtherFormulaError(Exception):
    """The update is of another kind."""


@functools.lru_cache(maxsize=1024)
def op_of_update(formula: Formula) -> tuple[str, Arguments]:
    """The op that computes an update, and its arguments.

    Raises:
        NoMatchError: there is none.
    """
    slots = range(1, len(formula.values))
    for op, names, read, count in _FORMULAS:
        for order in itertools.permutations(slots) if count == len(slots) else ():
            with contextlib.suppress(_OtherFormulaError):
                values = ("old 0", *read(formula, *order))
                return op, dict(zip(names.split(), values, strict=True))
    raise NoMatchError("it is no update that one op computes")


def _descent(formula: Formula) -> _Values:
    """`var -= alpha * delta`, where at least one product is saved."""
    step = _step(formula)
    if len(step) != 1 or not formula.is_scaled:
        raise _OtherFormulaError
    ((tensor, factor),) = step.items()
    return -factor, _name(tensor)


def _momentum(formula: Formula, accum: int) -> _Values:
    kept, (gradient, rate) = _decayed(formula, accum)
    step, new = _step(formula), ((f"new {accum}", 1),)
    is_nesterov = step == {new: kept, gradient: rate}
    if not is_nesterov and step != {new: constant(1)}:
        raise _OtherFormulaError
    return f"old {accum}", -rate, _name(gradient), kept, is_nesterov


def _adam(formula: Formula, m: int, v: int, power: int = 2) -> _Values:
    gradient, beta1 = _average(formula, m, 1)
    square, beta2 = _average(formula, v, power)
    step, none = _step(formula), constant(0)
    if (gradient == square) != (power == 2) or len(step) != 1:
        raise _OtherFormulaError
    ((tensors, factor),) = step.items()
    terms = by_tensors(formula.within(_below(tensors, {f"new {m}": 1})))
    epsilon = terms.pop((), none)
    roots = [name for name, value in formula.inner if value == symbol(f"new {v}")]
    if terms not in [{((root, 1),): constant(1)} for root in roots]:
        raise _OtherFormulaError
    found = (f"old {m}", f"old {v}", none, none, -factor, beta1, beta2, epsilon, gradient)
    if power == 2:
        return found
    kept = _number(beta1)
    if not kept:
        raise _OtherFormulaError
    return *found, square, constant((1 - kept) / kept)


def _rms(formula: Formula, ms: int, mom: int, mg: int | None = None) -> _Values:
    gradient, rho = _average(formula, ms, 2)
    kept, (tensors, rate) = _decayed(formula, mom)
    below = _below(tensors, {gradient: 1})
    if _step(formula) != {((f"new {mom}", 1),): constant(-1)} or not below.startswith("root"):
        raise _OtherFormulaError
    terms = by_tensors(formula.within(below))
    epsilon = terms.pop((), constant(0))
    wanted = {((f"new {ms}", 1),): constant(1)}
    if mg is not None:
        if _average(formula, mg, 1) != (gradient, rho):
            raise _OtherFormulaError
        wanted[((f"new {mg}", 2),)] = constant(-1)
    if terms != wanted:
        raise _OtherFormulaError
    slots = (f"old {slot}" for slot in (mg, ms, mom) if slot is not None)
    return *slots, rate, rho, kept, epsilon, gradient


_OF_ADAM = "var m v beta1_power beta2_power lr beta1 beta2 epsilon grad"
_RMS = "ms mom lr rho momentum epsilon grad"
_FORMULAS: Sequence[tuple[str, str, Callable[..., _Values], int]] = (
    ("ResourceApplyGradientDescent", "var alpha delta", _descent, 0),
    ("ResourceApplyKerasMomentum", "var accum lr grad momentum use_nesterov", _momentum, 1),
    (ADAM, _OF_ADAM, _adam, 2),
    (ADAM, f"{_OF_ADAM} {SQUARES} {SHIFT}", functools.partial(_adam, power=1), 2),
    ("ResourceApplyRMSProp", f"var {_RMS}", _rms, 2),
    ("ResourceApplyCenteredRMSProp", f"var mg {_RMS}", _rms, 3),
)
"""Op, its arguments, what finds all but the first, and how many variables it updates besides the
first."""


def _step(formula: Formula) -> _Terms:
    """What the first variable changes by."""
    return by_tensors(formula.values[0] - symbol("old 0"))


def _decayed(formula: Formula, slot: int) -> tuple[Polynomial, tuple[Monomial, Polynomial]]:
    """Of `old * kept + tensors * rate`: kept, and tensors with their rate."""
    terms = by_tensors(formula.values[slot])
    kept = terms.pop(((f"old {slot}", 1),), constant(0))
    if slot not in formula.old or len(terms) != 1:
        raise _OtherFormulaError
    ((tensors, rate),) = terms.items()
    return kept, (tensors, rate)


def _average(formula: Formula, slot: int, exponent: int) -> tuple[str, Polynomial]:
    """Of a moving average of a gradient or its square: the gradient, and the op's beta."""
    kept, (tensors, rate) = _decayed(formula, slot)
    gradient, keeps, takes = _name(tensors, exponent), _number(kept), _number(rate)
    if keeps is None or takes is None or abs(keeps + takes - 1) > _LOST:
        raise _OtherFormulaError
    beta = np.float32(1) - np.float32(float(takes))
    made = Fraction(float(np.float32(1) - beta))
    if abs(made - takes) > _CLOSEST * abs(takes):
        off = float(abs(made - takes) / takes)
        raise NoMatchError(f"no float32 beta gives the rate {float(takes):g}: {off:.1e} off")
    return gradient, constant(Fraction(float(beta)))


def _below(tensors: Monomial, above: Mapping[str, int]) -> str:
    """The one name by which others are divided."""
    rest = [(name, exponent) for name, exponent in tensors if above.get(name) != exponent]
    if len(rest) != 1 or rest[0][1] != -1 or len(tensors) != len(above) + 1:
        raise _OtherFormulaError
    return rest[0][0]


def _number(value: Polynomial) -> Fraction | None:
    """The value of a constant polynomial."""
    terms = dict(value.terms)
    return terms.get((), Fraction(0)) if terms.keys() <= {()} else None


def _name(tensors: Monomial, exponent: int = 1) -> str:
    """The one tensor from elsewhere, to a power, that a product consists of."""
    if len(tensors) != 1 or tensors[0][1] != exponent or not tensors[0][0].startswith("x "):
        raise _OtherFormulaError
    return tensors[0][0]


def write_scalar(
    new: Replacement,
    update: Update,
    value: Polynomial,
    name: str,
    constants: dict[tuple[str, float], str],
) -> str:
    """Writes a scalar of an update: a constant, or the product of scalars of the graph.

    Constants of the graph, by device and value, are used again and receive those that are written.

    Raises:
        NoMatchError: it is another polynomial.
    """
    ((monomial, coefficient), *more) = value.terms or [((), Fraction(0))]
    if more or any(exponent < 1 for _, exponent in monomial):
        raise NoMatchError(f"{name} is not a product of scalars")
    factors = [update.tensors[each] for each, exponent in monomial for _ in range(exponent)]
    if coefficient != 1 or not factors:
        key, own = (new.device, float(coefficient)), f"{name}_factor" if factors else name
        if key not in constants:
            constants[key] = new.constant(key[1], name=own, beside=update.tensors["old 0"])
        factors.append(constants[key])
    return functools.reduce(lambda a, b: new.op.Mul(a, b, name=name, shape=()), factors)
