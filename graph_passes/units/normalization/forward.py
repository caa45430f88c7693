"""The forward half of batch, layer, group, instance and root-mean-square normalization.

    y = r g (x - m) + b

with the mean m and the inverse deviation r of x, or with stored ones, and with a stored scale g and
offset b. The order of the products and sums, and whether m, g and b are there, differ from library
to library, so the search does not ask for one form: it gives all that the statistics reach a
polynomial, and takes the last node that has one of the form above.
"""

from __future__ import annotations

import dataclasses
import functools
from fractions import Fraction

from graph_passes.ir.graph_view import Shape
from graph_passes.rewriter.algebra import Polynomial
from graph_passes.rewriter.matcher import SHAPERS, SUMS, Matcher, NoMatchError
from graph_passes.units.normalization.statistics import Statistics, find_statistics
from graph_passes.units.normalization.unit_algebra import STORED, UnitAlgebra
from graph_passes.units.normalization.unit_axes import is_single

_STATISTICS = frozenset("mr")
_ELEMENTWISE = frozenset((*SUMS, "Sub", "Mul", "SquaredDifference"))


@dataclasses.dataclass(frozen=True)
class Roles:
    """What stored tensors are for in y = r g (x - m) + b, by their names in its polynomial.

    Attributes:
        gamma: the scale g, None where there is none.
        beta: the offset b, None where there is none.
        mean: the mean m where it is stored, None where it is not.
    """

    gamma: str | None = None
    beta: str | None = None
    mean: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """The forward half of one normalization.

    Attributes:
        x: tensor, the input.
        statistics: what the inverse deviation is made of.
        axes: the axes along which elements of x share a statistic, counted from 0 where the rank
            of x is known.
        shape: the static shape of x, None where it is not known.
        output: node that makes y.
        nodes: the nodes from the statistics to y, both included.
        gamma: tensor, the scale as it is stored or reshaped; None where there is none.
        beta: tensor, the offset, likewise.
        stored_mean: tensor, the mean, likewise; None where it is that of x.
        roles: the names of these in the algebra.
        algebra: what the nodes compute.
    """

    x: str
    statistics: Statistics
    axes: tuple[int, ...]
    shape: Shape | None
    output: int
    nodes: frozenset[int]
    gamma: str | None
    beta: str | None
    stored_mean: str | None
    roles: Roles
    algebra: UnitAlgebra

    @property
    def is_centred(self) -> bool:
        """Whether a mean is subtracted."""
        return self.statistics.mean is not None or self.stored_mean is not None

    @property
    def is_stored(self) -> bool:
        """Whether the statistics are stored."""
        return self.statistics.x is None

    def depends_on_x(self, number: int) -> bool:
        """Whether a node of it is made of x otherwise than by the statistics."""
        value = self.algebra.of_node.get(number)
        return value is not None and "x" in value.names


def find_forward(m: Matcher, rsqrt: int) -> list[Norm]:
    """The forward halves around a Rsqrt: more than one where several share stored statistics.

    Raises:
        NoMatchError: it is taken of the statistics of a tensor, but what follows is no
            normalization.
    """
    statistics = find_statistics(m, rsqrt)
    if statistics is None:
        return []
    # What is stored is multiplied with the gradient with regard to y, too.
    xs = _normalized_with(m, statistics) if statistics.x is None else [statistics.x]
    found = [norm for x in xs if (norm := _grow(m, statistics, x)) is not None]
    if not found and statistics.x is not None:
        raise NoMatchError("found no node, or several, that make r g (x - m) + b of x")
    return found


def _normalized_with(m: Matcher, statistics: Statistics) -> list[str]:
    """The tensors that stored statistics are multiplied with."""
    found = set()
    algebra = UnitAlgebra(m, statistics, None, (), None)
    algebra.reach([statistics.rsqrt])
    for number in (statistics.rsqrt, *algebra.of_node):
        for reader in m.readers(number):
            if m.op(reader) == "Mul":
                unknown = algebra.unknown(reader)
                if len(unknown) == 1:
                    found.add(m.tensor(reader, unknown[0]))
    return sorted(found)


