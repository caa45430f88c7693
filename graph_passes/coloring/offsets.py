"""Activations less what they are at 0: a small difference of numbers that are not.

    Softplus(x) - log(2);  2 * Sigmoid(x) - 1;  x - Tanh(x)

What is left is nearly a multiple of x, or less. In bfloat16 a softplus near 0.69 is off by up to
0.002, and so is log(2) itself, always to one side: for x around 0.1 the difference is off by 4 %,
that of a sigmoid by 5 %, x - Tanh(x) by 20 %, each twenty times and more what a rounded x makes of
it. So the activation and the difference are float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from graph_passes.coloring.state import CLEAR, Coloring
from graph_passes.coloring.ways import ADDITIONS, MOST_NEAR, SCALINGS, Ways, stored_numbers
from graph_passes.ir.adjacency import walk

_AT_ZERO: Mapping[str, float] = {"Sigmoid": 0.5, "Softplus": math.log(2)}
_LIKE_THE_ARGUMENT = frozenset(("Atan", "Softsign", "Tanh"))
"""They are nearly what they are made of, where that is small."""
_NEAR = 1 / 16
"""How much what is left at 0 may be of what is subtracted, for constants that are written short."""

_Place = tuple[float, tuple[int, ...]]
"""What the last of the vertices that move or scale an activation is at 0, and those vertices."""


def offsets(coloring: Coloring, ways: Ways) -> set[int]:
    """The activations from which their values at 0 are taken, with what leads there."""
    found = set[int]()
    for vertex in coloring.floats_of(_LIKE_THE_ARGUMENT):
        argument = {*ways.makers(vertex)}
        differences = [r for r in ways.readers(vertex) if ways.op_of(r) == "Sub"]
        differences = [r for r in differences if argument.intersection(ways.makers(r))]
        found.update((vertex, *differences) if differences else ())
    activations = coloring.floats_of(frozenset(_AT_ZERO))
    if activations:
        found.update(*map(_Search(coloring, ways).offsets, activations))
    return found


class _Search:
    def __init__(self, coloring: Coloring, ways: Ways) -> None:
        self._codes, self._ways = coloring.list_codes, ways
        stored = stored_numbers(coloring, coloring.has_op(ADDITIONS | SCALINGS | {"Log"}))
        self._numbers = {v: float(values[0]) for v, values in stored if len(values) == 1}
        for vertex in coloring.floats_of({"Log"}):
            for value in filter(None, map(self._numbers.get, ways.makers(vertex))):
                self._numbers[vertex] = math.log(abs(value))

    def offsets(self, activation: int) -> Iterator[int]:
        """What leads from an activation to the differences from its value at 0."""
        start: _Place = (_AT_ZERO[self._ways.op_of(activation)], (activation,))
        for value, path in islice(walk([start], self._scaled), MOST_NEAR):
            for reader in self._ways.readers(path[-1]):
                if self._is_offset(reader, path[-1], value):
                    yield from path
                    yield reader

    def _scaled(self, place: _Place) -> Iterator[_Place]:
        value, path = place
        for reader in self._ways.readers(path[-1]):
            factor = self._factor(path[-1], reader)
            if factor is not None:
                yield value * factor, (*path, reader)

    def _factor(self, vertex: int, reader: int) -> float | None:
        """What an op multiplies a tensor by, 1 if it moves it; None of any other."""
        op, makers = self._ways.op_of(reader), self._ways.makers(reader)
        if op in SCALINGS:
            number = self._other_number(vertex, makers)
            if op == "Mul" or not number:
                return number
            return 1 / number if makers[0] == vertex else None
        is_moved = self._codes[reader] == CLEAR and len(makers) == 1
        return -1.0 if op == "Neg" else 1.0 if is_moved else None

    def _is_offset(self, reader: int, vertex: int, value: float) -> bool:
        """Whether an op takes the difference of a tensor and a number near its value at 0."""
        op = self._ways.op_of(reader)
        number = self._other_number(vertex, self._ways.makers(reader)) if op in ADDITIONS else None
        left = abs(value - number if op == "Sub" else value + number) if number else math.inf
        return left <= _NEAR * abs(value)

    def _other_number(self, vertex: int, makers: Sequence[int]) -> float | None:
        """The number that an op reads besides a tensor."""
        others = [maker for maker in makers if maker != vertex]
        return self._numbers.get(others[0]) if len(others) == 1 and len(makers) == 2 else None
