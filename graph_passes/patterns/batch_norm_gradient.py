"""The gradient of a batch normalization written in primitives.

Automatic differentiation makes of the forward half, with dy flowing in:

    d_beta  = Sum(dy)                       d_scale = Sum(x * dy) - d_beta * mean
    d_gamma = d_scale * rsqrt               dv      = RsqrtGrad(rsqrt, d_scale * gamma)
    dx      = dy * scale + spread(-d_beta * scale) / n + 2 * spread(dv) / n * (x - mean)

Of stored statistics, dx is the first term alone. Without a scale, `dv = RsqrtGrad(rsqrt, d_scale)`.
Without an offset the mean is negated before it is multiplied, and so is its gradient:
`-(Sum(dy) * scale)` and `Sum(dy) * -mean`.
"""

from __future__ import annotations

import dataclasses

from graph_passes.patterns.matching import NoMatchError
from graph_passes.patterns.search import SHAPERS, SUMS, Search

_SPREADERS = (*SHAPERS, "BroadcastTo", "Tile")
_LONGEST_SPREAD = 8
"""Ops between a statistic's gradient and its division by the count: 5 with static shapes."""


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradient half of one batch normalization.

    Attributes:
        dy: tensor, the gradient with regard to y.
        dx_sum: node that sums what flows back to x; None where nothing asks for it.
        dx_terms: the tensors of that sum that belong to this unit; none where all of it does.
        d_gamma: tensor, the gradient with regard to gamma; None where nothing asks for it.
        d_beta: tensor, the gradient with regard to beta; None where there is no beta.
    """

    dy: str
    dx_sum: int | None
    dx_terms: tuple[str, ...]
    d_gamma: str | None
    d_beta: str | None


class GradientSearch:
    """Looks for the gradient that belongs to a forward half.

    Args:
        search: the state of the search; receives the nodes of the gradient.
        x: tensor, the input.
        gamma: tensor, the stored scale; None where there is none.
        mean: node that makes the mean; None where the statistics are stored.
        rsqrt: node that makes the inverse deviation.
        scale: node that makes rsqrt * gamma.
        centre: tensor that the scale multiplies in the offset, the mean or its negative.
        has_offset: whether there is a stored offset.
    """

    def __init__(
        self,
        search: Search,
        x: str,
        gamma: str | None,
        *,
        mean: int | None,
        rsqrt: int,
        scale: int,
        centre: str,
        has_offset: bool,
    ) -> None:
        self._s = search
        self._x = x
        self._gamma = gamma
        self._mean = mean
        self._rsqrt = rsqrt
        self._scale = scale
        self._centre = centre
        self._has_offset = has_offset

    def find(self, product: int) -> Gradient | None:
        """The gradient; None where nothing flows back through the unit."""
        x, scale = self._x, self._scale
        m, scale_name = self._s.m, self._s.name(self._scale)
        x_node = m.maker(x)
        outer = [
            reader
            for reader in m.readers(x_node)
            if m.op(reader) == "Mul" and m.reads(reader, x) and reader != product
        ]
        scaled = [n for n in m.readers(scale) if m.op(n) == "Mul" and n not in self._s.inside]
        for weighted in outer:  # x * dy
            dy = m.other_input(weighted, x)
            direct = [n for n in scaled if m.other_input(n, scale_name) == dy]  # dy * scale
            if len(direct) == 1:
                return self._parts(dy, weighted, direct[0])
            if not direct and self._offset_sums(dy):
                return self._parts(dy, weighted, None)
        if scaled:
            raise NoMatchError("the gradient flows back in a way that is not the usual one")
        return None

    def _parts(self, dy: str, weighted: int, direct: int | None) -> Gradient:
        s = self._s
        m = s.m
        dy_sum, flowing, to_mean, to_scale = self._offset_gradient(dy)
        self._require_factor(to_scale, flowing, self._centre)
        x_sum = s.one(s.sums_of(s.name(weighted)), "the sum of x * dy")
        d_scale = s.behind(
            x_sum,
            lambda n: m.op(n) in SUMS and m.reads(n, s.name(to_scale)),
            "the gradient of the scale",
            s.inside,
        )
        d_gamma, into_rsqrt = self._scale_gradient(d_scale)
        dx_sum: int | None = None
        terms: tuple[str, ...] = ()
        if self._mean is None:
            dx_sum = direct
        elif direct is not None:
            dx_sum, terms = self._input_gradient(direct, to_mean, into_rsqrt)
        if dx_sum is not None:
            s.ends.add(dx_sum)
        s.inside.update((flowing, to_mean, to_scale, x_sum, d_scale, into_rsqrt, weighted))
        s.open.add(dy_sum)
        d_beta = dy_sum if self._has_offset else None
        self._require_flat(d_gamma, d_beta)
        return Gradient(dy, dx_sum, terms, self._replaced(d_gamma), self._replaced(d_beta))

    def _input_gradient(
        self, direct: int, to_mean: int, into_rsqrt: int
    ) -> tuple[int, tuple[str, ...]]:
        """The node that sums what flows back to x, and the terms of this unit."""
        s = self._s
        m = s.m
        rsqrt_grad = s.one(s.reading(into_rsqrt, "RsqrtGrad"), "RsqrtGrad")
        mean_term = self._spread(to_mean)
        square_term = self._spread(rsqrt_grad)
        doubled = s.one(s.reading(square_term, "Mul"), "2 * the gradient of the variance")
        if float(m.constant(m.other_input(doubled, s.name(square_term)))) != 2.0:
            raise NoMatchError("the gradient of the squares is not doubled")
        onto_x = s.one(s.reading(doubled, "Mul"), "the gradient through the variance")
        centred = m.expect(m.maker(m.other_input(onto_x, s.name(doubled))), "Sub")
        around = m.maker(m.through(m.tensor(centred, 1), *SHAPERS))
        if m.tensor(centred, 0) != self._x or around != self._mean:
            raise NoMatchError("the gradient of the variance is taken around another mean")
        dx_sum = s.one(s.reading(direct, "AddN"), "the sum of the gradients of x")
        terms = tuple(s.name(n) for n in (direct, mean_term, onto_x))
        if not all(m.reads(dx_sum, term) for term in terms):
            raise NoMatchError("the three gradients of x are not summed in one place")
        s.inside.update((rsqrt_grad, mean_term, square_term, doubled, onto_x, centred, direct))
        return dx_sum, terms

    def _replaced(self, number: int | None) -> str | None:
        """The tensor of a gradient that the fused op makes."""
        if number is None:
            return None
        self._s.replaced.add(number)
        return self._s.name(number)

    def _require_flat(self, d_gamma: int | None, d_beta: int | None) -> None:
        """The fused op gives [channels]; a Reshape behind takes that as well as kept dimensions."""
        m = self._s.m
        around = () if self._gamma is None else self._s.reading(m.maker(self._gamma), "Reshape")
        shaped = any(n in self._s.inside and m.tensor(n, 0) == self._gamma for n in around)
        for end in (d_gamma if shaped else None, d_beta):
            if end is not None and any(m.op(n) != "Reshape" for n in m.readers(end)):
                raise NoMatchError(f"{m.node(end).name!r} is read in its own shape")

    def _offset_gradient(self, dy: str) -> tuple[int, int, int, int]:
        """The sum of dy that belongs to this unit, and where it goes.

        Two units may share one dy (where a sum of two branches follows them); what tells their
        sums apart is the scale that the sum, or its negative, is multiplied by.

        Returns:
            The sum of dy, the node that both products read, the gradient of the mean, and the
            gradient of the scale that flows through the offset.
        """
        s, found = self._s, self._offset_sums(dy)
        if len(found) != 1:
            raise NoMatchError(
                f"found {len(found)} sums of the gradient that reach the mean, not 1"
            )
        dy_sum, flowing, product = found[0]
        end = flowing if self._has_offset else product
        s.behind(dy_sum, lambda n: n == end, "-d_beta", s.open)
        to_scale = s.one([n for n in s.reading(flowing, "Mul") if n != product], "d_beta * mean")
        if self._has_offset:
            return dy_sum, flowing, product, to_scale
        negated = s.reading(product, "Neg")
        if not negated:
            return dy_sum, flowing, product, to_scale  # nothing flows back to x
        s.inside.add(product)
        return dy_sum, flowing, s.one(negated, "the gradient of the mean"), to_scale

    def _offset_sums(self, dy: str) -> list[tuple[int, int, int]]:
        """The sums of dy, each with what both products read, and the product with the scale."""
        s, scale_name = self._s, self._s.name(self._scale)
        m = s.m

        def is_scaled(number: int) -> bool:
            return m.op(number) == "Mul" and m.inputs(number).count(scale_name) == 1

        found: list[tuple[int, int, int]] = []
        for dy_sum in s.sums_of(dy):
            if self._has_offset:
                for negated in s.all_behind(dy_sum, SHAPERS, lambda n: m.op(n) == "Neg", {}):
                    products = [n for n in s.reading(negated, "Mul") if is_scaled(n)]
                    found.extend((dy_sum, negated, product) for product in products)
            else:
                for product in s.all_behind(dy_sum, SHAPERS, is_scaled, {}):
                    flowing = m.maker(m.other_input(product, scale_name))
                    found.append((dy_sum, flowing, product))
        return found

    def _scale_gradient(self, d_scale: int) -> tuple[int | None, int]:
        """The gradient of gamma, and what flows back into the Rsqrt."""
        s, m = self._s, self._s.m
        if self._gamma is None:
            return None, d_scale
        products = s.reading(d_scale, "Mul")
        own = [n for n in products if m.reads(n, s.name(self._rsqrt))]
        into_rsqrt = s.one([n for n in products if n not in own], "the gradient of Rsqrt")
        self._require_factor(into_rsqrt, d_scale, self._gamma)
        d_gamma = s.one(own, "d_gamma") if own else None
        if d_gamma is not None:
            s.ends.add(d_gamma)
        return d_gamma, into_rsqrt

    def _require_factor(self, product: int, one: int, other: str) -> None:
        """Whatever its shape, the other factor of a product must be a certain tensor."""
        m = self._s.m
        factor = m.other_input(product, self._s.name(one))
        if m.through(factor, *SHAPERS) != m.through(other, *SHAPERS):
            raise NoMatchError(f"{m.node(product).name!r} multiplies by something else")

    def _spread(self, number: int) -> int:
        """The division by the count behind a statistic's gradient; what is between is inside."""
        s, last = self._s, number
        for _ in range(_LONGEST_SPREAD):
            divisions = s.reading(last, "RealDiv")
            if divisions:
                return s.one(divisions, "the division by the count")
            last = s.one(s.reading(last, *_SPREADERS), "a spread gradient")
            s.inside.add(last)
        raise NoMatchError(
            f"the gradient behind {self._s.m.node(number).name!r} is not spread over x"
        )
