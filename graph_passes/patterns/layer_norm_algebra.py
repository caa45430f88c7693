"""Proof that the nodes of a normalization compute layer normalization and its gradient.

Both halves are read as polynomials in x, the mean m, the inverse deviation r, gamma g, beta b, the
gradient d with regard to y and the inverse i of the number of elements a statistic is taken over:

    y  = r g (x - m) + b
    dx = r g d - r i [g d] - r^3 i (x - m) ([g d x] - m [g d])

where [...] is a sum over the axes of the statistics. The sums behind it are those of `d r (x - m)`
for gamma and `d` for beta.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fractions import Fraction

from graph_passes.patterns.layer_norm import Norm
from graph_passes.patterns.layer_norm_gradient import NormGradient
from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.patterns.polynomials import Polynomial, constant, symbol
from graph_passes.patterns.search import ADDS, SHAPERS
from graph_passes.view import Shape

_FIXED = ("m", "r", "i")
_SAME_ELEMENTS = (*SHAPERS, "BroadcastTo", "Tile")


@dataclasses.dataclass(frozen=True)
class ParameterSums:
    """The sums over the batch behind the gradient of a normalization.

    Attributes:
        gamma: nodes that sum the gradient with regard to gamma.
        beta: nodes that sum the gradient with regard to beta.
    """

    gamma: tuple[int, ...]
    beta: tuple[int, ...]


def normalized_size(matcher: Matcher, norm: Norm) -> int:
    """The number of elements that a statistic is taken over, where they lie side by side.

    Raises:
        NoMatchError: the axes are not the last ones, or their sizes are not known.
    """
    shape = _known_shape(matcher, norm.x)
    rank = len(shape)
    axes = sorted(axis % rank for axis in norm.axes)
    if axes != list(range(rank - len(axes), rank)) or len(axes) == rank:
        raise NoMatchError("the statistics are not taken over the last axes")
    size = 1
    for axis in axes:
        if shape[axis] is None:
            raise NoMatchError("the size of a statistic's axes is not known")
        size *= shape[axis]  # type: ignore[operator]
    return size


def prove(matcher: Matcher, norm: Norm, gradient: NormGradient | None) -> ParameterSums:
    """Proves both halves, and finds the sums that are the gradients of gamma and beta.

    Raises:
        NoMatchError: a half computes something else, or its shapes are not known.
    """
    algebra = _Algebra(matcher, norm, gradient.dy if gradient else None)
    if algebra.of_node(norm.output) != _output(norm):
        raise NoMatchError("what is made of the statistics is not x * scale + offset")
    if gradient is None:
        return ParameterSums((), ())
    if gradient.dx_terms:
        total = constant(0)
        for tensor in gradient.dx_terms:
            total += algebra.of(tensor)
        if total != _input_gradient(norm):
            raise NoMatchError("what flows back is not the gradient of x * scale + offset")
    return _parameter_sums(matcher, norm, gradient, algebra)


def _scale(norm: Norm) -> Polynomial:
    return symbol("r") if norm.gamma is None else symbol("r") * symbol("g")


def _output(norm: Norm) -> Polynomial:
    scaled = _scale(norm) * (symbol("x") - symbol("m"))
    return scaled if norm.beta is None else scaled + symbol("b")


def _input_gradient(norm: Norm) -> Polynomial:
    r, i, m, x = (symbol(name) for name in "rimx")
    weighted = symbol("d") if norm.gamma is None else symbol("d") * symbol("g")
    mean = weighted.total(_FIXED)
    deviation = (weighted * x).total(_FIXED) - m * mean
    return r * weighted - r * i * mean - r * r * r * i * (x - m) * deviation


def _parameter_sums(
    m: Matcher, norm: Norm, gradient: NormGradient, algebra: _Algebra
) -> ParameterSums:
    gamma, beta = [], []
    normalized = symbol("d") * symbol("r") * (symbol("x") - symbol("m"))
    rank = len(_known_shape(m, norm.x))
    leading = set(range(rank - len(norm.axes)))
    for number in [*gradient.nodes, *_sums_of(m, gradient.dy)]:
        if m.op(number) != "Sum" or algebra.summed_axes(number) != leading:
            continue
        summed = algebra.of(m.tensor(number, 0))
        if summed == normalized and number not in gamma:
            gamma.append(number)
        elif summed == symbol("d") and number not in beta:
            beta.append(number)
    return ParameterSums(tuple(gamma), tuple(beta))


def _sums_of(m: Matcher, tensor: str) -> list[int]:
    return [n for n in m.readers(m.maker(tensor)) if m.op(n) == "Sum" and m.tensor(n, 0) == tensor]


class _Algebra:
    """Reads tensors of one unit as polynomials."""

    def __init__(self, matcher: Matcher, norm: Norm, dy: str | None) -> None:
        self._m = matcher
        self._norm = norm
        self._size = normalized_size(matcher, norm)
        self._rank = len(_known_shape(matcher, norm.x))
        self._axes = {axis % self._rank for axis in norm.axes}
        named = {norm.x: "x", norm.gamma: "g", norm.beta: "b", dy: "d"}
        self._known: dict[str, Polynomial] = {t: symbol(n) for t, n in named.items() if t}
        self._statistics: Mapping[int, str] = {
            norm.rsqrt: "r",
            **({} if norm.mean is None else {norm.mean: "m"}),
        }

    def of(self, tensor: str) -> Polynomial:
        """A tensor as a polynomial.

        Raises:
            NoMatchError: it is made by an op that has no place in the unit.
        """
        known = self._known.get(tensor)
        if known is None:
            known = self._known[tensor] = self.of_node(self._m.maker(tensor))
        return known

    def of_node(self, number: int) -> Polynomial:
        """The tensor that a node makes as a polynomial."""
        m, op = self._m, self._m.op(number)
        if number in self._statistics:
            return symbol(self._statistics[number])
        inputs = m.inputs(number)
        if op in _SAME_ELEMENTS:
            return self.of(inputs[0])
        if op == "Const" and m.constant(m.output(number)).size == 1:
            return constant(Fraction(m.constant(m.output(number)).item()))
        if op in (*ADDS, "AddN"):
            total = constant(0)
            for tensor in inputs:
                total += self.of(tensor)
            return total
        if op == "Sub":
            return self.of(inputs[0]) - self.of(inputs[1])
        if op == "Mul":
            return self.of(inputs[0]) * self.of(inputs[1])
        if op == "Neg":
            return self.of(inputs[0]) * constant(-1)
        if op == "RealDiv":
            self._require_count(inputs[1])
            return self.of(inputs[0]) * symbol("i")
        if op == "RsqrtGrad" and m.maker(inputs[0]) == self._norm.rsqrt:
            return symbol("r", 3) * self.of(inputs[1]) * constant(Fraction(-1, 2))
        if op == "Sum":
            return self._sum(number)
        raise NoMatchError(f"{m.node(number).name!r} is {op}, which the unit has no place for")

    def _sum(self, number: int) -> Polynomial:
        axes = self.summed_axes(number)
        summed = self.of(self._m.tensor(number, 0))
        if not axes:
            return summed
        if axes != self._axes:
            raise NoMatchError(f"{self._m.node(number).name!r} sums over other axes")
        total = summed.total(_FIXED)
        # The elements add up to their mean times their number.
        count = symbol("i", -1)
        return total.replace("[]", count).replace("[x]", symbol("m") * count)

    def summed_axes(self, number: int) -> set[int]:
        """The axes that a Sum is over, those of size 1 left out where that is known."""
        m = self._m
        maker = m.source(number, 1)
        if m.op(maker) == "Const":
            found = m.constant(m.tensor(number, 1)).ravel().tolist()
            return {int(axis) % self._rank for axis in found}
        m.expect(maker, "BroadcastGradientArgs")
        port = m.view.split(m.tensor(number, 1))[1]
        shapes = [self._shape_of(tensor) for tensor in m.inputs(maker)]
        own, other = shapes[port], shapes[1 - port]
        return {a for a in range(self._rank) if own[a] == 1 and other[a] != 1}

    def _shape_of(self, tensor: str) -> Shape:
        """The shape whose sizes a tensor holds, with as many axes as x has."""
        m = self._m
        maker = m.expect(m.maker(tensor), "Shape", "Const")
        if m.op(maker) == "Const":
            shape = tuple(m.constant(tensor).ravel().tolist())
        else:
            shape = _known_shape(m, m.tensor(maker, 0))
        if len(shape) > self._rank:
            raise NoMatchError("a tensor of the gradient has more axes than x")
        return (1,) * (self._rank - len(shape)) + shape

    def _require_count(self, tensor: str) -> None:
        """Asks that a divisor is the number of elements that statistics are taken over."""
        m = self._m
        maker = m.maker(tensor)
        if m.op(maker) == "Const":
            if m.constant(tensor).ravel().tolist() == [float(self._size)]:
                return
        elif m.op(maker) == "Cast":
            product = m.expect(m.source(maker, 0), "Prod")
            gathered = m.expect(m.source(product, 0), "GatherV2")
            shape = m.expect(m.source(gathered, 0), "Shape")
            axes = m.source(m.expect(m.source(gathered, 1), "FloorMod"), 0)
            shifted = m.inputs(m.expect(axes, *ADDS))
            given = _known_shape(m, m.tensor(shape, 0))
            if given == _known_shape(m, self._norm.x) and any(
                tuple(m.constant(t).ravel().tolist()) == self._norm.axes for t in shifted
            ):
                return
        raise NoMatchError("a mean's gradient is not divided by the number of elements")


def _known_shape(m: Matcher, tensor: str) -> Shape:
    shape = m.view.shape(tensor)
    if shape is None:
        raise NoMatchError(f"the shape of {tensor!r} is not known")
    return shape
