"""Polynomials over named tensors."""

from __future__ import annotations

from fractions import Fraction

import pytest

from graph_passes.rewriter.algebra import constant, symbol

X, Y, R = symbol("x"), symbol("y"), symbol("r")


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (X * Y + R, R + Y * X),
        ((X - Y) * (X + Y), X * X - Y * Y),
        (X - X, constant(0)),
        (symbol("r", 3) * symbol("r", -1), R * R),
        (X * constant(Fraction(1, 2)) + X * constant(0.5), X),
        ((X * R + Y).total(["r"]), R * X.total(["r"]) + Y.total([])),
        ((X - Y).total([]), X.total([]) - Y.total([])),
        (R.total(["r"]), R * symbol("[]")),
        (X.total([]).total([]), X.total([]) * symbol("[]")),
        ((X * R + Y).total(["r"], [("[x]", Y)]), R * Y + Y.total([])),
    ],
)
def test_two_ways_of_writing_agree(left, right):
    assert left == right


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (X * Y, X + Y),
        (X, X * constant(2)),
        ((X * Y).total([]), X.total([]) * Y.total([])),
        ((X * X).total([]), X.total([])),
        ((X * R).total([]), R * X.total([])),
    ],
)
def test_what_differs_is_told_apart(left, right):
    assert left != right
