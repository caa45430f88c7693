"""The tensors of one normalization as polynomials.

They are polynomials in the input x, the mean m, the inverse deviation r, the weights w of
statistics, the inverse i of the number of elements that a statistic is taken over, in the stored
tensors that they meet, and in the gradient d with regard to y. A node has a polynomial once all
that it reads has one, so that the order of nodes has no part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction

import numpy as np

from graph_passes.ir.adjacency import walk
from graph_passes.ir.graph_view import Shape
from graph_passes.rewriter.algebra import Polynomial, combined, constant, symbol
from graph_passes.rewriter.constant_evaluation import evaluated
from graph_passes.rewriter.matcher import SHAPERS, SPREADS, SUMS, Matcher
from graph_passes.units.normalization.statistics import Statistics, is_parameter
from graph_passes.units.normalization.unit_axes import UnitAxes

SPREADERS = (*SHAPERS, *SPREADS)
"""Ops whose elements are those of their first input."""
DIVISIONS = ("RealDiv", "DivNoNan")
_ONE_INPUT = frozenset((*SPREADERS, "Sum", "Pow"))
STORED = "p"
"""With what the names of stored tensors begin, and no others."""
_WHOLE = frozenset(("x", "d"))
_MOST_TERMS = 12


class UnitAlgebra:
    """Reads what statistics and x reach as polynomials.

    Attributes:
        axes: the axes of x, and what they say of the nodes.
        fixed: names that do not vary along the axes of the statistics.
        of_node: the nodes that have a polynomial.
        pending: axes that a node still has to be summed over before its polynomial holds.
        sums: the nodes that sum tensors some of which have a polynomial.
        outer_sums: Sum nodes over other axes than those of the statistics -> what they sum, and the
            axes.
        parameters: the names of stored tensors -> the tensors that are read, some reshaped.
    """

    def __init__(
        self,
        matcher: Matcher,
        statistics: Statistics,
        x: str | None,
        axes: Iterable[int],
        shape: Shape | None,
    ) -> None:
        """Names what the statistics make, and x unless it is None; axes and shape as in `Norm`."""
        self._m = matcher
        self._statistics = statistics
        self.axes = UnitAxes(matcher, statistics, axes, shape)
        self.of_node: dict[int, Polynomial] = {}
        self.pending: dict[int, frozenset[int]] = {}
        self.sums: set[int] = set()
        self.outer_sums: dict[int, tuple[Polynomial, frozenset[int]]] = {}
        self.parameters: dict[str, list[str]] = {}
        self.fixed = frozenset("mri")
        self._stored: dict[str, str] = {}
        self._takes_parameters = True
        self._values = {statistics.rsqrt: symbol("r")}
        self._ports: dict[int, dict[str, Polynomial]] = {}  # of nodes with several outputs
        self._others: set[int] = set()
        if statistics.mean is not None:
            self._values[statistics.mean] = symbol("m")
        self._values.update((number, symbol("i", -1)) for number in statistics.counts)
        if x is not None:
            self.name(x, "x")
        if statistics.weights is not None:
            self.name(statistics.weights, "w")

    def name(self, tensor: str, name: str) -> None:
        """Gives a tensor a name."""
        number = self._m.maker(tensor)
        if len(self._m.view.layout(number).out_slots) == 1:
            self._values[number] = symbol(name)
        else:
            self._ports.setdefault(number, {})[tensor] = symbol(name)

    def take_no_more_parameters(self, fixed: Iterable[str]) -> None:
        """Ends the search for stored tensors, some of which do not vary along the axes."""
        self._takes_parameters = False
        self.fixed = self.fixed.union(fixed)

    def of(self, number: int, port: int) -> Polynomial | None:
        """What a node reads at a port as a polynomial, None where it has none."""
        maker = self._m.makers(number)[port]
        found = self._values.get(maker)
        if found is not None or maker in self._others:
            return found
        if maker in self._ports:
            return self._ports[maker].get(self._m.tensor(number, port))
        found = self._of_stored(number, port, maker)
        if found is None:
            self._others.add(maker)
        else:
            self._values[maker] = found
        return found

    def _of_stored(self, number: int, port: int, maker: int) -> Polynomial | None:
        """A constant or a stored tensor as a polynomial."""
        m, op = self._m, self._m.ops[maker]
        if op == "Const":
            value = m.constant(m.output(maker))
            if value.size == 1:
                return constant(value.item()) if np.isfinite(value).all() else None
        is_negative = op == "Neg"
        tensor = m.tensor(maker, 0) if is_negative else m.tensor(number, port)
        source = m.through(tensor, *SHAPERS)
        name = self._stored.get(source)
        if name is None and self._takes_parameters and is_parameter(m, tensor):
            name = self._stored[source] = f"{STORED}{len(self._stored)}"
        if name is None:
            return None
        self.parameters.setdefault(name, []).append(tensor)
        return -symbol(name) if is_negative else symbol(name)

    def reach(self, starts: Iterable[int]) -> None:
        """Gives all nodes behind some nodes their polynomials."""
        values, ops, readers_of = self._values, self._m.ops, self._m.readers
        unread = list(starts)
        while unread:
            for reader in readers_of(unread.pop()):
                if reader in values or ops[reader] not in _VALUES:
                    continue
                found = self._evaluate(reader, ops[reader])
                if found is not None and len(found.terms) <= _MOST_TERMS:
                    values[reader] = self.of_node[reader] = found
                    unread.append(reader)

    def behind(self, ends: Iterable[int]) -> set[int]:
        """Some nodes, and those of the unit that they are made of."""
        own = self.of_node.keys() | self._statistics.nodes
        return set(walk(ends, lambda number: own.intersection(self._m.makers(number))))

    def unknown(self, number: int) -> list[int]:
        """The ports at which a node reads tensors without a polynomial."""
        ports = range(1 if self._m.ops[number] in _ONE_INPUT else len(self._m.makers(number)))
        return [port for port in ports if self.of(number, port) is None]

    def _evaluate(self, number: int, op: str) -> Polynomial | None:
        if op in SUMS:
            self.sums.add(number)
        read = self._values.get(self._m.makers(number)[0]) or self.of(number, 0)
        if read is None:
            return None
        found = _VALUES[op](self, number, read)
        if found is None or not self.pending or op == "Sum":
            return found
        return self._with_pending(number, op, found)

    def _spread(self, number: int, read: Polynomial) -> Polynomial | None:
        repeats = self._m.ops[number] in SPREADS
        if repeats and not _WHOLE.isdisjoint(read.names):  # of more elements than x
            return None
        # A gradient is reshaped to what is of the shape of x, y to what its reader asks for.
        is_y = self._takes_parameters and "x" in read.names
        return read if self.axes.keeps_places(number, must_show=is_y) else None

    def _power(self, number: int, read: Polynomial) -> Polynomial | None:
        # Of exponent 1, in the gradient of a square.
        exponent = evaluated(self._m, self._m.tensor(number, 1))
        return read if exponent is not None and exponent.ravel().tolist() == [1] else None

    def _quotient(self, number: int, read: Polynomial) -> Polynomial | None:
        return read * symbol("i") if self.axes.is_count(self._m.makers(number)[1]) else None

    def _combined(self, number: int, read: Polynomial) -> Polynomial | None:
        op, values = self._m.ops[number], [read]
        for port in range(1, len(self._m.makers(number))):
            value = self.of(number, port)
            if value is None or (op == "Mul" and not _WHOLE.isdisjoint(read.names & value.names)):
                return None
            values.append(value)
        return combined(op, values)

    def _rsqrt_gradient(self, number: int, _: Polynomial) -> Polynomial | None:
        other, is_own = self.of(number, 1), self._m.makers(number)[0] == self._statistics.rsqrt
        if other is None or not is_own:
            return None
        return symbol("r", 3) * other * constant(Fraction(-1, 2))

    def _with_pending(self, number: int, op: str, found: Polynomial) -> Polynomial | None:
        """What is summed over some axes only may be multiplied by what does not vary along them."""
        makers = self._m.makers(number)[: 1 if op in _ONE_INPUT else None]
        pending = [self.pending.get(maker, frozenset()) for maker in makers]
        axes = frozenset[int]().union(*pending)
        if not axes:
            return found
        is_factor = op in ("Mul", *DIVISIONS)
        for port, one in enumerate(pending):
            tensor = self._m.tensor(number, port)
            if one != axes and not (is_factor and self.axes.is_single(tensor, axes)):
                return None
        self.pending[number] = axes
        return found

    def _sum(self, number: int, read: Polynomial) -> Polynomial | None:
        axes, own = self.axes.of_sum(number), self.axes.own
        before = self.pending.get(self._m.makers(number)[0], frozenset())
        if axes | before == own:
            return self._total(read)
        if not axes and not before:
            return read
        if axes < own:
            self.pending[number] = axes | before
            return read
        self.outer_sums[number] = read, axes
        return None

    def _total(self, summed: Polynomial) -> Polynomial:
        weights, count = self._statistics.weights is not None, symbol("i", -1)
        known = [("[w]" if weights else "[]", count)]
        if self._statistics.mean is not None:  # elements add up to it times their number
            known.append(("[w x]" if weights else "[x]", symbol("m") * count))
        return summed.total(self.fixed, known)


_VALUES: dict[str, Callable[[UnitAlgebra, int, Polynomial], Polynomial | None]] = {
    **dict.fromkeys(SPREADERS, UnitAlgebra._spread),
    **dict.fromkeys((*SUMS, "Sub", "Mul", "Neg"), UnitAlgebra._combined),
    **dict.fromkeys(DIVISIONS, UnitAlgebra._quotient),
    "Pow": UnitAlgebra._power,
    "RsqrtGrad": UnitAlgebra._rsqrt_gradient,
    "Sum": UnitAlgebra._sum,
}
"""Op -> what computes a node's polynomial from that of its first input."""
LINEAR = frozenset(_VALUES)
"""Ops that the halves of a normalization consist of, besides those of its statistics."""
