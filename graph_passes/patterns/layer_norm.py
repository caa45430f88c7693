"""Layer, group and root-mean-square normalization written out in primitives: the forward half.

All three take statistics of each example apart, over `axes` that leave out the batch:

    mean     = Mean(x)                      variance = Mean(SquaredDifference(x, mean))
    scale    = Rsqrt(variance + epsilon) * gamma
    y        = x * scale + (beta - mean * scale)

or, without a mean, `y = x * Rsqrt(Mean(Square(x)) + epsilon) * gamma`. The order of the products
and sums, and whether gamma and beta are there, differ from library to library, so the search does
not ask for one form: it follows the statistics to where they come together in y.
"""

from __future__ import annotations

import dataclasses

from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.patterns.search import ADDS, SHAPERS

_JOINS_X = ("Mul", "Sub", "SquaredDifference")
_ARITHMETIC = frozenset((*ADDS, *_JOINS_X, "Neg"))
_SQUARES = ("Square", "Mul", "Pow")
_STORED = ("ReadVariableOp", "VariableV2", "Const")
_GIVEN = ("_Arg", "Placeholder")
_KEEPS_PARAMETER = frozenset((*SHAPERS, "Cast", "Enter", "BroadcastTo", "Tile"))
_MAKES_PARAMETER = _KEEPS_PARAMETER.union(_ARITHMETIC, _STORED, _GIVEN)
_DEEPEST_PARAMETER = 3
_MOST_NODES = 40
"""More nodes than a forward half has in any form."""


@dataclasses.dataclass(frozen=True)
class Norm:
    """The forward half of one normalization.

    Attributes:
        x: tensor, the input that the statistics are taken of.
        axes: the axes that they are taken over.
        epsilon: what is added to the variance or mean square.
        rsqrt: node that makes the inverse deviation.
        mean: node that makes the mean; None for root-mean-square normalization.
        output: node that makes y.
        nodes: the nodes from the statistics to y, both included.
        gamma: tensor, the scale as it is stored; None where there is none.
        beta: tensor, the offset as it is stored; None where there is none.
    """

    x: str
    axes: tuple[int, ...]
    epsilon: float
    rsqrt: int
    mean: int | None
    output: int
    nodes: frozenset[int]
    gamma: str | None
    beta: str | None

    @property
    def is_centred(self) -> bool:
        """Whether the mean is subtracted."""
        return self.mean is not None


@dataclasses.dataclass(frozen=True)
class _Statistics:
    x: str
    axes: tuple[int, ...]
    epsilon: float
    total: int
    mean: int | None
    nodes: frozenset[int]


def find_norm(matcher: Matcher, rsqrt: int) -> Norm | None:
    """The forward half around a Rsqrt.

    Args:
        matcher: reads the graph.
        rsqrt: number of the Rsqrt.

    Returns:
        The forward half; None where the Rsqrt is none of a statistic of single examples.

    Raises:
        NoMatchError: it is one, but what follows is no normalization.
    """
    statistics = _find_statistics(matcher, rsqrt)
    return None if statistics is None else _Growth(matcher, rsqrt, statistics).norm()


def _find_statistics(m: Matcher, rsqrt: int) -> _Statistics | None:
    total = m.maker(m.tensor(rsqrt, 0))
    if m.op(total) not in ADDS:
        return None
    spread, epsilon = sorted(m.inputs(total), key=lambda tensor: m.op(m.maker(tensor)) == "Const")
    variance = m.maker(m.through(spread, *SHAPERS))
    if m.op(m.maker(epsilon)) != "Const" or m.op(variance) != "Mean":
        return None
    if m.op(m.maker(m.tensor(variance, 1))) != "Const" or m.constant(epsilon).size != 1:
        return None
    axes = tuple(m.constant(m.tensor(variance, 1)).ravel().tolist())
    if 0 in axes or not axes:
        return None  # statistics of a batch
    squares = m.maker(m.tensor(variance, 0))
    deviation = _find_deviation(m, squares)
    if deviation is None:
        return None
    x, mean = deviation
    if mean is not None:
        same = m.op(m.maker(m.tensor(mean, 1))) == "Const"
        if not same or tuple(m.constant(m.tensor(mean, 1)).ravel().tolist()) != axes:
            raise NoMatchError("mean and variance are over different axes")
    nodes = {total, variance, squares} | (set() if mean is None else {mean})
    return _Statistics(x, axes, m.constant(epsilon).item(), total, mean, frozenset(nodes))


def _find_deviation(m: Matcher, squares: int) -> tuple[str, int | None] | None:
    """The tensor whose squared deviation a node makes, and its mean, None for a mean of 0."""
    inputs = m.inputs(squares)
    if m.op(squares) == "SquaredDifference":
        for x, centre in (inputs, inputs[::-1]):
            mean = m.maker(m.through(centre, *SHAPERS))
            if m.op(mean) == "Mean" and m.tensor(mean, 0) == x:
                return x, mean
        return None
    if m.op(squares) not in _SQUARES or not _squares_its_input(m, squares):
        return None
    difference = m.maker(inputs[0])
    if m.op(difference) == "Sub":
        x, centre = m.inputs(difference)
        mean = m.maker(m.through(centre, *SHAPERS))
        if m.op(mean) == "Mean" and m.tensor(mean, 0) == x:
            return x, mean
    return inputs[0], None


