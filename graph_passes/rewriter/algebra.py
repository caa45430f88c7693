"""Polynomials over named tensors, to tell whether two ways of writing a computation agree.

Element-wise sums and products of tensors are polynomials in them, whatever the order in which they
are written. A sum over axes is one more name, once what does not vary along the axes is taken out
of it: `total(x * d * r)` is `r * [d x]` where r is the same for all elements that are summed.

Units of one kind are written alike, so that results are remembered.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction

from graph_passes.rewriter.matcher import SUMS

Monomial = tuple[tuple[str, int], ...]
"""Names with their exponents, in order."""
_Terms = frozenset[tuple[Monomial, Fraction]]

_REMEMBERED = 4096
_MINUS_ONE: _Terms = frozenset((((), Fraction(-1)),))


class Polynomial:
    """A sum of monomials with coefficients other than 0. Immutable; equal ones are mostly one.

    Attributes:
        terms: its monomials with their coefficients.
        names: the names that occur.
    """

    __slots__ = ("_hash", "names", "terms")

    def __init__(self, terms: _Terms) -> None:
        self.terms = terms
        self.names = frozenset(name for monomial, _ in terms for name, _ in monomial)
        self._hash = hash(terms)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Polynomial) and self.terms == other.terms)

    def __add__(self, other: Polynomial) -> Polynomial:
        return _sum(self.terms, other.terms)

    def __sub__(self, other: Polynomial) -> Polynomial:
        return _sum(self.terms, (-other).terms)

    def __neg__(self) -> Polynomial:
        return _multiplied(self.terms, _MINUS_ONE)

    def __mul__(self, other: Polynomial) -> Polynomial:
        return _multiplied(self.terms, other.terms)

    def total(
        self, fixed: Collection[str], known: Sequence[tuple[str, Polynomial]] = ()
    ) -> Polynomial:
        """The sum over axes along which the names in `fixed`, and earlier sums, do not vary.

        A sum of nothing but fixed names has the name "[]", the number of elements; what is known
        of a sum by its name takes its place.
        """
        return _total(self, frozenset(fixed), tuple(known))

    def inverse(self) -> Polynomial | None:
        """One divided by the polynomial, None where it is not a single monomial."""
        if len(self.terms) != 1:
            return None
        ((monomial, coefficient),) = self.terms
        inverted = tuple((name, -exponent) for name, exponent in monomial)
        return _of_terms(frozenset(((inverted, 1 / coefficient),)))


_of_terms = functools.lru_cache(_REMEMBERED)(Polynomial)


@functools.lru_cache(_REMEMBERED)
def symbol(name: str, exponent: int = 1) -> Polynomial:
    """The polynomial that is a name to some power, which may be negative."""
    return _of_terms(frozenset(((((name, exponent),), Fraction(1)),)))


@functools.lru_cache(_REMEMBERED)
def constant(value: Fraction | int | float) -> Polynomial:
    """The polynomial that is a number."""
    return _collect((((), Fraction(value)),))


@functools.lru_cache(_REMEMBERED)
def _sum(left: _Terms, right: _Terms) -> Polynomial:
    return _collect((*left, *right))


@functools.lru_cache(_REMEMBERED)
def _multiplied(left: _Terms, right: _Terms) -> Polynomial:
    return _collect((_product(a, b), p * q) for a, p in left for b, q in right)


@functools.lru_cache(_REMEMBERED)
def _total(
    summed: Polynomial, fixed: frozenset[str], known: tuple[tuple[str, Polynomial], ...]
) -> Polynomial:
    total = constant(0)
    for monomial, coefficient in summed.terms:
        outside = [(n, e) for n, e in monomial if n in fixed or n.startswith("[")]
        inside = [(n, e) for n, e in monomial if (n, e) not in outside]
        name = "[" + " ".join(n if e == 1 else f"{n}^{e}" for n, e in inside) + "]"
        factor = _of_terms(frozenset(((tuple(outside), coefficient),)))
        total += factor * dict(known).get(name, symbol(name))
    return total


def combined(op: str, values: Sequence[Polynomial]) -> Polynomial | None:
    """What an element-wise op makes of polynomials, None where that is none."""
    if op in SUMS:
        return sum(values, constant(0))
    if op == "Sub":
        return values[0] - values[1]
    if op == "Neg":
        return -values[0]
    if op in ("Mul", "Square"):
        return values[0] * values[-1]
    inverse = values[1].inverse() if op == "RealDiv" else None
    return None if inverse is None else values[0] * inverse


def _product(left: Monomial, right: Monomial) -> Monomial:
    exponents = dict(left)
    for name, exponent in right:
        exponents[name] = exponents.get(name, 0) + exponent
    return tuple(sorted((name, e) for name, e in exponents.items() if e))


def _collect(terms: Iterable[tuple[Monomial, Fraction]]) -> Polynomial:
    found: dict[Monomial, Fraction] = {}
    for monomial, coefficient in terms:
        found[monomial] = found.get(monomial, Fraction(0)) + coefficient
    return _of_terms(frozenset((monomial, c) for monomial, c in found.items() if c))
