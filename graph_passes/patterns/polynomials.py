"""Polynomials over named tensors, to tell whether two ways of writing a computation agree.

Element-wise sums and products of tensors are polynomials in them, whatever the order in which they
are written. A sum over axes is one more name, once what does not vary along the axes is taken out
of it: `total(x * d * r)` is `r * [d x]` where r is the same for all elements that are summed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from fractions import Fraction

Monomial = tuple[tuple[str, int], ...]
"""Names with their exponents, in order."""


@dataclasses.dataclass(frozen=True)
class Polynomial:
    """A sum of monomials with coefficients other than 0. Immutable."""

    terms: Mapping[Monomial, Fraction]

    def __add__(self, other: Polynomial) -> Polynomial:
        return _collect((*self.terms.items(), *other.terms.items()))

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self + other * constant(-1)

    def __mul__(self, other: Polynomial) -> Polynomial:
        return _collect(
            (_product(a, b), p * q) for a, p in self.terms.items() for b, q in other.terms.items()
        )

    def total(self, fixed: Collection[str]) -> Polynomial:
        """The sum over axes along which the names in `fixed`, and earlier sums, do not vary.

        A sum of nothing but fixed names has the name "[]", the number of elements.
        """
        totals = []
        for monomial, coefficient in self.terms.items():
            outside = [(n, e) for n, e in monomial if n in fixed or n.startswith("[")]
            inside = [(n, e) for n, e in monomial if (n, e) not in outside]
            name = "[" + " ".join(n if e == 1 else f"{n}^{e}" for n, e in inside) + "]"
            totals.append((_product(tuple(outside), ((name, 1),)), coefficient))
        return _collect(totals)

    def replace(self, name: str, value: Polynomial) -> Polynomial:
        """The polynomial with another in the place of a name that occurs to the first power."""
        result = constant(0)
        for monomial, coefficient in self.terms.items():
            rest = tuple((n, e) for n, e in monomial if n != name)
            one = Polynomial({rest: coefficient})
            result += (
                one * value
                if dict(monomial).get(name) == 1
                else Polynomial({monomial: coefficient})
            )
        return result


def symbol(name: str, exponent: int = 1) -> Polynomial:
    """The polynomial that is a name to some power, which may be negative."""
    return Polynomial({((name, exponent),): Fraction(1)})


def constant(value: Fraction | int | float) -> Polynomial:
    """The polynomial that is a number."""
    return _collect((((), Fraction(value)),))


def _product(left: Monomial, right: Monomial) -> Monomial:
    exponents = dict(left)
    for name, exponent in right:
        exponents[name] = exponents.get(name, 0) + exponent
    return tuple(sorted((name, e) for name, e in exponents.items() if e))


def _collect(terms) -> Polynomial:  # type: ignore[no-untyped-def]
    found: dict[Monomial, Fraction] = {}
    for monomial, coefficient in terms:
        found[monomial] = found.get(monomial, Fraction(0)) + coefficient
    return Polynomial({monomial: c for monomial, c in found.items() if c})
