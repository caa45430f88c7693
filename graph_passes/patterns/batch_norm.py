"""Batch normalization written out in primitives, as Keras 3 and `tf.nn` write it.

Forward, over all axes but that of the channels:

    mean     = Mean(x)                      variance = Mean(SquaredDifference(x, mean))
    scale    = Rsqrt(variance + epsilon) * gamma
    y        = x * scale + (beta - mean * scale)

and its gradient as automatic differentiation makes it. Without gamma the scale is the Rsqrt;
without beta the last term is `-mean * scale`. `find_batch_norms` recognizes both halves by
structure; shape ops between the parts (Reshape, Squeeze, Tile, BroadcastTo) are looked through,
since the stored mean and variance come with and without kept dimensions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np

from graph_passes.patterns.batch_norm_gradient import Gradient, GradientSearch
from graph_passes.patterns.edits import NearMiss
from graph_passes.patterns.images import Images
from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.patterns.search import ADDS, PARAMETERS, SHAPERS, Search

MIN_EPSILON = {"GPU": float(np.float32(1e-5)), "CPU": 0.0}
"""Device -> the smallest epsilon that its fused kernels take; on a GPU that is cuDNN's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchNorm:
    """One recognized batch normalization.

    Attributes:
        x: tensor, the input.
        gamma: tensor, the scale [channels]; None where there is none.
        beta: tensor, the offset [channels]; None where there is none.
        epsilon: what is added to the variance.
        output: node that makes y.
        stored_mean: tensors [channels] of the mean that nodes outside the unit read.
        stored_variance: the same for the variance.
        gradient: the other half, None where the graph has none.
        nodes: the nodes of both halves.
        images: how x is laid out; None where that is not known.
        obstacle: what is in the way of one fused op, None where there is nothing.
    """

    x: str
    gamma: str | None
    beta: str | None
    epsilon: float
    output: int
    stored_mean: tuple[str, ...]
    stored_variance: tuple[str, ...]
    gradient: Gradient | None
    nodes: frozenset[int]
    images: Images | None
    obstacle: str | None


def find_batch_norms(
    matcher: Matcher, preserve: Collection[str], least_epsilon: float
) -> tuple[list[BatchNorm], list[NearMiss]]:
    """All batch normalizations over a batch in a graph.

    Args:
        matcher: reads the graph.
        preserve: names of nodes that must stay; none may be inside a fused op.
        least_epsilon: the smallest that the fused op takes.

    Returns:
        The units, and what came close with the reason why it is none.
    """
    found, misses = [], []
    for number in matcher.view.of_op("Rsqrt"):
        search = _ForwardSearch(matcher, number, preserve, least_epsilon)
        try:
            unit = search.match()
        except NoMatchError as miss:
            misses.append(NearMiss(matcher.node(number).name, str(miss)))
        else:
            if unit is not None:
                found.append(unit)
    return found, misses


