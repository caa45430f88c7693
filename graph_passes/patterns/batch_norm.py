"""Batch normalization written out in primitives, as Keras 3 and `tf.nn` write it.

Forward, over the channels-last axes of a rank-4 tensor:

    mean     = Mean(x)                      variance = Mean(SquaredDifference(x, mean))
    scale    = Rsqrt(variance + epsilon) * gamma
    y        = x * scale + (beta - mean * scale)

and its gradient as automatic differentiation makes it. `find_batch_norms` recognizes both halves
by structure; shape ops between the parts (Reshape, Squeeze, Tile, BroadcastTo) are looked
through, since the stored mean and variance come with and without kept dimensions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np

from graph_passes.patterns.batch_norm_gradient import Gradient, GradientSearch
from graph_passes.patterns.edits import NearMiss
from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.patterns.search import ADDS, PARAMETERS, SHAPERS, Search
from graph_passes.view import GraphView

_CHANNELS_LAST = [0, 1, 2]
MIN_EPSILON = {"GPU": float(np.float32(1e-5)), "CPU": 0.0}
"""Device -> the smallest epsilon that its fused kernels take; on a GPU that is cuDNN's."""


@dataclasses.dataclass(frozen=True)
class BatchNorm:
    """One recognized batch normalization.

    Attributes:
        x: tensor, the input [batch, height, width, channels].
        gamma: tensor, the scale [channels].
        beta: tensor, the offset [channels].
        epsilon: what is added to the variance.
        output: node that makes y.
        mean: node that makes the mean over the batch; its readers outside are `mean_readers`.
        variance: node that makes the variance over the batch.
        stored_mean: tensors [channels] of the mean that nodes outside the unit read.
        stored_variance: the same for the variance.
        gradient: the other half, None where the graph has none.
    """

    x: str
    gamma: str
    beta: str
    epsilon: float
    output: int
    mean: int
    variance: int
    stored_mean: tuple[str, ...]
    stored_variance: tuple[str, ...]
    gradient: Gradient | None