def _squares_its_input(m: Matcher, number: int) -> bool:
    inputs = m.inputs(number)
    if m.op(number) == "Mul":
        return inputs[0] == inputs[1]
    if m.op(number) == "Pow":
        power = m.maker(inputs[1])
        return m.op(power) == "Const" and m.constant(inputs[1]).ravel().tolist() == [2.0]
    return True


class _Growth:
    """Follows statistics forward for as long as they meet x, gamma, beta and each other only."""

    def __init__(self, matcher: Matcher, rsqrt: int, statistics: _Statistics) -> None:
        self._m = matcher
        self._rsqrt = rsqrt
        self._statistics = statistics
        self._reached = set(statistics.nodes)
        self._scaled = {rsqrt}
        self._gamma: str | None = None
        self._beta: str | None = None

    def norm(self) -> Norm:
        m, statistics = self._m, self._statistics
        self._reached.add(self._rsqrt)
        self._grow()
        output = self._output()
        nodes = self._back_from(output)
        if not any(m.op(n) in ("Mul", "Sub") and m.reads(n, statistics.x) for n in nodes):
            raise NoMatchError("the statistics are not applied to what they are taken of")
        return Norm(
            statistics.x,
            statistics.axes,
            statistics.epsilon,
            self._rsqrt,
            statistics.mean,
            output,
            nodes,
            self._gamma,
            self._beta,
        )

    def _grow(self) -> None:
        pending = list(self._reached)
        while pending:
            for reader in self._m.readers(pending.pop()):
                if reader in self._reached or not self._belongs(reader):
                    continue
                self._reached.add(reader)
                pending.append(reader)
                if len(self._reached) > _MOST_NODES:
                    raise NoMatchError("the statistics reach too many nodes")
                if not self._scaled.isdisjoint(self._m.makers(reader)):
                    self._scaled.add(reader)

    def _belongs(self, number: int) -> bool:
        m, op = self._m, self._m.op(number)
        if op in SHAPERS:
            return m.makers(number)[0] in self._reached
        if op not in _ARITHMETIC:
            return False
        made = zip(m.inputs(number), m.makers(number), strict=True)
        others = [tensor for tensor, maker in made if maker not in self._reached]
        if not others or (others == [self._statistics.x] and op in _JOINS_X):
            return True
        return len(others) == 1 and self._takes_parameter(op, others[0])

    def _takes_parameter(self, op: str, tensor: str) -> bool:
        """Counts a stored tensor as gamma or beta, each of which there is one of."""
        if not is_parameter(self._m, tensor):
            return False
        if op == "Mul":
            self._gamma = self._gamma or tensor
            return self._gamma == tensor
        self._beta = self._beta or tensor
        return self._beta == tensor and op in (*ADDS, "Sub")

    def _output(self) -> int:
        """The one node that depends on the Rsqrt and that no other such node depends on."""
        m = self._m
        made = [n for n in self._scaled if m.op(n) not in SHAPERS]
        used = {m.maker(m.through(t, *SHAPERS)) for n in made for t in m.inputs(n)}
        last = [n for n in made if n not in used]
        if len(last) != 1:
            raise NoMatchError(f"the statistics come together in {len(last)} nodes, not 1")
        if last == [self._rsqrt]:
            raise NoMatchError("nothing multiplies the Rsqrt by its input or a stored scale")
        return last[0]

    def _back_from(self, output: int) -> frozenset[int]:
        nodes, pending = {output}, [output]
        while pending:
            for maker in self._m.makers(pending.pop()):
                if maker in self._reached and maker not in nodes:
                    nodes.add(maker)
                    pending.append(maker)
        return frozenset(nodes)


def is_parameter(m: Matcher, tensor: str) -> bool:
    """Whether a tensor is stored, or made of stored tensors alone in a few steps."""
    if m.op(m.maker(tensor)) not in _MAKES_PARAMETER:
        return False
    pending = [(tensor, 0)]
    stored = False
    while pending:
        last, depth = pending.pop()
        number = m.maker(last)
        op, inputs = m.op(number), m.inputs(number)
        if op in _STORED:
            stored = stored or op != "Const" or m.constant(last).size > 1
        elif op in _GIVEN and _is_vector(m, last):
            stored = True
        elif depth == _DEEPEST_PARAMETER or not inputs:
            return False
        elif op in _KEEPS_PARAMETER:
            pending.append((inputs[0], depth + 1))
        elif op in _ARITHMETIC:
            pending.extend((one, depth + 1) for one in inputs)
        else:
            return False
    return stored


def _is_vector(m: Matcher, tensor: str) -> bool:
    """Whether a tensor is known to have at most one axis that is longer than 1."""
    shape = m.view.shape(tensor)
    return shape is not None and sum(size != 1 for size in shape) <= 1
