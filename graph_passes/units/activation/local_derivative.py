"""Gradients of element-wise functions that are products, such as GELU and swish.

Automatic differentiation of y = h * e, where h and e are made of one tensor x, carries the gradient
dy through either factor by itself, and adds up what comes out:

    dx = dy * e * .. + dy * h * ..

Each step is one more pass over tensors of that size, and all factors are kept from the forward
pass until dy comes. But all of it is linear in dy:

    dx = dy * d    with the local derivative    d = e * .. + h * ..

Nothing of d waits for dy, so that it is made with y and kept in place of the factors. What it is
follows from the steps themselves, by the distributive law: which function y is does not matter.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from graph_passes.ir.adjacency import walk
from graph_passes.ir.graph_view import FLOAT
from graph_passes.rewriter.matcher import ADDS, SUMS, UNARY, Matcher
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.activation import exact_gelu, silu
from graph_passes.units.unit_pass import UnitSearch

RULE = "local-derivative"
_ENDS = ("AddN",)
"""What automatic differentiation adds gradients up with."""
OPS = (*_ENDS, *silu.OPS)

Terms = dict[tuple[str, ...], float]
"""A sum of products: the factors of each with its coefficient."""

_SLOPES = ("TanhGrad", "SigmoidGrad")
"""Ops linear in their second operand, by a factor made of the first; they repeat neither."""
_ELEMENT_WISE = (*UNARY, *ADDS, "Maximum", "Minimum", "Mul", "Pow", "RealDiv", "Sub")
_FREE = ("Identity", "Reshape", "Sum")
"""Ops that a gradient goes through as it is."""
_LINEAR = ("Mul", "Neg", "RealDiv", *SUMS, *_SLOPES, *_FREE)
_MOST_STEPS = 32
"""More than the gradient of any activation has."""


def use_local_derivatives(search: UnitSearch) -> None:
    """Replaces what gradients go through between a product and what both factors are made of."""
    edits, view, m = search.edits, search.edits.view, search.edits.matcher
    origins = _Origins(m)
    if search.knows_times:
        silu.make_derivatives_early(search, RULE)
    for end in view.of_op(*_ENDS):
        if view.dtypes[view.base[end]] != FLOAT:
            continue
        for gradient, by_factor in _product_rules(m, origins, end):
            way = _Way(m, origins, gradient, by_factor)
            if way.end == end and way.is_longer():
                stem = f"{view.names[end]}/local_derivative"
                gelu = _gelu_of(m, way) if search.knows_times else None
                write = exact_gelu.write_with_derivative
                if gelu and edits.propose(RULE, end, write, end, gradient, gelu, stem=stem):
                    break
                if edits.propose(RULE, end, _write, end, way, stem=stem):
                    break


def _product_rules(m: Matcher, origins: _Origins, end: int) -> Iterator[tuple[str, dict[int, str]]]:
    """What is multiplied by several factors of one origin before it is added up.

    Yields:
        The tensor, and the nodes that multiply it, each with its factor.
    """
    behind = walk([end], lambda n: [maker for maker in m.makers(n) if m.op(maker) in _LINEAR])
    products: dict[str, dict[int, str]] = defaultdict(dict)
    for number in itertools.islice(behind, _MOST_STEPS):
        if m.op(number) == "Mul":
            for tensor, factor in itertools.permutations(m.inputs(number)):
                products[tensor][number] = factor
    for tensor, by_factor in products.items():
        factors = set(by_factor.values())
        if len(factors) > 1 and len({*map(origins.of, factors)}) == 1:
            yield tensor, by_factor


class _Origins:
    """Tells tensors that have one shape whatever it is, since they are made of one tensor."""

    def __init__(self, m: Matcher) -> None:
        self._m = m
        self._found: dict[str, str] = {}

    def of(self, tensor: str, most: int = _MOST_STEPS) -> str:
        """The tensor that one is made of by ops that keep its shape; itself where it is of none.

        Args:
            tensor: the one.
            most: how many of them in a row are looked through.
        """
        if tensor in self._found or not most:
            return self._found.get(tensor, tensor)
        origins = {self.of(each, most - 1) for each in self._made_of(tensor)}
        self._found[tensor] = origins.pop() if len(origins) == 1 else tensor
        return self._found[tensor]

    def _made_of(self, tensor: str) -> list[str]:
        """What an element-wise op reads, if that has as many axes as what it makes."""
        m = self._m
        read = _operands(m, m.maker(tensor))
        shapes = [m.shape_of(t) for t in (tensor, *read)]
        ranks = {-1 if shape is None else len(shape) for shape in shapes}
        return read if len(ranks) == 1 and -1 not in ranks else []


class _Way:
    """What the gradient of a product goes through until its parts are added up.

    Attributes:
        gradient: what flows in.
        terms: for each node on the way what it multiplies that by.
        slopes: tensors that ops of `_SLOPES` make on the way -> the op and its second operand.
        end: the first node in which parts come together; None where there is none.
        result: what the way as a whole multiplies the gradient by.
    """

    def __init__(
        self, m: Matcher, origins: _Origins, gradient: str, by_factor: Mapping[int, str]
    ) -> None:
        self.gradient = gradient
        self.terms: dict[int, Terms] = {n: {(factor,): 1.0} for n, factor in by_factor.items()}
        self.slopes: dict[str, tuple[int, Terms]] = {}
        self.end: int | None = None
        self.result: Terms = {}
        self._m, self._origins = m, origins
        factor = next(iter(by_factor.values()))
        self._origin, self._axes = origins.of(factor), len(m.shape_of(factor) or ())
        pending = [*self.terms]
        for passed in pending:  # grows as it goes
            for reader in m.readers(passed):
                terms = None if reader in self.terms else self._through(reader)
                if terms and len(terms) < _MOST_STEPS:
                    self.terms[reader] = terms
                    pending.append(reader)
                    if m.op(reader) in _ENDS:
                        self.end, self.result = reader, terms
                        return
            if len(pending) > _MOST_STEPS:
                return

    def is_longer(self) -> bool:
        """Whether it has more nodes that work on all elements than what takes its place."""
        inner = [terms for _, terms in self.slopes.values()]
        written = sum(map(_passes, (self.result, *inner))) + len(inner) + 1
        return written < sum(self._m.op(number) not in _FREE for number in self.terms)

    def _through(self, number: int) -> Terms | None:
        """What a further node multiplies the gradient by; None where it is not linear in it."""
        m, op, inputs = self._m, self._m.op(number), self._m.inputs(number)
        parts = [self.terms.get(maker) for maker in m.makers(number)]
        passed = [terms for terms in parts if terms is not None]
        if op in SUMS:
            return _added((terms, 1.0) for terms in passed) if None not in parts else None
        if op == "Neg":
            return _added([(passed[0], -1.0)])
        if op == "Mul" and len(passed) == 1:
            factor = inputs[parts.index(None)]
            value = self._number(factor)
            if value is not None:
                return _added([(passed[0], value)])
            return {(*key, factor): coefficient for key, coefficient in passed[0].items()}
        if op == "RealDiv":
            value = self._number(inputs[1])
            return _added([(passed[0], 1 / value)]) if value else None
        if op in _SLOPES:
            return self._with_slope(number, parts)
        return passed[0] if self._hands_on(number, op) else None

    def _number(self, tensor: str) -> float | None:
        """The value of a constant that adds no axes, None of another tensor."""
        value = self._m.scalar(tensor)
        return None if value is None or self._m.constant(tensor).ndim > self._axes else value

    def _with_slope(self, number: int, parts: list[Terms | None]) -> Terms | None:
        terms = parts[1]
        read = [self._m.tensor(number, 0), *itertools.chain.from_iterable(terms or ())]
        if not terms or {*map(self._origins.of, read)} != {self._origin}:
            return None
        # A number is better multiplied where others are.
        common = next(iter(terms.values())) if len(terms) == 1 else 1.0
        own = self._m.output(number)
        self.slopes[own] = number, {key: c / common for key, c in terms.items()}
        return {(own,): common}

    def _hands_on(self, number: int, op: str) -> bool:
        """Whether a node gives its first operand as it is, provided that the graph runs at all.

        What is on the way has been multiplied by a factor: it is nowhere shorter. If it can be
        reshaped to the shape of the factor, then it has that shape.
        """
        m = self._m
        if op == "Reshape":
            before, after = m.shape_of(m.tensor(number, 0)), m.shape(number)
            known = before is not None and after is not None and len(before) == len(after)
            return known and self._is_shape(m.source(number, 1))
        if op == "Sum" and m.op(m.source(number, 1)) == "BroadcastGradientArgs":
            shapes = m.makers(m.source(number, 1))
            own = shapes[m.view.split(m.tensor(number, 1))[1]]
            return self._is_shape(own) and all(
                self._is_shape(shape) or m.shape(shape) == (0,) for shape in shapes
            )
        return op == "Identity"

    def _is_shape(self, number: int) -> bool:
        """Whether a node gives the shape that all factors have."""
        m = self._m
        return m.op(number) == "Shape" and self._origins.of(m.tensor(number, 0)) == self._origin


def _operands(m: Matcher, number: int) -> list[str]:
    """What an element-wise op reads besides numbers; [] of other ops."""
    if m.op(number) not in _ELEMENT_WISE:
        return []
    return [tensor for tensor in m.inputs(number) if m.scalar(tensor) is None]


def _added(parts: Iterable[tuple[Terms, float]]) -> Terms:
    total: Terms = {}
    for terms, scale in parts:
        for key, coefficient in terms.items():
            total[key] = total.get(key, 0.0) + scale * coefficient
    return total


def _passes(terms: Terms) -> int:
    """How many nodes make a sum of products."""
    products = sum(len(key) - 1 + (coefficient != 1.0) for key, coefficient in terms.items())
    return products + (len(terms) > 1)


def _gelu_of(m: Matcher, way: _Way) -> exact_gelu.ExactGelu | None:
    """The GELU whose derivative a way is, None where it is none."""
    factors = sorted({m.maker(tensor) for terms in way.result for tensor in terms})
    behind = walk(factors, lambda n: [m.maker(tensor) for tensor in _operands(m, n)])
    for number in itertools.islice(behind, _MOST_STEPS):
        gelu = exact_gelu.find_gelu(m, number) if m.op(number) in exact_gelu.ERFS else None
        if gelu is not None and gelu.is_derivative(way.result):
            return gelu
    return None


def _write(new: Replacement, end: int, way: _Way) -> None:
    derivative = _Writer(new, way).sum_of(way.result)
    new.replace(end, new.op.Mul(way.gradient, derivative, name="dx"))


class _Writer:
    """Writes a local derivative."""

    def __init__(self, new: Replacement, way: _Way) -> None:
        self._new, self._way = new, way
        self._written: dict[str, str] = {}

    def sum_of(self, terms: Terms) -> str:
        """Adds the nodes that make a sum of products, and returns the tensor."""
        new = self._new
        tensors = [self._product(key, coefficient) for key, coefficient in terms.items()]
        if len(tensors) > 2 and len({new.fact(tensor).shape for tensor in tensors}) == 1:
            return new.op.AddN(*tensors)  # which takes one shape alone
        return functools.reduce(functools.partial(new.add, "AddV2"), tensors)

    def _product(self, key: tuple[str, ...], coefficient: float) -> str:
        product, *others = [self._factor(tensor) for tensor in key]
        for factor in others:
            product = self._new.op.Mul(product, factor)
        if coefficient == 1.0:
            return product
        constant = self._new.constant(coefficient, name="coefficient", beside=key[0])
        return self._new.op.Mul(product, constant)

    def _factor(self, tensor: str) -> str:
        if tensor not in self._written:
            slope = self._way.slopes.get(tensor)
            if slope is None:
                self._written[tensor] = self._unawaited(tensor)
            else:
                number, terms = slope
                value = self._unawaited(self._new.matcher.tensor(number, 0))
                op = self._new.matcher.op(number)
                self._written[tensor] = self._new.add(op, value, self.sum_of(terms))
        return self._written[tensor]

    def _unawaited(self, tensor: str) -> str:
        """A tensor, made anew where one of the ops that make it waits for the gradient.

        Automatic differentiation has it wait so that less is kept; a local derivative made at once
        keeps less still.
        """
        m, steps = self._new.matcher, [self._new.matcher.maker(tensor)]
        while not self._waits(steps[-1]):
            read = _operands(m, steps[-1])
            if len(read) != 1 or len(steps) == _MOST_STEPS:
                return tensor
            steps.append(m.maker(read[0]))
        made = self._copy(steps.pop(), None)
        while steps:
            made = self._copy(steps.pop(), made)
        return made

    def _copy(self, number: int, value: str | None) -> str:
        """A node made anew that waits for nothing, with another tensor in place of its operand."""
        new, m, inputs = self._new, self._new.matcher, []
        for tensor in new.inputs_of(number):
            if m.scalar(tensor) is None:
                inputs.append(value or tensor)
            elif self._waits(m.maker(tensor)):
                inputs.append(new.constant(m.constant(tensor), name="constant", beside=tensor))
            else:
                inputs.append(tensor)
        made = new.copy(m.node(number), *inputs, name=m.op(number))
        listed = new.accepted.node_lists.get(m.node(number).name)
        if listed is not None:
            new.node_lists[new.makers[made].name] = listed
        return made

    def _waits(self, number: int) -> bool:
        """Whether a node, or a number that it reads, waits for the gradient."""
        view, m = self._new.view, self._new.matcher
        numbers = [maker for maker in m.makers(number) if m.op(maker) == "Const"]
        awaited = [name for n in (number, *numbers) for name in view.waits.get(n, ())]
        return any(view.index[name] in self._way.terms for name in awaited)