class _ForwardSearch(Search):
    """The search that starts from one Rsqrt."""

    def __init__(
        self, matcher: Matcher, rsqrt: int, preserve: Collection[str], least_epsilon: float
    ) -> None:
        super().__init__(matcher)
        self._rsqrt = rsqrt
        self._preserve = preserve
        self._least_epsilon = least_epsilon
        self.inside.add(rsqrt)

    def match(self) -> BatchNorm | None:
        """The unit; None where this is no batch statistic at all."""
        m = self.m
        add = m.source(self._rsqrt, 0)
        if m.op(add) not in ADDS:
            return None
        sides = sorted(m.inputs(add), key=lambda t: m.op(m.maker(t)) == "Const")
        if len(sides) != 2 or m.op(m.maker(sides[1])) != "Const":
            return None
        variance = m.maker(m.through(sides[0], *SHAPERS))
        if m.op(variance) != "Mean" or m.op(m.source(variance, 0)) != "SquaredDifference":
            return None
        axes = m.constant(m.tensor(variance, 1)).ravel().tolist()
        if 0 not in axes:
            return None  # LayerNormalization, GroupNormalization
        epsilon = float(m.constant(sides[1]))
        squares = m.source(variance, 0)
        x, mean = self._mean_of(squares, axes)
        self.inside.update((add, variance, squares, mean))
        scale, gamma = self._scale(x)
        product = self.only(scale, lambda n: m.op(n) == "Mul" and m.reads(n, x), "x * scale")
        output = self.only(product, lambda n: m.op(n) in ADDS, "the sum with the offset")
        offset = m.maker(m.other_input(output, self.name(product)))
        centre, subtracted, beta = self._offset(offset, scale)
        if m.maker(m.through(subtracted, *SHAPERS)) != mean:
            raise NoMatchError("the mean that is subtracted is not that of the variance")
        self.inside.update((scale, product))
        self.shapes_between(subtracted, mean)
        self.shapes_between(sides[0], variance)
        backward = GradientSearch(
            self,
            x,
            gamma,
            mean=mean,
            rsqrt=self._rsqrt,
            scale=scale,
            centre=centre,
            has_offset=beta is not None,
        )
        gradient = backward.find(product)
        stored_mean, stored_variance = self._stored(mean), self._stored(variance)
        images, obstacle = None, None
        try:
            images = self._images(x, axes, (centre, sides[0]))
            if epsilon < self._least_epsilon:
                raise NoMatchError(f"epsilon {epsilon:g} is below {self._least_epsilon:g}")
            self.require_closed(self._preserve, output)
            images.require_known(filled=gamma is None or beta is None)
        except NoMatchError as miss:
            obstacle = str(miss)
        nodes = frozenset(self.inside | self.open | self.ends | self.replaced | {output})
        return BatchNorm(
            x=x,
            gamma=gamma,
            beta=beta,
            epsilon=epsilon,
            output=output,
            stored_mean=stored_mean,
            stored_variance=stored_variance,
            gradient=gradient,
            nodes=nodes,
            images=images,
            obstacle=obstacle,
        )

    def _mean_of(self, squares: int, axes: list[int]) -> tuple[str, int]:
        m = self.m
        for x, centre in (m.inputs(squares), m.inputs(squares)[::-1]):
            mean = m.maker(m.through(centre, *SHAPERS))
            if m.op(mean) == "Mean" and m.tensor(mean, 0) == x:
                if m.constant(m.tensor(mean, 1)).ravel().tolist() != axes:
                    raise NoMatchError("mean and variance are over different axes")
                self.shapes_between(centre, mean)
                return x, mean
        raise NoMatchError("the variance is not taken around the mean of the same tensor")

    def _scale(self, x: str) -> tuple[int, str | None]:
        """What multiplies x: the product of the Rsqrt and a stored scale, or the Rsqrt itself."""
        m, own = self.m, self.name(self._rsqrt)
        products = [n for n in self.reading(self._rsqrt, "Mul") if m.inputs(n).count(own) == 1]
        for reader in products:
            operand = m.other_input(reader, own)
            stored = m.through(operand, "Reshape")
            if stored != x and self._is_parameter(stored):
                if stored != operand:
                    self.inside.add(m.maker(operand))
                return reader, stored
        if not any(m.reads(n, x) for n in products):
            raise NoMatchError("nothing multiplies the Rsqrt by its input or a stored scale")
        return self._rsqrt, None

    def _offset(self, offset: int, scale: int) -> tuple[str, str, str | None]:
        """What scale multiplies in the offset, the mean behind it, and the stored offset."""
        m, beta = self.m, None
        shift = m.expect(offset, "Sub", "Mul")
        if m.op(offset) == "Sub":
            shift = m.expect(m.source(offset, 1), "Mul")
            beta = m.through(m.tensor(offset, 0), "Reshape")
            if not self._is_parameter(beta):
                raise NoMatchError(f"the offset comes from {m.op(m.maker(beta))}, not a variable")
        self.inside.update((offset, shift))
        centre = m.other_input(shift, self.name(scale))
        if beta is not None:
            return centre, centre, beta
        negative = m.expect(m.maker(m.through(centre, *SHAPERS)), "Neg")
        self.shapes_between(centre, negative)
        self.inside.add(negative)
        return centre, m.tensor(negative, 0), None

    def _is_parameter(self, tensor: str) -> bool:
        """Whether a tensor is stored, and not known to have more axes than that of the channels."""
        shape = self.m.view.shape(tensor)
        if self.m.op(self.m.maker(tensor)) not in PARAMETERS:
            return False
        return shape is None or sum(size != 1 for size in shape) <= 1

    def _stored(self, statistic: int) -> tuple[str, ...]:
        """The [channels] tensors of a statistic that nodes outside the unit read."""
        m = self.m
        tensors = []
        for squeeze in self.reading(statistic, "Squeeze"):
            if any(reader not in self.inside for reader in m.readers(squeeze)):
                tensors.append(self.name(squeeze))
            self.inside.add(squeeze)
        return tuple(tensors)

    def _images(self, x: str, axes: list[int], statistics: tuple[str, ...]) -> Images:
        """The layout of x, from its static shape or from the stored shape of a statistic."""
        m = self.m
        shape = m.view.shape(x)
        numbers = [*map(m.maker, statistics), *sorted(self.inside)]
        for number in numbers if shape is None else ():
            if m.op(number) == "Reshape" and m.op(m.source(number, 1)) == "Const":
                sizes = m.constant(m.tensor(number, 1)).ravel().tolist()
                if len(sizes) == len(axes) + 1 and all(sizes[axis] == 1 for axis in axes):
                    shape = tuple(None if n in axes else size for n, size in enumerate(sizes))
                    break
        if shape is None:
            raise NoMatchError("nothing shows the rank of the input")
        kept = sorted(set(range(len(shape))) - {axis % len(shape) for axis in axes})
        if len(kept) != 1:
            raise NoMatchError(f"the statistics keep {len(kept)} axes, not 1")
        return Images(shape, kept[0])
