"""What a Rsqrt is taken of: the variance or mean square of a tensor, or a stored variance.

A tensor is stored if it is a variable, a constant or an argument, or made of such alone in few ops.

A variance is the mean of squared deviations, or with weights w, as `tf.nn.weighted_moments` writes
it for the group normalization of tf_keras:

    mean = DivNoNan(Sum(w * x), Sum(w + zeros))
    variance = DivNoNan(Sum(w * SquaredDifference(x, mean)), Sum(w + zeros))

Where no mask is given, the weights are ones of the shape of x, made of what x is a Reshape of.
"""

from __future__ import annotations

import dataclasses

from graph_passes.ir.graph_view import FLOAT
from graph_passes.rewriter.matcher import ADDS, SHAPERS, SPREADS, Matcher, NoMatchError

_STORED = ("ReadVariableOp", "VariableV2", "Const")
_GIVEN = ("_Arg", "Placeholder")
_ARITHMETIC = frozenset((*ADDS, "Mul", "Sub", "SquaredDifference", "Neg"))
_KEEPS_PARAMETER = frozenset((*SHAPERS, "Cast", "Enter", *SPREADS))
_MAKES_PARAMETER = _KEEPS_PARAMETER.union(_ARITHMETIC, _STORED, _GIVEN)
_DEEPEST_PARAMETER = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """What an inverse deviation is made of.

    Attributes:
        rsqrt: node that makes the inverse deviation.
        epsilon: what is added to the variance or mean square.
        nodes: the nodes from x, or from the stored variance, to the Rsqrt.
        x: tensor, the input; None where the variance is stored.
        axes: the axes that the statistics are taken over.
        mean: node that makes the mean; None for a mean square and where it is stored.
        variance: node that makes the variance or mean square; None where it is stored.
        stored_variance: tensor, as it is stored; None where x has a variance of its own.
        counts: the nodes that make the divisors of weighted means.
        weights: tensor, what the elements of x are weighted with; None where they count the same.
        weighting: the nodes that make the weights of x, and that reshape what both are made of.
    """

    rsqrt: int
    epsilon: float
    nodes: frozenset[int]
    x: str | None = None
    axes: tuple[int, ...] = ()
    mean: int | None = None
    variance: int | None = None
    stored_variance: str | None = None
    counts: frozenset[int] = frozenset()
    weights: str | None = None
    weighting: frozenset[int] = frozenset()

    @property
    def is_of_batch(self) -> bool:
        """Whether all examples of a batch share the statistics."""
        return self.x is None or 0 in self.axes


@dataclasses.dataclass(frozen=True)
class _Average:
    """What a node averages: a tensor, over some axes, with equal weights or others."""

    tensor: str
    axes: list[int] | None
    nodes: frozenset[int]
    weights: str | None = None
    count: int | None = None


def find_statistics(m: Matcher, rsqrt: int) -> Statistics | None:
    """The statistics that a Rsqrt is taken of, None where it is taken of something else.

    Raises:
        NoMatchError: mean and variance do not belong together.
    """
    total = m.source(rsqrt, 0)
    if m.op(total) not in ADDS or m.node(rsqrt).attr["T"].type != FLOAT:
        return None
    spread, epsilon = sorted(m.inputs(total), key=lambda tensor: m.op(m.maker(tensor)) == "Const")
    number, value = m.maker(m.through(spread, *SHAPERS)), m.scalar(epsilon)
    if value is None:
        return None
    variance = _average(m, number)
    if variance is None:
        if not is_parameter(m, spread):
            return None
        nodes = frozenset((rsqrt, total))
        return Statistics(rsqrt=rsqrt, epsilon=value, nodes=nodes, stored_variance=spread)
    deviation = _find_deviation(m, m.maker(variance.tensor)) if variance.axes else None
    if deviation is None:
        return None
    x, centre = deviation
    nodes = variance.nodes | {rsqrt, total, m.maker(variance.tensor)} | _between(m, spread, number)
    counts = {variance.count}
    mean = None if centre is None else _average(m, centre)
    if mean is not None:
        nodes |= mean.nodes
        counts.add(mean.count)
        if mean.axes != variance.axes:
            raise NoMatchError("mean and variance are over different axes")
        if mean.weights != variance.weights:
            raise NoMatchError("mean and variance are taken with different weights")
    weights = variance.weights
    return Statistics(
        rsqrt=rsqrt,
        epsilon=value,
        nodes=nodes,
        x=x,
        axes=tuple(variance.axes or ()),
        mean=centre,
        variance=number,
        counts=frozenset(count for count in counts if count is not None),
        weights=weights,
        weighting=frozenset() if weights is None else _weighting(m, weights, x),
    )


def _between(m: Matcher, tensor: str, end: int) -> frozenset[int]:
    """The shape ops on the way back from a tensor to a node."""
    nodes = set()
    while (number := m.maker(tensor)) != end:
        nodes.add(number)
        tensor = m.tensor(number, 0)
    return frozenset(nodes)


def _average(m: Matcher, number: int) -> _Average | None:
    if m.op(number) == "Mean":
        return _Average(m.tensor(number, 0), m.numbers_at(number, 1), frozenset((number,)))
    if m.op(number) != "DivNoNan":
        return None
    total, count = m.makers(number)
    if m.op(total) != "Sum" or m.op(count) != "Sum":
        return None
    axes = m.numbers_at(total, 1)
    if axes != m.numbers_at(count, 1):
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
    return _Average(tensor, axes, frozenset(nodes), weights[0], count)


def _is_zeros(m: Matcher, tensor: str) -> bool:
    number = m.maker(tensor)
    if m.op(number) == "Fill":
        tensor = m.tensor(number, 1)
    if m.op(m.maker(tensor)) == "Const":
        return not m.constant(tensor).any()
    return m.op(number) == "ZerosLike"


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
        nodes |= _between(m, x, m.maker(source))
    return frozenset(nodes)


def _find_deviation(m: Matcher, squares: int) -> tuple[str, int | None] | None:
    """The tensor whose squared deviation a node makes, and its mean, None for a mean of 0."""
    op, inputs = m.op(squares), m.inputs(squares)
    is_product = op == "Mul" and inputs[0] == inputs[1]
    is_square = op == "Square" or is_product or (op == "Pow" and m.scalar(inputs[1]) == 2)
    if op == "SquaredDifference":
        differences = [inputs, inputs[::-1]]
    elif is_square:
        difference = m.maker(inputs[0])
        differences = [m.inputs(difference)] if m.op(difference) == "Sub" else []
    else:
        return None
    for x, centre in differences:
        mean = m.maker(m.through(centre, *SHAPERS))
        average = _average(m, mean)
        if average is not None and average.tensor == x:
            return x, mean
    return (inputs[0], None) if is_square else None


def is_parameter(m: Matcher, tensor: str) -> bool:
    """Whether a tensor is stored, or made of stored tensors alone in a few steps."""
    pending = [(m.maker(tensor), 0)]
    stored = False
    while pending:
        number, depth = pending.pop()
        op = m.ops[number]
        if op not in _MAKES_PARAMETER:
            return False
        if op in _STORED:
            stored = stored or op != "Const" or m.constant(m.output(number)).size > 1
            continue
        makers = m.makers(number)
        shape = m.shape(number) if op in _GIVEN else None
        if shape is not None and sum(size != 1 for size in shape) <= 1:
            stored = True  # at most a vector
        elif depth == _DEEPEST_PARAMETER or not makers:
            return False
        elif op in _KEEPS_PARAMETER:
            pending.append((makers[0], depth + 1))
        else:
            pending.extend((maker, depth + 1) for maker in makers)
    return stored
