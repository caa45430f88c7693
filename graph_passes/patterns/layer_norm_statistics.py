"""The statistics of single examples behind a Rsqrt: means, variances and mean squares.

A variance is the mean of squared deviations, or with weights w, as `tf.nn.weighted_moments` writes
it for the group normalization of tf_keras:

    mean = DivNoNan(Sum(w * x), Sum(w + zeros))
    variance = DivNoNan(Sum(w * SquaredDifference(x, mean)), Sum(w + zeros))

Where no mask is given, the weights are ones of the shape of x, made of what x is a Reshape of.
"""

from __future__ import annotations

import dataclasses

from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.patterns.search import ADDS, SHAPERS

_SQUARES = ("Square", "Mul", "Pow")


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What is taken of x.

    Attributes:
        x: tensor, the input.
        axes: the axes that they are taken over.
        epsilon: what is added to the variance or mean square.
        mean: node that makes the mean; None for a mean square.
        nodes: the nodes from x to the sum with epsilon.
        weights: tensor, what the elements of x are weighted with; None where they count the same.
        weighting: the nodes that make the weights of x, and that reshape what both are made of.
    """

    x: str
    axes: tuple[int, ...]
    epsilon: float
    mean: int | None
    nodes: frozenset[int]
    weights: str | None = None
    weighting: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class _Average:
    """What a node averages: a tensor, over some axes, with equal weights or others."""

    tensor: str
    axes: tuple[int, ...] | None
    weights: str | None
    nodes: frozenset[int]


def find_statistics(m: Matcher, rsqrt: int) -> Statistics | None:
    """The statistics that a Rsqrt is taken of.

    Args:
        m: reads the graph.
        rsqrt: number of the Rsqrt.

    Returns:
        The statistics; None where it is taken of something else, or of statistics of a batch.

    Raises:
        NoMatchError: mean and variance do not belong together.
    """
    total = m.source(rsqrt, 0)
    if m.op(total) not in ADDS:
        return None
    spread, epsilon = sorted(m.inputs(total), key=lambda tensor: m.op(m.maker(tensor)) == "Const")
    if m.op(m.maker(epsilon)) != "Const" or m.constant(epsilon).size != 1:
        return None
    variance = _average(m, m.maker(m.through(spread, *SHAPERS)))
    if variance is None or not variance.axes or 0 in variance.axes:
        return None  # statistics of a batch among them
    deviation = _find_deviation(m, m.maker(variance.tensor))
    if deviation is None:
        return None
    x, centre = deviation
    nodes = {total, m.maker(variance.tensor)} | variance.nodes
    mean = None if centre is None else _average(m, centre)
    if mean is not None:
        nodes |= mean.nodes
        if mean.axes != variance.axes:
            raise NoMatchError("mean and variance are over different axes")
        if mean.weights != variance.weights:
            raise NoMatchError("mean and variance are taken with different weights")
    return Statistics(
        x,
        variance.axes,
        m.constant(epsilon).item(),
        centre,
        frozenset(nodes),
        variance.weights,
        frozenset() if variance.weights is None else _weighting(m, variance.weights, x),
    )


def _average(m: Matcher, number: int) -> _Average | None:
    if m.op(number) == "Mean":
        return _Average(m.tensor(number, 0), _axes(m, number), None, frozenset((number,)))
    if m.op(number) != "DivNoNan":
        return None
    total, count = m.makers(number)
    if m.op(total) != "Sum" or m.op(count) != "Sum" or _axes(m, total) != _axes(m, count):
        return None
    product, counted = m.makers(total)[0], m.makers(count)[0]
    nodes = {number, total, count, product}
    weights = [m.tensor(count, 0)]
    if m.op(counted) in ADDS:  # zeros that spread the weights over x
        weights = [t for t in m.inputs(counted) if not _is_zeros(m, t)]
        zeros = (m.maker(t) for t in m.inputs(counted) if t not in weights)
        nodes.update((counted, *zeros))
    if m.op(product) != "Mul" or len(weights) != 1 or not m.reads(product, weights[0]):
        return None
    tensor = m.other_input(product, weights[0])
    return _Average(tensor, _axes(m, total), weights[0], frozenset(nodes))


def _is_zeros(m: Matcher, tensor: str) -> bool:
    number = m.maker(tensor)
    if m.op(number) == "Fill":
        tensor = m.tensor(number, 1)
    if m.op(m.maker(tensor)) == "Const":
        return not m.constant(tensor).any()
    return m.op(number) == "ZerosLike"


def _axes(m: Matcher, number: int) -> tuple[int, ...] | None:
    """The axes of a reduction, None where they are not known."""
    if m.op(m.source(number, 1)) != "Const":
        return None
    return tuple(m.constant(m.tensor(number, 1)).ravel().tolist())


def _weighting(m: Matcher, weights: str, x: str) -> frozenset[int]:
    """The nodes that make weights of ones, and those between what these are like and x."""
    nodes, number = set(), m.maker(weights)
    while m.op(number) in SHAPERS:
        nodes.add(number)
        number = m.makers(number)[0]
    if m.op(number) not in ("OnesLike", "Fill"):
        return frozenset()
    nodes.add(number)
    source = m.through(m.tensor(number, 0), *SHAPERS)
    if m.op(number) == "OnesLike" and m.through(x, *SHAPERS) == source:
        while x != source:
            nodes.add(m.maker(x))
            x = m.tensor(m.maker(x), 0)
    return frozenset(nodes)


def _find_deviation(m: Matcher, squares: int) -> tuple[str, int | None] | None:
    """The tensor whose squared deviation a node makes, and its mean, None for a mean of 0."""
    inputs = m.inputs(squares)
    if m.op(squares) == "SquaredDifference":
        for x, centre in (inputs, inputs[::-1]):
            mean = _mean_of(m, x, centre)
            if mean is not None:
                return x, mean
        return None
    if m.op(squares) not in _SQUARES or not _squares_its_input(m, squares):
        return None
    difference = m.maker(inputs[0])
    if m.op(difference) == "Sub":
        x, centre = m.inputs(difference)
        mean = _mean_of(m, x, centre)
        if mean is not None:
            return x, mean
    return inputs[0], None


def _mean_of(m: Matcher, x: str, tensor: str) -> int | None:
    """The node that averages x to a tensor, None where another does."""
    number = m.maker(m.through(tensor, *SHAPERS))
    average = _average(m, number)
    return number if average is not None and average.tensor == x else None


def _squares_its_input(m: Matcher, number: int) -> bool:
    inputs = m.inputs(number)
    if m.op(number) == "Mul":
        return inputs[0] == inputs[1]
    if m.op(number) == "Pow":
        power = m.maker(inputs[1])
        return m.op(power) == "Const" and m.constant(inputs[1]).ravel().tolist() == [2.0]
    return True
