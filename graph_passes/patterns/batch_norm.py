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
from collections.abc import Callable, Collection

from graph_passes.patterns.edits import NearMiss
from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.view import GraphView

_SHAPERS = ("Reshape", "Squeeze", "ExpandDims", "Identity", "StopGradient")
_SPREADERS = (*_SHAPERS, "BroadcastTo", "Tile")
_SUMS = ("AddN", "AddV2", "Add")
_ADDS = ("AddV2", "Add")
_CHANNELS_LAST = [0, 1, 2]
_LONGEST_SPREAD = 8
MIN_EPSILON = 1e-5
"""The smallest epsilon that cuDNN's kernels take."""


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradient half of one batch normalization.

    Attributes:
        dy: tensor, the gradient with regard to y.
        dx_sum: node that sums what flows back to x.
        dx_terms: the tensors of that sum that belong to this unit.
        d_gamma: tensor, the gradient with regard to gamma.
        d_beta: tensor, the gradient with regard to beta.
    """

    dy: str
    dx_sum: int
    dx_terms: tuple[str, ...]
    d_gamma: str
    d_beta: str


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
    view: GraphView, preserve: Collection[str]
) -> tuple[list[BatchNorm], list[NearMiss]]:
    """All batch normalizations over a batch in a graph.

    Args:
        view: the graph.
        preserve: names of nodes that must stay; a unit with such a node inside is a near miss.

    Returns:
        The units, and what came close with the reason why it is none.
    """
    found, misses = [], []
    matcher = Matcher(view)
    for number, op_type in enumerate(view.op_types):
        if op_type is None or op_type.name != "Rsqrt":
            continue
        try:
            unit = _Search(matcher, number, preserve).match()
        except NoMatchError as miss:
            misses.append(NearMiss(view.nodes[number].name, str(miss)))
        else:
            if unit is not None:
                found.append(unit)
    return found, misses


class _Search:
    """The search that starts from one Rsqrt."""

    def __init__(self, matcher: Matcher, rsqrt: int, preserve: Collection[str]) -> None:
        self._m = matcher
        self._rsqrt = rsqrt
        self._preserve = preserve
        self._inside: set[int] = {rsqrt}
        self._ends: set[int] = set()  # outside, but fed from inside
        self._open: set[int] = set()  # stay, and may be read outside
        self._replaced: set[int] = set()  # nodes whose tensors the fused ops will make

    def match(self) -> BatchNorm | None:
        """The unit; None where this is no batch statistic at all."""
        m = self._m
        add = m.maker(m.tensor(self._rsqrt, 0))
        if m.op(add) not in _ADDS:
            return None
        sides = sorted(m.inputs(add), key=lambda t: m.op(m.maker(t)) == "Const")
        if len(sides) != 2 or m.op(m.maker(sides[1])) != "Const":
            return None
        variance = m.maker(m.through(sides[0], *_SHAPERS))
        if m.op(variance) != "Mean" or m.op(m.maker(m.tensor(variance, 0))) != "SquaredDifference":
            return None
        if m.constant(m.tensor(variance, 1)).ravel().tolist() != _CHANNELS_LAST:
            return None  # LayerNormalization, GroupNormalization, other layouts
        epsilon = float(m.constant(sides[1]))
        if epsilon < MIN_EPSILON:
            raise NoMatchError(f"epsilon {epsilon:g} is below {MIN_EPSILON:g}")
        squares = m.maker(m.tensor(variance, 0))
        x, mean = self._mean_of(squares, m.constant(m.tensor(variance, 1)).ravel().tolist())
        self._inside.update((add, variance, squares, mean))
        self._follow_shapes(m.tensor(self._rsqrt, 0))
        scale, gamma = self._scale()
        product = self._only(scale, lambda n: m.op(n) == "Mul" and m.reads(n, x), "x * scale")
        output = self._only(product, lambda n: m.op(n) in _ADDS, "the sum with the offset")
        offset = m.expect(m.maker(m.other_input(output, self._name(product))), "Sub")
        shift = m.expect(m.maker(m.tensor(offset, 1)), "Mul")
        beta = m.through(m.tensor(offset, 0), "Reshape")
        centre = m.other_input(shift, self._name(scale))
        if m.maker(m.through(centre, *_SHAPERS)) != mean:
            raise NoMatchError("the mean that is subtracted is not that of the variance")
        self._inside.update((scale, product, offset, shift))
        self._shapes_between(centre, mean)
        self._shapes_between(sides[0], variance)
        self._require_parameter(gamma)
        self._require_parameter(beta)
        gradient = self._gradient(x, scale, product, gamma, mean)
        stored_mean = self._stored(mean)
        stored_variance = self._stored(variance)
        self._require_closed(output)
        self._require_rank_four(centre, sides[0], mean)
        return BatchNorm(
            x, gamma, beta, epsilon, output, mean, variance, stored_mean, stored_variance, gradient
        )

    def _name(self, number: int) -> str:
        """The tensor that a single-output node makes, as its readers write it."""
        view = self._m.view
        if not view.is_function:
            return view.nodes[number].name
        op_type = view.op_types[number]
        arg = op_type.op_def.output_arg[0].name if op_type else ""
        return f"{view.nodes[number].name}:{arg}:0"

    def _only(self, number: int, fits: Callable[[int], bool], what: str) -> int:
        found = [reader for reader in self._m.readers(number) if fits(reader)]
        if len(found) != 1:
            raise NoMatchError(f"found {len(found)} nodes that make {what}, not 1")
        return found[0]

    def _mean_of(self, squares: int, axes: list[int]) -> tuple[str, int]:
        m = self._m
        for x, centre in (m.inputs(squares), m.inputs(squares)[::-1]):
            mean = m.maker(m.through(centre, *_SHAPERS))
            if m.op(mean) == "Mean" and m.tensor(mean, 0) == x:
                if m.constant(m.tensor(mean, 1)).ravel().tolist() != axes:
                    raise NoMatchError("mean and variance are over different axes")
                self._shapes_between(centre, mean)
                return x, mean
        raise NoMatchError("the variance is not taken around the mean of the same tensor")

    def _shapes_between(self, tensor: str, end: int) -> None:
        """Counts the shape ops on the way back from a tensor to a node as inside."""
        number = self._m.maker(tensor)
        while number != end and self._m.op(number) in _SHAPERS:
            self._inside.add(number)
            number = self._m.maker(self._m.tensor(number, 0))

    def _follow_shapes(self, tensor: str) -> None:
        number = self._m.maker(tensor)
        if self._m.op(number) in _SHAPERS:
            self._inside.add(number)

    def _scale(self) -> tuple[int, str]:
        """The product of the Rsqrt and gamma, and gamma as it is stored."""
        m, own = self._m, self._name(self._rsqrt)
        for reader in m.readers(self._rsqrt):
            if m.op(reader) != "Mul" or m.inputs(reader).count(own) != 1:
                continue
            operand = m.other_input(reader, own)
            stored = m.through(operand, "Reshape")
            if m.op(m.maker(stored)) in ("ReadVariableOp", "Identity", "_Arg", "Cast"):
                if stored != operand:
                    self._inside.add(m.maker(operand))
                return reader, stored
        raise NoMatchError("nothing multiplies the Rsqrt by a stored scale")

    def _require_parameter(self, tensor: str) -> None:
        op = self._m.op(self._m.maker(tensor))
        if op not in ("ReadVariableOp", "Identity", "_Arg", "Cast"):
            raise NoMatchError(f"scale or offset comes from {op}, not from a variable")

    def _gradient(self, x: str, scale: int, product: int, gamma: str, mean: int) -> Gradient | None:
        m, scale_name = self._m, self._name(scale)
        x_node = m.maker(x)
        outer = [
            reader
            for reader in m.readers(x_node)
            if m.op(reader) == "Mul" and m.reads(reader, x) and reader != product
        ]
        scaled = [n for n in m.readers(scale) if m.op(n) == "Mul" and n not in self._inside]
        for weighted in outer:  # x * dy
            dy = m.other_input(weighted, x)
            direct = [n for n in scaled if m.other_input(n, scale_name) == dy]  # dy * scale
            if len(direct) == 1:
                return self._gradient_parts(dy, weighted, direct[0], scale, gamma, mean)
        if scaled:
            raise NoMatchError("the gradient flows back in a way that is not the usual one")
        return None

    def _gradient_parts(
        self, dy: str, weighted: int, direct: int, scale: int, gamma: str, mean: int
    ) -> Gradient:
        m = self._m
        dy_sum, negated, to_mean = self._offset_gradient(dy, scale)
        to_scale = self._one(
            [n for n in self._reading(negated, "Mul") if n != to_mean], "d_beta * mean"
        )
        x_sum = self._one(self._sums_of(self._name(weighted)), "the sum of x * dy")
        d_scale = self._behind_shapes(
            x_sum,
            lambda n: m.op(n) in _SUMS and m.reads(n, self._name(to_scale)),
            "the gradient of the scale",
            self._inside,
        )
        d_gamma = self._one(
            [n for n in self._reading(d_scale, "Mul") if m.reads(n, self._name(self._rsqrt))],
            "d_gamma",
        )
        into_rsqrt = self._one(
            [n for n in self._reading(d_scale, "Mul") if n != d_gamma], "the gradient of Rsqrt"
        )
        rsqrt_grad = self._one(self._reading(into_rsqrt, "RsqrtGrad"), "RsqrtGrad")
        mean_term = self._spread(to_mean)
        square_term = self._spread(rsqrt_grad)
        doubled = self._one(self._reading(square_term, "Mul"), "2 * the gradient of the variance")
        onto_x = self._one(self._reading(doubled, "Mul"), "the gradient through the variance")
        centred = m.expect(m.maker(m.other_input(onto_x, self._name(doubled))), "Sub")
        if m.maker(m.through(m.tensor(centred, 1), *_SHAPERS)) != mean:
            raise NoMatchError("the gradient of the variance is taken around another mean")
        dx_sum = self._one(self._reading(direct, "AddN"), "the sum of the gradients of x")
        terms = tuple(self._name(n) for n in (direct, mean_term, onto_x))
        if not all(m.reads(dx_sum, term) for term in terms):
            raise NoMatchError("the three gradients of x are not summed in one place")
        # The fused op gives [channels]; a Reshape behind takes that as well as kept dimensions.
        flat_gamma = all(m.op(n) != "Reshape" or m.tensor(n, 0) != gamma for n in self._inside)
        for end, may_differ in ((d_gamma, flat_gamma), (dy_sum, False)):
            if not may_differ and any(m.op(n) != "Reshape" for n in m.readers(end)):
                raise NoMatchError(f"{m.node(end).name!r} is read in its own shape")
        self._inside.update((negated, to_mean, to_scale, x_sum, d_scale, into_rsqrt, rsqrt_grad))
        self._inside.update((mean_term, square_term, doubled, onto_x, centred, direct, weighted))
        self._ends.update((dx_sum, d_gamma))
        self._replaced.update((d_gamma, dy_sum))
        return Gradient(dy, dx_sum, terms, self._name(d_gamma), self._name(dy_sum))

    def _offset_gradient(self, dy: str, scale: int) -> tuple[int, int, int]:
        """The sum of dy that belongs to this unit, its negative, and the gradient of the mean.

        Two units may share one dy (where a sum of two branches follows them); what tells their
        sums apart is the scale that the negative is multiplied by.
        """
        m, scale_name = self._m, self._name(scale)
        found: list[tuple[int, int, int]] = []
        for dy_sum in self._sums_of(dy):
            for negated in self._all_behind_shapes(dy_sum, lambda n: m.op(n) == "Neg"):
                found.extend(
                    (dy_sum, negated, product)
                    for product in self._reading(negated, "Mul")
                    if m.reads(product, scale_name)
                )
        if len(found) != 1:
            raise NoMatchError(
                f"found {len(found)} sums of the gradient that reach the mean, not 1"
            )
        self._behind_shapes(found[0][0], lambda n: n == found[0][1], "-d_beta", self._open)
        return found[0]

    def _one(self, found: list[int], what: str) -> int:
        if len(set(found)) != 1:
            raise NoMatchError(f"found {len(set(found))} nodes that make {what}, not 1")
        return found[0]

    def _reading(self, number: int, *ops: str) -> list[int]:
        return [reader for reader in self._m.readers(number) if self._m.op(reader) in ops]

    def _sums_of(self, tensor: str) -> list[int]:
        m = self._m
        return [n for n in self._reading(m.maker(tensor), "Sum") if m.tensor(n, 0) == tensor]

    def _all_behind_shapes(
        self, start: int, fits: Callable[[int], bool], came_from: dict[int, int] | None = None
    ) -> list[int]:
        """The fitting nodes behind a node and shape ops; records the way to each."""
        came_from = {} if came_from is None else came_from
        pending, found = [start], []
        while pending:
            last = pending.pop()
            for reader in self._m.readers(last):
                if reader in came_from:
                    continue
                if fits(reader):
                    found.append(reader)
                    came_from[reader] = last
                elif self._m.op(reader) in _SHAPERS:
                    came_from[reader] = last
                    pending.append(reader)
        return found

    def _behind_shapes(
        self, start: int, fits: Callable[[int], bool], what: str, passed: set[int]
    ) -> int:
        """The one fitting node behind a node and shape ops, which are added to `passed`."""
        came_from: dict[int, int] = {}
        found = self._one(self._all_behind_shapes(start, fits, came_from), what)
        last = came_from[found]
        while last != start:
            passed.add(last)
            last = came_from[last]
        return found

    def _spread(self, number: int) -> int:
        """The division by the count behind a statistic's gradient; what is between is inside."""
        last = number
        for _ in range(_LONGEST_SPREAD):
            divisions = self._reading(last, "RealDiv")
            if divisions:
                return self._one(divisions, "the division by the count")
            last = self._one(self._reading(last, *_SPREADERS), "a spread gradient")
            self._inside.add(last)
        raise NoMatchError(
            f"the gradient behind {self._m.node(number).name!r} is not spread over x"
        )

    def _stored(self, statistic: int) -> tuple[str, ...]:
        """The [channels] tensors of a statistic that nodes outside the unit read."""
        m = self._m
        tensors = []
        for squeeze in self._reading(statistic, "Squeeze"):
            if any(reader not in self._inside for reader in m.readers(squeeze)):
                tensors.append(self._name(squeeze))
            self._inside.add(squeeze)
        return tuple(tensors)

    def _require_closed(self, output: int) -> None:
        """Nothing outside may read, fetch or depend on what will no longer be computed."""
        m = self._m
        ends = self._ends | {output}
        for number in self._inside | self._replaced | {output}:
            if m.node(number).name in self._preserve:
                raise NoMatchError(f"{m.node(number).name!r} is to be preserved")
        for number in self._inside:
            if m.op(number) == "Squeeze":
                continue  # the stored statistics, which the fused op makes as well
            for reader in m.readers(number):
                if reader in self._inside or reader in ends or m.op(reader) in ("Shape", "ShapeN"):
                    continue
                if m.op(number) in _SHAPERS and m.op(reader) in _SHAPERS:
                    continue
                raise NoMatchError(
                    f"{m.node(reader).name!r} outside the unit reads {m.node(number).name!r}"
                )

    def _require_rank_four(self, centre: str, spread: str, mean: int) -> None:
        """Stored shapes must show a rank of 4; axes alone do not."""
        m = self._m
        candidates = [m.maker(centre), m.maker(spread)]
        candidates.extend(n for n in self._inside if m.op(n) == "Reshape")
        for number in candidates:
            if m.op(number) == "Reshape":
                shape = m.maker(m.tensor(number, 1))
                if m.op(shape) == "Const":
                    value = m.constant(m.tensor(number, 1)).ravel().tolist()
                    if len(value) == 4 and value[:3] == [1, 1, 1]:
                        return
        raise NoMatchError("nothing shows that the input has rank 4")
