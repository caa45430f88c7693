"""The gradient of a layer, group or root-mean-square normalization written in primitives.

Automatic differentiation makes one node or two of each forward node, which read what only the
forward half makes (the scale, the negated mean, the centred input), and sums what flows back to
x. The nodes between are the gradient, whatever the form of the forward half; they are found from
those two ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from graph_passes.patterns.layer_norm import Norm, is_parameter
from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.patterns.search import ADDS, SHAPERS
from graph_passes.view import FLOAT

SUMS = ("AddN", *ADDS)
_SPREADERS = (*SHAPERS, "BroadcastTo", "Tile")
_DIVISIONS = ("RealDiv", "DivNoNan")
_ARITHMETIC = frozenset(
    (*SUMS, *_SPREADERS, *_DIVISIONS, "Mul", "Sub", "Neg", "RsqrtGrad", "Square", "Pow", "Sum")
)
_SHAPE_ARITHMETIC = frozenset(("Shape", "ShapeN", "BroadcastGradientArgs"))
_BEHIND_MEAN = (*_SPREADERS, *_DIVISIONS, "Neg", "Sum")
_UNBROADCAST = ("Reshape", "Sum")
"""What follows the gradient of an op that may have broadcast its input."""
_MOST_NODES = 200
"""More nodes than a gradient has in any form."""
_LONGEST_CHAIN = 40
_DEEPEST_REBUILT = 2
_MOST_ENTRIES = 8


@dataclasses.dataclass(frozen=True)
class NormGradient:
    """The gradient half of one normalization.

    Attributes:
        dy: tensor, the gradient with regard to y.
        dx_sum: node that sums what flows back to x; None where nothing does.
        dx_terms: the tensors of that sum that belong to this unit.
        nodes: the nodes between dy and the sum, the sum included, and those between dy and the
            sums that are the gradients of gamma and beta.
    """

    dy: str
    dx_sum: int | None
    dx_terms: tuple[str, ...]
    nodes: frozenset[int]


def find_gradient(matcher: Matcher, norm: Norm) -> NormGradient | None:
    """The gradient that belongs to a forward half; None where the graph has none.

    Raises:
        NoMatchError: what reads the forward half is no gradient of it.
    """
    return _GradientSearch(matcher, norm).find()


class _GradientSearch:
    def __init__(self, matcher: Matcher, norm: Norm) -> None:
        self._m = matcher
        self._norm = norm
        self._is_parameter: dict[str, bool] = {}

    def find(self) -> NormGradient | None:
        m, norm = self._m, self._norm
        dx_sum = self._dx_sum()
        seeds = [
            reader
            for number in norm.nodes - {norm.output}
            for reader in m.readers(number)
            if reader not in norm.nodes
        ]
        reached = self._forward(seeds, dx_sum)
        if not any(self._is_float(number) for number in reached):
            return None
        nodes: set[int] = set()
        terms: tuple[str, ...] = ()
        if dx_sum is not None:
            nodes = self._back_from(dx_sum, reached)
            terms = tuple(t for t in m.inputs(dx_sum) if m.maker(t) in nodes)
        nodes |= self._to_parameters(reached, nodes)
        floats = {number for number in nodes if self._is_float(number)}
        dy, rebuilt = self._entry(floats, dx_sum, terms)
        return NormGradient(dy, dx_sum, terms, frozenset(floats | rebuilt))

    def _dx_sum(self) -> int | None:
        """The last sum behind RsqrtGrad: what flows through the mean joins after the rest."""
        m = self._m
        starts = [n for n in m.readers(self._norm.rsqrt) if m.op(n) == "RsqrtGrad"]
        if not starts:
            return None
        if len(starts) > 1:
            raise NoMatchError("two gradients flow back through the Rsqrt")
        last = self._next_sum(starts[0], (*_BEHIND_MEAN, "Mul"))
        while last is not None:
            after = self._next_sum(last, _BEHIND_MEAN)
            direct = () if after is None else m.inputs(after)
            if after is None or last not in (m.maker(m.through(t, *_UNBROADCAST)) for t in direct):
                return last
            last = after
        raise NoMatchError("the gradient of the Rsqrt reaches no sum of what flows back to x")

    def _next_sum(self, start: int, ops: Collection[str]) -> int | None:
        """The sum that a chain of certain ops leads to, by way of a division by the count."""
        m = self._m
        pending, seen = [(start, False)], {start}
        while pending and len(seen) < _LONGEST_CHAIN:
            number, is_mean = pending.pop(0)
            for reader in m.readers(number):
                if reader in seen or not self._is_float(reader):
                    continue
                if m.op(reader) in SUMS:
                    if is_mean and self._is_of_x(reader):
                        return reader
                elif m.op(reader) in ops:
                    seen.add(reader)
                    pending.append((reader, is_mean or m.op(reader) in _DIVISIONS))
        return None

    def _is_of_x(self, total: int) -> bool:
        """Whether a sum is of what flows to x; with weights, something flows to those as well."""
        m, norm = self._m, self._norm
        if norm.weights is None:
            return True
        scaled = {norm.rsqrt}
        for number in sorted(norm.nodes):
            if not scaled.isdisjoint(m.makers(number)):
                scaled.add(number)
        for tensor in m.inputs(total):
            product = m.maker(m.through(tensor, *_UNBROADCAST))
            if m.op(product) == "Mul" and not scaled.isdisjoint(m.makers(product)):
                return True
        return False

    def _forward(self, seeds: Iterable[int], dx_sum: int | None) -> set[int]:
        """What the forward half's tensors reach before x or a parameter has its gradient."""
        m = self._m
        pending = [n for n in seeds if self._may_be_gradient(n)]
        reached = set(pending)
        while pending:
            number = pending.pop()
            if number == dx_sum or self._is_parameter_sum(number):
                continue
            for reader in m.readers(number):
                if reader in reached or reader in self._norm.nodes:
                    continue
                if self._may_be_gradient(reader):
                    reached.add(reader)
                    pending.append(reader)
            if len(reached) > _MOST_NODES:
                raise NoMatchError("what reads the statistics reaches too many nodes")
        return reached

    def _may_be_gradient(self, number: int) -> bool:
        op = self._m.op(number)
        return op in _ARITHMETIC or op in _SHAPE_ARITHMETIC

    def _is_parameter_sum(self, number: int) -> bool:
        """Whether a node sums over the batch, as the gradients of gamma and beta do."""
        m = self._m
        if m.op(number) != "Sum" or m.op(m.source(number, 1)) != "Const":
            return False
        return 0 in m.constant(m.tensor(number, 1)).ravel().tolist()

    def _back_from(self, end: int, reached: Collection[int]) -> set[int]:
        nodes, pending = {end}, [end]
        while pending:
            for maker in self._m.makers(pending.pop()):
                if maker in reached and maker not in nodes:
                    nodes.add(maker)
                    pending.append(maker)
        return nodes

    def _to_parameters(self, reached: Collection[int], to_x: Collection[int]) -> set[int]:
        """The nodes on the way from the rest of the gradient to the first sums behind it."""
        m = self._m
        sums = [n for n in reached if n not in to_x and self._is_parameter_sum(n)]
        nodes: set[int] = set()
        for end in sums:
            nodes |= {n for n in self._back_from(end, reached) if n not in to_x}
        return {n for n in nodes if m.op(n) not in _SHAPE_ARITHMETIC}

    def _entry(
        self, nodes: set[int], dx_sum: int | None, terms: Collection[str]
    ) -> tuple[str, set[int]]:
        """The one tensor from outside that the gradient reads, and what is inside besides.

        The products of dy with x and gamma, and sums of dy, read nothing of the forward half, so
        they are found from what reads them; so is what is made of x anew.
        """
        m = self._m
        inside: set[int] = set()
        entries: dict[str, None] = {}
        for number in sorted(nodes):
            own = m.inputs(number) if number != dx_sum else terms
            self._enter(own, nodes, inside, entries)
        while len(entries) > 1:
            last = max(entries, key=m.maker)  # what is made of dy comes after it
            del entries[last]
            maker = m.maker(last)
            if len(entries) > _MOST_ENTRIES or not self._is_made_of_dy(maker):
                raise NoMatchError(f"the gradient comes in by {len(entries) + 1} tensors, not 1")
            inside.add(maker)
            self._enter(m.inputs(maker), nodes, inside, entries)
        if not entries:
            raise NoMatchError("the gradient comes in by no tensor")
        return next(iter(entries)), inside

    def _enter(
        self, tensors: Iterable[str], nodes: set[int], inside: set[int], entries: dict[str, None]
    ) -> None:
        """Sorts tensors that a node inside reads into entries and what is inside as well."""
        for tensor in tensors:
            maker = self._m.maker(tensor)
            if maker in nodes or maker in self._norm.nodes or maker in inside:
                continue
            if self._is_float(maker):
                rebuilt = self._rebuilt(tensor)
                if rebuilt is None:
                    entries[tensor] = None
                else:
                    inside |= rebuilt

    def _is_made_of_dy(self, number: int) -> bool:
        """Whether a node is a product with x or gamma, a sum, a negative, or a shape of those."""
        m, norm = self._m, self._norm
        if m.op(number) == "Reshape":
            number = m.maker(m.through(m.tensor(number, 0), "Reshape"))
        if m.op(number) in ("Sum", "Neg"):
            return not self._is_parameter_sum(number)
        if m.op(number) != "Mul":
            return False
        stored = None if norm.gamma is None else m.through(norm.gamma, *SHAPERS)
        return any(t == norm.x or m.through(t, *SHAPERS) == stored for t in m.inputs(number))

    def _rebuilt(self, tensor: str, depth: int = 0) -> set[int] | None:
        """The nodes that make a tensor from x, parameters and constants; None for another one."""
        m = self._m
        maker = m.maker(tensor)
        if tensor in (self._norm.x, self._norm.weights) or maker in self._norm.nodes:
            return set()
        if m.op(maker) in ("Const", "Cast"):
            return set()
        if tensor not in self._is_parameter:
            self._is_parameter[tensor] = is_parameter(m, tensor)
        if self._is_parameter[tensor]:
            return set()
        if depth == _DEEPEST_REBUILT or m.op(maker) not in _ARITHMETIC:
            return None
        found = {maker}
        for one in m.inputs(maker):
            if self._is_float(m.maker(one)):
                more = self._rebuilt(one, depth + 1)
                if more is None:
                    return None
                found |= more
        return found

    def _is_float(self, number: int) -> bool:
        """Whether the first output of a node is float32."""
        kind = self._m.view.kind(number)
        slots = kind.layout.out_slots
        return bool(slots) and kind.dtypes[slots[0]] == FLOAT