def _grow(m: Matcher, statistics: Statistics, x: str) -> Norm | None:
    """Follows statistics to the one last node in which they come together as y."""
    shape = m.shape_of(x)
    axes = _axes_of(m, statistics, shape)
    algebra = UnitAlgebra(m, statistics, x, axes, shape)
    starts = {statistics.rsqrt, m.maker(x)}
    algebra.reach(starts if statistics.mean is None else {*starts, statistics.mean})
    is_stored = statistics.x is None
    roles = {}
    for number, value in algebra.of_node.items():
        found = _roles(value, statistics.mean is not None, is_stored)
        if found is not None and m.ops[number] not in SHAPERS:
            roles[number] = found
    # A product with 1, as that in `tf.nn.silu`, makes what it reads.
    values = algebra.of_node
    last = [n for n in roles if values[n] not in map(values.get, m.makers(n))]
    if len(last) > 1:
        read = algebra.behind(maker for number in last for maker in m.makers(number))
        last = [number for number in last if number not in read]
    if len(last) != 1:
        return None
    (output,) = last
    stored = roles[output]
    nodes = frozenset(algebra.behind([output, *statistics.nodes]))
    inputs = {tensor for number in nodes for tensor in m.inputs(number)}

    def tensor_of(name: str | None) -> str | None:
        read = algebra.parameters.get(name or "", ())
        return min(inputs.intersection(read) or read, default=None)

    return Norm(
        x=x,
        statistics=statistics,
        axes=axes,
        shape=shape,
        output=output,
        nodes=nodes,
        gamma=tensor_of(stored.gamma),
        beta=tensor_of(stored.beta),
        stored_mean=tensor_of(stored.mean),
        roles=stored,
        algebra=algebra,
    )


def misaligned(m: Matcher, norm: Norm) -> str | None:
    """A statistic or stored tensor that meets x along an axis of the statistics, None without.

    Sizes that happen to agree let a scale [channels] act along the last axis where channels are
    elsewhere.
    """
    rank = len(norm.shape or ())
    for number in sorted(norm.nodes):
        if m.ops[number] not in _ELEMENTWISE:
            continue
        inputs = m.inputs(number)
        others = [t for t in inputs if t != norm.x and not norm.depends_on_x(m.maker(t))]
        if len(others) == len(inputs):
            continue
        for tensor in others:
            is_weight = tensor == norm.statistics.weights
            if not is_weight and not _is_clear(m.shape_of(tensor), norm.axes, rank):
                return tensor
    return None


def misplaced(m: Matcher, norm: Norm) -> str | None:
    """A statistic that varies along an axis that it is taken over, None without.

    As `misaligned`, where scale and offset may vary along any.
    """
    algebra = norm.algebra
    for number in sorted(norm.nodes):
        for port, tensor in enumerate(m.inputs(number) if m.ops[number] in _ELEMENTWISE else ()):
            value = algebra.of(number, port)
            is_statistic = value is not None and value.names and value.names <= _STATISTICS
            if is_statistic and not algebra.axes.is_single(tensor, norm.axes):
                return tensor
    return None


def _is_clear(shape: Shape | None, axes: tuple[int, ...], rank: int) -> bool:
    """Whether a tensor has one element along some axes of x, as far as its shape is known."""
    if shape is None:
        return rank - 1 not in axes  # most are vectors
    return len(shape) <= rank and is_single(shape, rank, axes)


@functools.lru_cache(maxsize=1024)
def _roles(value: Polynomial, is_centred: bool, is_stored: bool) -> Roles | None:
    """What stored tensors are for in a polynomial, None where it is not r g (x - m) + b."""
    parts: dict[frozenset[str], set[str]] = {}
    for monomial, coefficient in value.terms:
        names = {name for name, exponent in monomial if exponent == 1}
        own = frozenset(name for name in names if not name.startswith(STORED))
        wanted = Fraction(-1 if "r" in own and "x" not in own else 1)
        if len(names) < len(monomial) or coefficient != wanted or own in parts:
            return None
        parts[own] = names - own
    scale, offset = parts.pop(frozenset("rx"), None), parts.pop(frozenset(), None)
    if scale is None or len(scale) > 1 or (offset is not None and len(offset) != 1):
        return None
    mean = None
    if is_stored:
        product = parts.pop(frozenset("r"), set())
        if not scale < product or len(product) != len(scale) + 1:
            return None
        (mean,) = product - scale
    elif is_centred and parts.pop(frozenset("rm"), None) != scale:
        return None
    if parts:
        return None
    return Roles(next(iter(scale), None), next(iter(offset or ()), None), mean)


def _axes_of(m: Matcher, statistics: Statistics, shape: Shape | None) -> tuple[int, ...]:
    if statistics.stored_variance is None:
        axes = statistics.axes
        return axes if shape is None else tuple(sorted(axis % len(shape) for axis in axes))
    if shape is None:
        return ()
    channels = m.shape_of(statistics.stored_variance)
    if channels is None or sum(size != 1 for size in channels) > 1:
        return ()
    axis = next((n for n, size in enumerate(channels) if size != 1), len(channels) - 1)
    axis += len(shape) - len(channels)
    return tuple(n for n in range(len(shape)) if n != axis)
