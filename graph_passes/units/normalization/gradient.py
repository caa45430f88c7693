"""The gradient of a normalization written in primitives, whatever the form of the forward half.

With d the gradient with regard to y, q = g d, statistics over n elements, i = 1 / n, and [...] a
sum over the axes of the statistics, automatic differentiation makes

    dx = r q - r i [q] - r^3 i (x - m) ([q x] - m [q])      of statistics of x
    dx = r q                                                of stored ones
    dg = r ([d x] - m [d])    db = [d]                      of g and b that vary along no such axis

m and the terms with [q] fall away where no mean is subtracted. With weights w, i is 1 / [w], and
what flows through a statistic is multiplied by w. A gradient is what has these polynomials. What d
is shows where it comes in: all that reads the inside of the forward half besides is made of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping

from graph_passes.rewriter.algebra import Polynomial, constant, symbol
from graph_passes.rewriter.matcher import SHAPERS, SUMS, Matcher, NoMatchError
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.normalization.forward import Norm, Roles
from graph_passes.units.normalization.statistics import is_parameter
from graph_passes.units.normalization.unit_algebra import LINEAR

_SAME = ("Identity", "StopGradient")
_LONGEST_CHAIN = 40
_DEEPEST_SUMS = 3
_MOST_TERMS = 8


@dataclasses.dataclass(frozen=True)
class NormGradient:
    """The gradient half of one normalization.

    Attributes:
        dy: tensor, the gradient with regard to y.
        dx: node that makes what flows back to x, perhaps with what else does; None where nothing
            asks for it.
        dx_terms: the tensors that it sums and that belong to this unit; none where all of it does.
        d_gamma: nodes that make the gradient of gamma, and shapes of it, where gamma does not vary
            along the axes of the statistics.
        d_beta: the same for beta.
        nodes: the nodes from dy to these, and to the sums behind the gradients of other parameters.
        is_proved: whether shapes are known well enough to tell what each node computes.
    """

    dy: str
    dx: int | None
    dx_terms: tuple[str, ...]
    d_gamma: tuple[int, ...]
    d_beta: tuple[int, ...]
    nodes: frozenset[int]
    is_proved: bool

    def redirect_dx(self, new: Replacement, dx: str) -> None:
        """Puts a tensor in the place of what flows back to x."""
        if self.dx is None:
            return
        name = new.view.names[self.dx]
        others = [tensor for tensor in new.inputs_of(self.dx) if tensor not in self.dx_terms]
        if self.dx_terms and others:
            new.inputs[name] = [*others, dx]
        else:
            new.replace(self.dx, dx)


def find_gradient(m: Matcher, norm: Norm) -> NormGradient | None:
    """The gradient that belongs to a forward half; None where the graph has none.

    Raises:
        NoMatchError: what reads the forward half is no gradient of it.
    """
    norm.algebra.take_no_more_parameters(_fixed(norm))
    try:
        dy = _Source(m, norm).find()
        found = None if dy is None else _read(m, norm, dy)
    except NoMatchError:
        if norm.is_stored:
            return None  # the forward half alone can be replaced
        raise
    return None if found is None or (norm.is_stored and not found.d_gamma) else found


def _fixed(norm: Norm) -> list[str]:
    """The names of stored tensors that do not vary along the axes of the statistics."""
    roles = norm.roles
    named = ((roles.gamma, norm.gamma), (roles.beta, norm.beta), (roles.mean, norm.stored_mean))
    is_of_batch, is_single = norm.statistics.is_of_batch, norm.algebra.axes.is_single
    return [n for n, t in named if n and t and (is_of_batch or is_single(t, norm.axes))]


class _Source:
    """Looks for the tensor that all of the gradient is made of."""

    def __init__(self, m: Matcher, norm: Norm) -> None:
        self._m = m
        self._norm = norm
        self._algebra = norm.algebra
        self._inside = {*norm.nodes, *norm.algebra.of_node}  # and what is made of these alone

    def find(self) -> str | None:
        """The nearest tensor on the way back from each place at which the gradient comes in."""
        m, norm = self._m, self._norm
        outer, pending = set(), list(norm.nodes - {norm.output})
        while pending:
            for reader in m.readers(pending.pop()):
                if m.ops[reader] not in LINEAR or reader in self._inside:
                    continue
                if self._unknown(reader):
                    outer.add(reader)
                else:
                    self._inside.add(reader)
                    pending.append(reader)
        # Not before: what is unknown to a node may turn out to be made inside.
        unknown = [self._unknown(reader) for reader in outer - self._inside]
        entries = {u[0] for u in unknown if len(u) == 1 and not is_parameter(m, u[0])}
        if not entries:
            return None
        direct = [tensor for tensor in entries if m.ops[m.maker(tensor)] not in LINEAR]
        source = self._common(sorted(direct or entries), _DEEPEST_SUMS)
        if source is None:
            raise NoMatchError(f"the gradient comes in by {len(entries)} tensors, not 1")
        gamma = None if norm.gamma is None else m.through(norm.gamma, *SHAPERS)
        while m.op(m.maker(source)) == "Mul":  # by gamma, of which nothing else is read
            others = [t for t in m.inputs(m.maker(source)) if m.through(t, *SHAPERS) != gamma]
            if len(others) != 1:
                break
            source = others[0]
        return source

    def _chain(self, tensor: str, deepest: int) -> Iterator[str]:
        """A tensor, that which it is made of and which is not known, and so on."""
        m, source = self._m, tensor
        for _ in range(_LONGEST_CHAIN):
            yield source
            number = m.maker(source)
            if m.ops[number] not in LINEAR:
                return
            unknown = self._unknown(number)
            made_of: str | None = None
            if len(unknown) == 1:
                made_of = unknown[0]
            elif m.ops[number] in SUMS and deepest and 1 < len(unknown) <= _MOST_TERMS:
                made_of = self._common(unknown, deepest - 1)
            if made_of is None:
                return
            source = made_of

    def _unknown(self, number: int) -> list[str]:
        m, inside = self._m, self._inside
        ports = self._algebra.unknown(number)
        return [m.tensor(number, port) for port in ports if m.makers(number)[port] not in inside]

    def _common(self, tensors: list[str], deepest: int) -> str | None:
        """The first tensor of a chain that those of all others have too.

        The chains are followed side by side: none that they have in common comes before one that
        they are known to have, since nothing is made of itself.
        """
        chains = [self._chain(tensor, deepest) for tensor in tensors]
        met: list[dict[str, None]] = [{} for _ in chains]
        while steps := [next(chain, None) for chain in chains]:
            for tensor, seen in zip(steps, met, strict=True):
                if tensor is not None:
                    seen[tensor] = None
            found = next((t for t in met[0] if all(t in seen for seen in met)), None)
            if found is not None or not any(steps):
                return found
        return None


def _read(m: Matcher, norm: Norm, dy: str) -> NormGradient:
    """The nodes that are gradients, by what they compute of dy."""
    algebra = norm.algebra
    algebra.name(dy, "d")
    algebra.reach([m.maker(dy)])
    of_x, of_gamma, of_beta = _formula(
        algebra.fixed,
        norm.roles,
        is_centred=norm.is_centred,
        is_stored=norm.is_stored,
        is_weighted=norm.statistics.weights is not None,
    )
    of_value: dict[Polynomial, list[int]] = {}
    for number, value in algebra.of_node.items():
        if number not in norm.nodes and m.ops[number] not in _SAME:
            of_value.setdefault(value, []).append(number)
    dx, terms = _input_gradient(m, norm, of_x, of_value)
    ends = set() if dx is None else {m.maker(tensor) for tensor in terms} or {dx}
    d_gamma = [] if norm.gamma is None else of_value.get(of_gamma, [])
    outer = [n for n, (value, _) in algebra.outer_sums.items() if "r" in value.names]
    ends.update(d_gamma, outer)
    if not ends:
        raise NoMatchError("what flows back is not the gradient of r g (x - m) + b")
    nodes = algebra.behind(ends) - norm.nodes
    sums = [] if norm.beta is None else of_value.get(of_beta, [])
    # Units that share dy have a sum each.
    first = [n for n in sums if n in nodes]
    own = [n for n in sums if n in nodes or not nodes.isdisjoint(m.makers(n))]
    d_beta = own if first else sums
    return NormGradient(
        dy=dy,
        dx=dx,
        dx_terms=terms,
        d_gamma=tuple(sorted(d_gamma)),
        d_beta=tuple(sorted(d_beta)),
        nodes=frozenset(nodes.union(d_beta, () if dx is None else (dx,))),
        is_proved=not algebra.axes.is_assumed,
    )


def _input_gradient(
    m: Matcher, norm: Norm, wanted: Polynomial, of_value: Mapping[Polynomial, list[int]]
) -> tuple[int | None, tuple[str, ...]]:
    """The first node in which what flows back to x comes together, and its terms."""
    algebra = norm.algebra
    found: dict[int, tuple[int, ...]] = {}  # node -> ports of the terms
    if norm.is_stored:
        found = {n: () for n in of_value.get(wanted, ()) if m.op(n) not in SHAPERS}
    for number in () if norm.is_stored else algebra.sums - norm.nodes:
        terms = [(p, algebra.of(number, p)) for p in range(len(m.makers(number)))]
        own = [(port, value) for port, value in terms if value is not None and "r" in value.names]
        if own and sum((value for _, value in own), constant(0)) == wanted:
            found[number] = tuple(port for port, _ in own)
    first = list(found)
    if len(first) > 1:
        read = {
            n: algebra.behind(m.makers(n)[port] for port in ports or range(len(m.makers(n))))
            for n, ports in found.items()
        }
        first = [n for n in found if found.keys().isdisjoint(read[n])]
    if len(first) > 1:
        raise NoMatchError(f"found {len(first)} nodes in which what flows back to x comes together")
    if not first:
        return None, ()
    return first[0], tuple(m.tensor(first[0], port) for port in found[first[0]])


@functools.lru_cache(maxsize=256)
def _formula(
    fixed: frozenset[str], roles: Roles, *, is_centred: bool, is_stored: bool, is_weighted: bool
) -> tuple[Polynomial, Polynomial, Polynomial]:
    """The gradients with regard to x, and to a scale and an offset that the sums leave alone."""
    r, i, x, d = symbol("r"), symbol("i"), symbol("x"), symbol("d")
    m = symbol(roles.mean or "m") if is_centred else constant(0)
    q = d if roles.gamma is None else d * symbol(roles.gamma)
    spread = i * symbol("w") if is_weighted else i
    dx, mean = r * q, q.total(fixed) if is_centred else constant(0)
    if not is_stored:
        cubed = symbol("r", 3) * spread
        dx = dx - r * spread * mean - cubed * (x - m) * ((q * x).total(fixed) - m * mean)
    d_gamma = r * ((d * x).total(fixed) - m * d.total(fixed))
    return dx, d_gamma, d.total(fixed)