def find_batch_norms(
    view: GraphView, preserve: Collection[str], least_epsilon: float
) -> tuple[list[BatchNorm], list[NearMiss]]:
    """All batch normalizations over a batch in a graph.

    Args:
        view: the graph.
        preserve: names of nodes that must stay; a unit with such a node inside is a near miss.
        least_epsilon: a unit with a smaller one is a near miss.

    Returns:
        The units, and what came close with the reason why it is none.
    """
    found, misses = [], []
    matcher = Matcher(view)
    for number in view.of_op("Rsqrt"):
        search = _ForwardSearch(matcher, number, preserve, least_epsilon)
        try:
            unit = search.match()
        except NoMatchError as miss:
            misses.append(NearMiss(view.nodes[number].name, str(miss)))
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
        add = m.maker(m.tensor(self._rsqrt, 0))
        if m.op(add) not in ADDS:
            return None
        sides = sorted(m.inputs(add), key=lambda t: m.op(m.maker(t)) == "Const")
        if len(sides) != 2 or m.op(m.maker(sides[1])) != "Const":
            return None
        variance = m.maker(m.through(sides[0], *SHAPERS))
        if m.op(variance) != "Mean" or m.op(m.maker(m.tensor(variance, 0))) != "SquaredDifference":
            return None
        if m.constant(m.tensor(variance, 1)).ravel().tolist() != _CHANNELS_LAST:
            return None  # LayerNormalization, GroupNormalization, other layouts
        epsilon = float(m.constant(sides[1]))
        if epsilon < self._least_epsilon:
            raise NoMatchError(f"epsilon {epsilon:g} is below {self._least_epsilon:g}")
        squares = m.maker(m.tensor(variance, 0))
        x, mean = self._mean_of(squares, m.constant(m.tensor(variance, 1)).ravel().tolist())
        self.inside.update((add, variance, squares, mean))
        self._follow_shapes(m.tensor(self._rsqrt, 0))
        scale, gamma = self._scale()
        product = self.only(scale, lambda n: m.op(n) == "Mul" and m.reads(n, x), "x * scale")
        output = self.only(product, lambda n: m.op(n) in ADDS, "the sum with the offset")
        offset = m.expect(m.maker(m.other_input(output, self.name(product))), "Sub")
        shift = m.expect(m.maker(m.tensor(offset, 1)), "Mul")
        beta = m.through(m.tensor(offset, 0), "Reshape")
        centre = m.other_input(shift, self.name(scale))
        if m.maker(m.through(centre, *SHAPERS)) != mean:
            raise NoMatchError("the mean that is subtracted is not that of the variance")
        self.inside.update((scale, product, offset, shift))
        self.shapes_between(centre, mean)
        self.shapes_between(sides[0], variance)
        self._require_parameter(gamma)
        self._require_parameter(beta)
        backward = GradientSearch(self, x, gamma, mean=mean, rsqrt=self._rsqrt, scale=scale)
        gradient = backward.find(product)
        stored_mean = self._stored(mean)
        stored_variance = self._stored(variance)
        self._require_closed(output)
        self._require_rank_four(centre, sides[0], mean)
        return BatchNorm(
            x, gamma, beta, epsilon, output, mean, variance, stored_mean, stored_variance, gradient
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

    def _follow_shapes(self, tensor: str) -> None:
        number = self.m.maker(tensor)
        if self.m.op(number) in SHAPERS:
            self.inside.add(number)

    def _scale(self) -> tuple[int, str]:
        """The product of the Rsqrt and gamma, and gamma as it is stored."""
        m, own = self.m, self.name(self._rsqrt)
        for reader in m.readers(self._rsqrt):
            if m.op(reader) != "Mul" or m.inputs(reader).count(own) != 1:
                continue
            operand = m.other_input(reader, own)
            stored = m.through(operand, "Reshape")
            if m.op(m.maker(stored)) in PARAMETERS:
                if stored != operand:
                    self.inside.add(m.maker(operand))
                return reader, stored
        raise NoMatchError("nothing multiplies the Rsqrt by a stored scale")

    def _require_parameter(self, tensor: str) -> None:
        op = self.m.op(self.m.maker(tensor))
        if op not in PARAMETERS:
            raise NoMatchError(f"scale or offset comes from {op}, not from a variable")

    def _stored(self, statistic: int) -> tuple[str, ...]:
        """The [channels] tensors of a statistic that nodes outside the unit read."""
        m = self.m
        tensors = []
        for squeeze in self.reading(statistic, "Squeeze"):
            if any(reader not in self.inside for reader in m.readers(squeeze)):
                tensors.append(self.name(squeeze))
            self.inside.add(squeeze)
        return tuple(tensors)

    def _require_closed(self, output: int) -> None:
        """Nothing outside may read, fetch or depend on what will no longer be computed."""
        m = self.m
        ends = self.ends | {output}
        for number in self.inside | self.replaced | {output}:
            if m.node(number).name in self._preserve:
                raise NoMatchError(f"{m.node(number).name!r} is to be preserved")
        for number in self.inside:
            if m.op(number) == "Squeeze":
                continue  # the stored statistics, which the fused op makes as well
            for reader in m.readers(number):
                if reader in self.inside or reader in ends or m.op(reader) in ("Shape", "ShapeN"):
                    continue
                if m.op(number) in SHAPERS and m.op(reader) in SHAPERS:
                    continue
                raise NoMatchError(
                    f"{m.node(reader).name!r} outside the unit reads {m.node(number).name!r}"
                )

    def _require_rank_four(self, centre: str, spread: str, mean: int) -> None:
        """Stored shapes must show a rank of 4; axes alone do not."""
        m = self.m
        candidates = [m.maker(centre), m.maker(spread)]
        candidates.extend(n for n in self.inside if m.op(n) == "Reshape")
        for number in candidates:
            if m.op(number) == "Reshape":
                shape = m.maker(m.tensor(number, 1))
                if m.op(shape) == "Const":
                    value = m.constant(m.tensor(number, 1)).ravel().tolist()
                    if len(value) == 4 and value[:3] == [1, 1, 1]:
                        return
        raise NoMatchError("nothing shows that the input has rank 4")
