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

from graph_passes.patterns.layer_norm_statistics import Statistics, find_statistics
from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.patterns.search import ADDS, SHAPERS

_JOINS_X = ("Mul", "Sub", "SquaredDifference")
_ARITHMETIC = frozenset((*ADDS, *_JOINS_X, "Neg"))
_NO_OUTPUT = (*SHAPERS, "Neg")
"""What reads y without being it: the exact GELU behind a normalization begins with a Neg."""
_STORED = ("ReadVariableOp", "VariableV2", "Const")
_GIVEN = ("_Arg", "Placeholder")
_KEEPS_PARAMETER = frozenset((*SHAPERS, "Cast", "Enter", "BroadcastTo", "Tile"))
_MAKES_PARAMETER = _KEEPS_PARAMETER.union(_ARITHMETIC, _STORED, _GIVEN)
_DEEPEST_PARAMETER = 3
_MOST_NODES = 40
"""More nodes than a forward half has in any form."""


@dataclasses.dataclass(frozen=True, kw_only=True)
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
        weights: tensor, the weights that the statistics are taken with; None where there are none.
        weighting: the nodes that make the weights of x, and that reshape what both are made of.
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
    weights: str | None
    weighting: frozenset[int]

    @property
    def is_centred(self) -> bool:
        """Whether the mean is subtracted."""
        return self.mean is not None


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
    statistics = find_statistics(matcher, rsqrt)
    return None if statistics is None else _Growth(matcher, rsqrt, statistics).norm()


class _Growth:
    """Follows statistics forward for as long as they meet x, gamma, beta and each other only."""

    def __init__(self, matcher: Matcher, rsqrt: int, statistics: Statistics) -> None:
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
            x=statistics.x,
            axes=statistics.axes,
            epsilon=statistics.epsilon,
            rsqrt=self._rsqrt,
            mean=statistics.mean,
            output=output,
            nodes=nodes,
            gamma=self._gamma,
            beta=self._beta,
            weights=statistics.weights,
            weighting=statistics.weighting,
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
        made = [n for n in self._scaled if m.op(n) not in _NO_OUTPUT]
        used = {m.maker(m.through(t, *_NO_OUTPUT)) for n in made for t in m.inputs(n)}
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
