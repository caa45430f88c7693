"""What an update of a variable and its slots computes, as polynomials.

From the last write back, through the reads that wait for earlier writes, all variables of an update
are found; what is written to each is then a polynomial in the values that they held, `old 1`, in
those that they were given, `new 1`, and in tensors and scalars from elsewhere, `x 0` and `s 0`. Two
ways to write an update have one polynomial, but for the rounding of single operations.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping

from graph_passes.ir.adjacency import walk
from graph_passes.ir.graph_view import FLOAT, Shape
from graph_passes.rewriter.algebra import Monomial, Polynomial, combined, constant, symbol
from graph_passes.rewriter.effects import READ, WRITES, Contraction
from graph_passes.rewriter.matcher import SUMS, Matcher, NoMatchError

_ARITHMETIC = (*SUMS, "Sub", "Mul", "Neg", "RealDiv", "Rsqrt", "Sqrt", "Square")
_SCALAR = "s "
_MOST_NODES = 64
"""More nodes than any update has, for one variable."""
_MOST_TERMS = 32
"""More than any of their polynomials has."""


def is_scalar(name: str) -> bool:
    """Whether a name in a polynomial stands for a scalar."""
    return name.startswith(_SCALAR)


@dataclasses.dataclass(frozen=True)
class Formula:
    """What is written to some variables at once, whatever they are.

    Attributes:
        values: for each variable what it holds then, the last write's first.
        inner: name -> the polynomial of which it is the square root, "root 0", or to which it is
            equal, "sum 0".
        old: places of the variables of which the old value is read, be it for nothing.
        is_scaled: whether what other tensors are multiplied by, or made of, is part of it.
    """

    values: tuple[Polynomial, ...]
    inner: tuple[tuple[str, Polynomial], ...]
    old: frozenset[int]
    is_scaled: bool

    def within(self, name: str) -> Polynomial:
        """What a name stands for; 0 where it is none of `inner`."""
        return dict(self.inner).get(name, constant(0))


@dataclasses.dataclass(frozen=True)
class Update:
    """What is written to some variables of a graph at once.

    Attributes:
        formula: what.
        tensors: name in its polynomials -> the tensor that it stands for; for "old 0" and so on
            the variable.
        contraction: the nodes.
        shape: that of the slots.
        broadcast: names of tensors that may be repeated to that shape.
    """

    formula: Formula
    tensors: Mapping[str, str]
    contraction: Contraction
    shape: Shape | None
    broadcast: frozenset[str]


def is_float32_write(m: Matcher, number: int) -> bool:
    """Whether a node writes float32 to a variable."""
    return m.ops[number] in WRITES and m.attr(number, "dtype").type == FLOAT


class Variables:
    """How one graph reads and writes variables.

    Attributes:
        m: reads the graph.
        preserved: numbers of nodes that may be fed.
        awaited: read -> the write to its variable that it waits for.
        behind: the reads of the variables that such reads are of, *slots*, and what is computed
            with them.
    """

    def __init__(self, m: Matcher, preserved: Collection[int]) -> None:
        self.m, self.preserved = m, preserved
        self.awaited: dict[int, int] = {}
        for number in m.view.of_op(READ):
            for name in m.view.waits.get(number, ()):
                write, handle = m.view.index.get(name, -1), m.tensor(number, 0)
                if write >= 0 and is_float32_write(m, write) and m.tensor(write, 0) == handle:
                    self.awaited.setdefault(number, write)
        slots = {m.tensor(number, 0) for number in self.awaited}
        reads = [n for handle in slots for n in m.readers(m.maker(handle)) if m.ops[n] == READ]
        self.behind = set(walk(reads, self.computing))
        self._shapes: dict[str, Shape | None] = {}
        self._constant: dict[str, bool] = {}

    def computing(self, number: int) -> list[int]:
        """The nodes that compute with what a node makes."""
        return [reader for reader in self.m.readers(number) if self.m.ops[reader] in _ARITHMETIC]

    def is_constant(self, handle: str) -> bool:
        """Whether nothing writes to a variable."""
        if handle not in self._constant:
            users = self.m.readers(self.m.maker(handle))
            self._constant[handle] = all(self.m.ops[user] == READ for user in users)
        return self._constant[handle]

    def shape(self, tensor: str) -> Shape | None:
        """The static shape of a tensor, None where a size is not known."""
        if tensor not in self._shapes:
            m = self.m
            is_constant = m.ops[m.maker(tensor)] == "Const"  # to ask a host takes longer
            shape = m.constant(tensor).shape if is_constant else m.stored_shape(tensor)
            self._shapes[tensor] = None if shape is None or None in shape else shape
        return self._shapes[tensor]


class UpdateSearch:
    """Reads one update."""

    def __init__(self, variables: Variables, last: int, *, with_slots: bool) -> None:
        """Starts from the last write; other variables may be part of the update with slots."""
        self._variables, self._m, self._last = variables, variables.m, last
        self.writes: dict[str, int] = {self._m.tensor(last, 0): last}
        self._reads: dict[int, bool] = {}
        if with_slots:
            self._find_slots()
        self._order = {handle: place for place, handle in enumerate(self.writes)}
        self._made = self._find_made()
        self._names: dict[str, str] = {}  # tensor or variable -> its name in the polynomials
        self._tensors = {f"old {place}": handle for handle, place in self._order.items()}
        self._inner: dict[str, Polynomial] = {}
        self._expanded: dict[str, Polynomial] = {}
        self._inside: set[int] = set()
        self._beside: set[int] = set()
        self._shapes: set[Shape | None] = set()
        self._broadcast: set[str] = set()

    def read(self) -> Update:
        """The update.

        Raises:
            NoMatchError: something is computed in another way, may be broadcast, or must stay.
        """
        for number in (*self.writes.values(), *self._reads):
            if number in self._variables.preserved:  # the gate would ask, once all else is done
                raise NoMatchError(f"{self._m.view.names[number]!r} is to be preserved")
        values = tuple(self._written(place, n) for place, n in enumerate(self.writes.values()))
        if len(self.writes) > 1 and (None in self._shapes or len(self._shapes) != 1):
            raise NoMatchError("the gradient and the slots have several shapes, or none is known")
        old = [number for number, is_new in self._reads.items() if not is_new]
        return Update(
            formula=Formula(
                values=values,
                inner=tuple(self._inner.items()),
                old=frozenset(self._order[self._m.tensor(number, 0)] for number in old),
                is_scaled=bool(self._beside),
            ),
            tensors=self._tensors,
            contraction=Contraction(
                last=self._last,
                writes=self.writes,
                reads=self._reads,
                inside=frozenset(self._inside),
                beside=frozenset(self._beside),
            ),
            shape=next(iter(self._shapes), None),
            broadcast=frozenset(self._broadcast),
        )

    def _find_slots(self) -> None:
        """Finds the other variables, and all reads of them, from the last write back."""
        m, awaited, behind = self._m, self._variables.awaited, self._variables.behind
        found: list[int] = []  # reads
        pending, seen = [m.source(self._last, 1)], set[int]()
        for number in pending:  # which grows
            if number in seen or number not in behind or len(seen) > _MOST_NODES:
                continue
            seen.add(number)
            if m.ops[number] == READ:
                found.append(number)
                write = awaited.get(number)
                if write is not None and m.tensor(number, 0) not in self.writes:
                    self.writes[m.tensor(number, 0)] = write
                    pending.append(m.source(write, 1))
            else:
                pending += m.makers(number)
        for number in found:
            handle = m.tensor(number, 0)
            if handle == m.tensor(self._last, 0) or handle not in self.writes:
                continue  # what the variable itself held is as any other tensor
            self._reads[number] = awaited.get(number) == self.writes[handle]

    def _find_made(self) -> set[int]:
        """The nodes that compute with what the update reads."""
        most = len(self._reads) + _MOST_NODES
        found = list(itertools.islice(walk(self._reads, self._variables.computing), most + 1))
        if len(found) > most:
            raise NoMatchError("too many nodes read its variables")
        return set(found).difference(self._reads)

    def _written(self, place: int, number: int) -> Polynomial:
        value, op = self._expand(self._m.tensor(number, 1)), self._m.ops[number]
        if op == "AssignVariableOp":
            return value
        old = symbol(f"old {place}")
        return old + value if op == "AssignAddVariableOp" else old - value

    def _expand(self, tensor: str) -> Polynomial:
        """What a tensor is, each once: a step that reads the one before twice doubles all else."""
        if tensor not in self._expanded:
            self._expanded[tensor] = found = self._computed(tensor)
            if len(found.terms) > _MOST_TERMS:
                raise NoMatchError("what it computes has too many terms")
        return self._expanded[tensor]

    def _computed(self, tensor: str) -> Polynomial:
        m = self._m
        number = m.maker(tensor)
        if number in self._reads:
            self._shapes.add(self._variables.shape(tensor))
            place = self._order[m.tensor(number, 0)]
            return symbol(f"{'new' if self._reads[number] else 'old'} {place}")
        if number not in self._made:
            return self._from_outside(tensor)
        self._inside.add(number)
        op = m.ops[number]
        values = [self._expand(each) for each in m.inputs(number)]
        if (found := combined(op, values)) is not None:
            return found
        if op == "RealDiv":
            below = values[1].inverse() or symbol(self._inner_name("sum", values[1]), -1)
            return values[0] * below
        root = self._inner_name("root", values[0])
        return symbol(root, -1 if op == "Rsqrt" else 1)

    def _inner_name(self, kind: str, value: Polynomial) -> str:
        name = f"{kind} {len(self._inner)}"
        self._inner[name] = value
        return name

    def _from_outside(self, tensor: str) -> Polynomial:
        """A tensor that is made without the variables, scalar factors taken out of it."""
        m, factor = self._m, constant(1)
        if self._variables.shape(tensor) == ():
            return self._scalar(tensor)
        for _ in range(_MOST_NODES):
            number = m.maker(tensor)
            inputs, op = m.inputs(number), m.ops[number]
            if op == "Square" or (op == "Mul" and inputs[0] == inputs[1]):
                self._beside.add(number)
                return factor * self._tensor(inputs[0]) * self._tensor(inputs[0])
            if len(m.readers(number)) != 1 or m.view.names[number] in m.view.awaited:
                break
            scalars = [each for each in inputs if op == "Mul" and self._variables.shape(each) == ()]
            if op == "Neg":
                tensor, factor = inputs[0], -factor
            elif len(scalars) == 1:
                factor *= self._scalar(scalars[0])
                (tensor,) = [each for each in inputs if each != scalars[0]]
            else:
                break
            self._beside.add(number)
        return factor * self._tensor(tensor)

    def _scalar(self, tensor: str) -> Polynomial:
        if self._m.ops[self._m.maker(tensor)] == "Const":
            value = float(self._m.constant(tensor))
            if math.isfinite(value):
                self._beside.add(self._m.maker(tensor))
                return constant(value)
        return symbol(self._name(tensor, _SCALAR))

    def _tensor(self, tensor: str) -> Polynomial:
        name, shape = self._name(tensor, "x "), self._variables.shape(tensor)
        if shape is None:
            self._broadcast.add(name)
        else:
            self._shapes.add(shape)
        return symbol(name)

    def _name(self, tensor: str, kind: str) -> str:
        tensor = self._handed_on(tensor)
        key = self._variable(tensor) or tensor
        name = self._names.setdefault(key, f"{kind}{len(self._names)}")
        self._tensors[name] = min(tensor, self._tensors.get(name, tensor))
        return name

    def _handed_on(self, tensor: str) -> str:
        """What a tensor is equal to, before Keras hands all gradients on together.

        An update that reads that need not wait for the gradients of other variables, and can wait
        for what is computed beside its own (`emit.update_order`).
        """
        m, preserved = self._m, self._variables.preserved
        while m.ops[number := m.maker(tensor)] == "IdentityN":
            if number in m.view.waits or number in preserved:
                break
            tensor = m.tensor(number, m.view.split(tensor)[1])
        return tensor

    def _variable(self, tensor: str) -> str | None:
        """The handle of the variable that a tensor was read from, where nothing writes to it."""
        m, number = self._m, self._m.maker(tensor)
        is_read = m.ops[number] == READ and number not in self._variables.preserved
        handle = m.tensor(number, 0) if is_read else None
        return handle if handle is not None and self._variables.is_constant(handle) else None


def by_tensors(value: Polynomial) -> dict[Monomial, Polynomial]:
    """A polynomial as a sum of products of tensors, each with its scalar factor."""
    found: dict[Monomial, Polynomial] = {}
    for monomial, coefficient in value.terms:
        tensors = tuple(pair for pair in monomial if not is_scalar(pair[0]))
        scalars = tuple(pair for pair in monomial if is_scalar(pair[0]))
        term = Polynomial(frozenset(((scalars, coefficient),)))
        found[tensors] = found[tensors] + term if tensors in found else term
    return found
