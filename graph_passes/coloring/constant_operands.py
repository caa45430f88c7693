"""Products with what was written by hand: windows, stencils, frequencies, triangles; and counts.

What such a constant makes of a tensor is a difference, an angle or a count. It is off where the
tensor was rounded, or the result:

    E[x * x] - E[x] * E[x]        variances in a window, as of SSIM: negative, then NaN
    D x  with rows [1, -2, 1]     second differences: a rounding is larger than what is left
    positions x frequencies       angles: beyond 256 their sines are any number
    one_hot(a)^T one_hot(b)       counts: beyond 256 bfloat16 has not all of them

Whole numbers are casts and constants, and what comparisons select, roundings give, and sums and
products of such leave whole: but for weights and values of a network, of which layers of few bits
make theirs. Sums of data by classes, `one_hot(a)^T x`, as of which k-means makes its centers, count
likewise, where neither weights nor a product come in; a row picked by `one_hot(a) x` is a layer.

So a product with a constant stays float32, and so do its gradients, which read the constant too,
and what lies between the last products and its operands. Weights are constants in a graph that has
no variables but of whole numbers: there a constant must have few values, or be made in the graph.
Where what it gives goes on to the next product of a network, as from a blur before a convolution,
it is a layer. A constant of one value, as the gradient of a mean is, counts in convolutions alone:
it is a window there.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.coloring.state import ALLOW, CLEAR, Coloring
from graph_passes.coloring.ways import (
    ADDITIONS,
    DIAGONALS,
    MOST_NEAR,
    VARIABLES,
    Ways,
    is_turned,
    terms,
    what_is_before,
)
from graph_passes.ir.adjacency import walk
from graph_passes.ir.constants import Constant, Constants, shape_of, stored_floats
from graph_passes.ir.graph_view import FLOAT, GraphView
from graph_passes.ops.node_types import NodeType
from graph_passes.ops.reasons import Reason
from graph_passes.policy.op_classes import ops_of
from graph_passes.rewriter.matcher import SIZES

MOST_OPS = 256
"""Of which a constant is made."""
FEW_VALUES = 9
"""A matrix of three by three has as many. Weights have more, stencils and triangles have fewer."""

_LARGE = 1 << 18
"""Elements of what nobody has written by hand."""
_ENDS = 256
_ROUNDS = 8
_MAKE_VALUES = ("Cumsum", "LinSpace", "MatrixBandPart", "OneHot", "Range")
_WHOLE = (
    *(types_pb2.DT_BOOL, types_pb2.DT_UINT8, types_pb2.DT_INT8),
    *(types_pb2.DT_INT16, types_pb2.DT_INT32, types_pb2.DT_INT64),
)
_ROUNDINGS = ops_of("roundings")
_SELECTIONS = ("Select", "SelectV2")
_MAKE_WHOLE = _ROUNDINGS.union(("OneHot", "OnesLike", "ZerosLike"))
_COUNTED = _ROUNDINGS.union((*_SELECTIONS, "Cast", "OneHot"))
_STAY_WHOLE = ADDITIONS.union(("Mul", "Square"))
_PARTS_OF_LAYERS = ("Add", "AddV2", "BiasAdd", "FusedBatchNormV3", "FusedBatchNormGradV3")


class _Kind(enum.Enum):
    EVEN = enum.auto()  # of one value
    FEW = enum.auto()  # of few values
    MADE = enum.auto()  # in the graph
    STORED = enum.auto()  # of many values


def keep_constant_operands(coloring: Coloring) -> None:
    """Keeps products with constants and those that count, with what they read, in float32."""
    search = _Search(coloring)
    kept = search.counts() | search.with_constants()
    before = [what_is_before(coloring, product) for product in sorted(kept)]
    coloring.block(sorted(kept.union(*before)), Reason.CONSTANT_OPERAND)


class _Search:
    def __init__(self, coloring: Coloring) -> None:
        self._codes, self._view, self._edges = coloring.list_codes, coloring.view, coloring.edges
        ways = Ways(coloring)
        self._arguments, self._origin = coloring.constants, ways.origin
        starts = filter(coloring.eligible.__getitem__, ways.products())
        self._operands = {vertex: self._read(vertex) for vertex in starts}

    def counts(self) -> set[int]:
        """The products of whole numbers that add up, and those that add up data by classes."""
        has_classes = not self._view.ops.isdisjoint(("Equal", "OneHot"))
        return {
            product
            for product, operands in self._operands.items()
            if len(operands) > 1
            and (
                self._are_whole(operands) or (has_classes and self._sums_classes(product, operands))
            )
            and terms(self._view, self._view.vertex_nodes[product]) > 1
        }

    def with_constants(self) -> set[int]:
        """The products with constants that are no layers of a network."""
        constants = _Constants(self._view, self._edges.producers, self._arguments)
        groups: dict[tuple[int, _Kind], set[int]] = {}
        for product, operands in self._operands.items():
            for operand in operands:
                kind = constants.kind(operand)
                if kind is None:
                    constants.others.add(product)
                elif kind is not _Kind.EVEN or "Conv" in self._view.op_of(product):
                    groups.setdefault((self._origin(operand), kind), set()).add(product)
        # What counts, or holds the state of a generator, is no weight.
        if all(map(self._is_whole_variable, self._view.of_op(*VARIABLES))):
            groups = {key: group for key, group in groups.items() if key[1] is not _Kind.STORED}
        sure = {v for (_, kind), group in groups.items() if kind is not _Kind.STORED for v in group}
        kept = set[int]()
        for (_, kind), group in groups.items():
            may_be_data = kind in (_Kind.MADE, _Kind.STORED)
            is_data = may_be_data and any(map(self._reads_weights, group))
            if not is_data and not all(self._is_layer(product, sure) for product in group):
                kept |= group
        return kept

    def _read(self, product: int) -> list[int]:
        """What may be the constant of a product; of a convolution that is the filter."""
        number, op = self._view.vertex_nodes[product], self._view.op_of(product)
        if "BackpropFilter" in op:
            return []
        read = self._view.producers(number)
        return read[1:2] if "Conv" in op else read

    def _is_whole_variable(self, number: int) -> bool:
        return self._view.attr(number, "dtype").type in _WHOLE

    def _reads_weights(self, product: int) -> bool:
        makers = map(self._origin, self._operands[product])
        return any(self._view.op_of(maker) in VARIABLES for maker in makers)

    def _is_layer(self, product: int, with_constants: set[int]) -> bool:
        """Whether what a product gives goes on to one of a network."""

        def goes_on(vertex: int) -> bool:
            is_part = self._view.op_of(vertex) in _PARTS_OF_LAYERS
            return vertex == product or is_part or bool(self._codes[vertex] == CLEAR)

        behind = islice(walk([product], self._edges.readers, goes_on), 1, MOST_NEAR)
        return any(self._codes[v] == ALLOW and v not in with_constants for v in behind)

    def _are_whole(self, vertices: Sequence[int]) -> bool:
        """Whether tensors are made of whole numbers, by what leaves them whole, and not of ones."""
        counts = False
        whole = walk(vertices, self._edges.producers, self._stays_whole)
        for place, vertex in enumerate(whole, 1):
            if place == MOST_NEAR or not self._may_be_whole(vertex):
                return False
            counts = counts or self._view.op_of(vertex) in _COUNTED
        return counts

    def _stays_whole(self, vertex: int) -> bool:
        """Whether a tensor is whole where what it is made of is."""
        op, clear = self._view.op_of(vertex), self._codes[vertex] == CLEAR
        return op in _STAY_WHOLE or bool(clear and op not in _MAKE_WHOLE)

    def _may_be_whole(self, vertex: int) -> bool:
        op, node = self._view.op_of(vertex), self._view.node_of(vertex)
        if op in _ROUNDINGS or op in _SELECTIONS:
            return not self._is_quantized(vertex)
        if op == "Const":
            value = node.attr.get("value")
            stored = np.asarray(() if value is None else stored_floats(value.tensor))
            return value is not None and bool((stored == np.rint(stored)).all())
        is_cast = op == "Cast" and node.attr["SrcT"].type in _WHOLE
        is_made_of_whole = self._stays_whole(vertex) and bool(self._edges.producers(vertex))
        return is_cast or op in _MAKE_WHOLE or is_made_of_whole

    def _is_quantized(self, vertex: int) -> bool:
        """Whether a layer of few bits makes this of its weights, or of what a product gave."""

        def back(vertex: int) -> Sequence[int]:
            number = self._view.vertex_nodes[vertex]
            return () if self._codes[vertex] == ALLOW else self._view.producers(number)

        found = list(islice(walk([vertex], back), MOST_OPS))
        rounds = self._view.op_of(vertex) in _ROUNDINGS
        return len(found) == MOST_OPS or any(
            self._view.op_of(v) in VARIABLES or (rounds and self._codes[v] == ALLOW) for v in found
        )

    def _sums_classes(self, product: int, operands: Sequence[int]) -> bool:
        """Whether one operand says of which class each row of the other is, which is data."""
        first, second = operands[:2]
        return (self._has_classes(product, 0, first) and self._is_data(second)) or (
            self._has_classes(product, 1, second) and self._is_data(first)
        )

    def _has_classes(self, product: int, side: int, operand: int) -> bool:
        """Whether an operand says of which class each row is, and rows are added up."""
        *moved, start = walk([operand], self._moved)
        made, node = self._view.node_of(start), self._view.node_of(product)
        if made.op == "Cast":
            numbers = self._view.makers(self._view.vertex_nodes[start])
            return [self._view.nodes[n].op for n in numbers if n >= 0] == ["Equal"]
        if made.op != "OneHot" or made.attr["axis"].i != -1:
            return False
        turns = sum(self._view.op_of(vertex) == "Transpose" for vertex in moved)
        if "equation" in node.attr:
            operands, _, result = node.attr["equation"].s.partition(b"->")
            return not turns and operands.split(b",")[side].strip()[-1:] in result
        turned = is_turned(self._view, self._view.vertex_nodes[product], side)
        return (turns + side + turned) % 2 == 1

    def _moved(self, vertex: int) -> Sequence[int]:
        makers = self._edges.producers(vertex) if self._codes[vertex] == CLEAR else ()
        return makers if len(makers) == 1 and self._view.op_of(vertex) not in _MAKE_WHOLE else ()

    def _is_data(self, vertex: int) -> bool:
        """Whether a tensor is made without weights and products."""
        found = list(islice(walk([vertex], self._edges.producers), MOST_OPS))
        return len(found) < MOST_OPS and not any(
            self._codes[v] == ALLOW or self._view.op_of(v) in VARIABLES for v in found
        )


class _Constants:
    """Which tensors are made of constants alone.

    Attributes:
        others: products that are known to be made of more.
    """

    def __init__(
        self, view: GraphView, producers: Callable[[int], Sequence[int]], arguments: Constants
    ) -> None:
        self._view, self._producers = view, producers
        self._arguments = {view.base[view.index[name]]: arguments[name] for name in arguments}
        may = view.per_slot(_may_be_constant, bool)
        may[list(self._arguments)] = True
        for _ in range(_ROUNDS):  # which leaves little to walk through
            may[view.targets[~may[view.sources]]] = False
        self._may_be = may.tobytes()
        self._known: dict[int, _Kind | None] = {}
        self.others = set[int]()

    def kind(self, vertex: int) -> _Kind | None:
        """What kind of constant a tensor is, None for none."""
        if vertex not in self._known:
            self._known[vertex] = self._find_kind(vertex)
        return self._known[vertex]

    def _find_kind(self, start: int) -> _Kind | None:
        found = []
        for vertex in walk([start], self._made_of):
            found.append(vertex)
            if len(found) > MOST_OPS or not self._may_be[vertex] or vertex in self.others:
                return None
        view = self._view
        floats = [vertex for vertex in found if view.dtypes[vertex] == FLOAT]
        nodes = [*map(view.node_of, floats)]
        values = max(map(_values, filter(None, map(self._stored, floats))), default=0)
        casts = any(node.op == "Cast" and view.shape(node.name) for node in nodes)
        ranges = any(view.op_of(vertex) == "Range" for vertex in found)
        if values > FEW_VALUES or (casts and not ranges):
            return _Kind.STORED
        ops = {node.op for node in nodes}
        is_sum = not ops.isdisjoint(DIAGONALS) and not ops.isdisjoint(ADDITIONS)
        if casts or is_sum or not ops.isdisjoint(_MAKE_VALUES):
            return _Kind.MADE
        return _Kind.FEW if values > 1 else _Kind.EVEN

    def _stored(self, vertex: int) -> Constant | None:
        """What is constant from the outset, None for what an op makes."""
        value = self._view.node_of(vertex).attr.get("value")  # [] would write to a map without it
        if value is None or self._view.op_of(vertex) != "Const":
            return self._arguments.get(vertex)
        return Constant(shape_of(value.tensor), functools.partial(stored_floats, value.tensor))

    def _made_of(self, vertex: int) -> Sequence[int]:
        if self._view.op_of(vertex) in SIZES:
            return ()
        number = self._view.vertex_nodes[vertex]
        if self._view.node_type(number).is_inlined_call:  # what enters it there, and each round
            return self._producers(vertex)
        return self._view.producers(number)


def _may_be_constant(node_type: NodeType) -> list[bool]:
    """For each slot whether it may hold what is made of constants."""
    if node_type.is_inlined_call:
        return [dtype == FLOAT for dtype in node_type.dtypes]
    is_pure = node_type.op_type is not None and node_type.op_type.is_pure
    is_made = bool(node_type.layout.in_slots) or node_type.op == "Const"
    return [is_pure and is_made] * len(node_type.dtypes)


def _values(constant: Constant) -> int:
    """How many values a constant has at its ends: those of weights are many there."""
    sizes = constant.shape
    if math.prod(sizes) > _LARGE:
        return FEW_VALUES + 1
    stored = np.asarray(constant.read())
    if len(sizes) == 2 and np.count_nonzero(stored) <= min(sizes):
        return 1  # a diagonal moves or scales
    return len({*stored[:_ENDS].tolist(), *stored[-_ENDS:].tolist()})
