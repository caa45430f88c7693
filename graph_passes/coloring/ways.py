"""Ways that values take: what hands them on, where they come from, and steps of linear algebra.

A tensor is handed on by an op of the clear list, which moves or picks its values, and by one that
scales them: by a single number or by what is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import islice

import numpy as np

from graph_passes.coloring.state import ALLOW, CLEAR, INFER, Coloring
from graph_passes.ir.adjacency import walk
from graph_passes.ir.constants import shape_of, stored_floats
from graph_passes.ir.graph_view import GraphView
from graph_passes.policy.op_classes import ops_of
from graph_passes.units.reduction.ones_product import is_ones_product

MATRIX_PRODUCTS, ADDITIONS = ops_of("matrix_products"), ops_of("additions")
SCALINGS, SQUARES = ops_of("scalings"), ops_of("squares")
DIAGONALS, VARIABLES = ops_of("diagonals"), ops_of("variables")

MOST_NEAR = 64
"""Ops between what is looked for and what it is looked for from."""
_MOST_MET = 24
"""Between a product and what it meets: many products may be terms of one sum, and look at all."""

_FEW = 4096
"""Numbers of a constant that are looked at: weights are more."""

_ACTIVATIONS = ("Abs", "Clip", "Max", "Min", "Relu")
"""What the names of ops begin with that the lists call clear too."""


class Ways:
    """Follows the values of one graph's float32 tensors, by the vertices that make them.

    Attributes:
        makers: gives what a vertex reads.
        readers: gives what reads a vertex.
        op_of: gives the op of a vertex.
    """

    def __init__(self, coloring: Coloring) -> None:
        self._codes, self._view = coloring.list_codes, coloring.view
        self.makers, self.readers = coloring.edges.producers, coloring.edges.readers
        self.op_of = coloring.view.op_of
        self._origins: dict[int, int] = {}
        self._reads: dict[int, int] = {}  # a variable -> the read of it that stands for all

    def products(self) -> list[int]:
        """The vertices of the allow list, but for products with ones, which are sums."""
        names, owners = self._view.names, self._view.vertex_nodes
        allowed = np.flatnonzero(self._codes == ALLOW).tolist()
        return [vertex for vertex in allowed if not is_ones_product(names[owners[vertex]])]

    def hands_on(self, vertex: int) -> bool:
        """Whether an op gives the values of a tensor, moved or scaled."""
        if self.op_of(vertex) in SCALINGS:
            return any(map(self._is_number, self.makers(vertex)))
        return bool(self._codes[vertex] == CLEAR)

    def handed(self, vertex: int) -> Sequence[int]:
        """What an op moves or scales, without the number that it scales by."""
        if self.op_of(vertex) in SCALINGS:
            makers = self.makers(vertex)
            factors = [v for v in makers if not self._is_number(v)]
            return factors if len(factors) < len(makers) else ()
        return self.makers(vertex) if self._codes[vertex] == CLEAR else ()

    def origin(self, vertex: int) -> int:
        """Where a tensor comes from, moved or scaled; one vertex for all reads of a variable."""
        if vertex not in self._origins:
            *_, origin = islice(walk([vertex], self._one_handed), MOST_NEAR)
            self._origins[vertex] = self.one_read(origin)
        return self._origins[vertex]

    def one_read(self, vertex: int) -> int:
        """A vertex, or for a read of a variable the one that stands for all reads of it."""
        if self.op_of(vertex) != "ReadVariableOp":
            return vertex
        return self._reads.setdefault(
            self._view.producers(self._view.vertex_nodes[vertex])[0], vertex
        )

    def origins(self, vertex: int) -> set[int]:
        """Where what a vertex reads comes from."""
        return {*map(self.origin, self.makers(vertex))}

    def multiplies_itself(self, vertex: int) -> bool:
        """Whether an op reads one tensor twice, moved or scaled."""
        return len(self.makers(vertex)) > 1 and len(self.origins(vertex)) == 1

    def met(self, vertex: int, ops: Set[str]) -> tuple[list[int], set[int]]:
        """What a vertex is handed on by, itself first, and those of some ops that read it there."""
        way = near([vertex], lambda v: filter(self.hands_on, self.readers(v)))
        return way, {r for v in way for r in self.readers(v) if self.op_of(r) in ops}

    def _one_handed(self, vertex: int) -> Sequence[int]:
        makers = self.handed(vertex)
        return makers if len(makers) == 1 else ()

    def _is_number(self, vertex: int) -> bool:
        """Whether a tensor is a single number, or stored."""
        is_stored = self.op_of(vertex) == "Const"
        return is_stored or self._view.shape(self._view.node_of(vertex).name) == ()


def near(starts: Iterable[int], steps: Callable[[int], Iterable[int]]) -> list[int]:
    """Some vertices and what steps lead to from them, as many as are looked at of what is met."""
    few = walk(starts, lambda vertex: islice(steps(vertex), _MOST_MET))
    return list(islice(few, _MOST_MET))


def stored_numbers(
    coloring: Coloring, readers: np.ndarray
) -> Iterator[tuple[int, Sequence[float] | np.ndarray]]:
    """What some vertices read of few stored or captured numbers; one may stand for all."""
    view = coloring.view
    is_read = np.zeros(len(view.dtypes), bool)
    is_read[view.sources[readers[view.targets]]] = True
    for number, tensor in view.float_constants(is_read):
        if math.prod(shape_of(tensor)) <= _FEW:
            yield view.base[number], stored_floats(tensor)
    for name, constant in coloring.constants.items():
        vertex = view.base[view.index[name]]
        if is_read[vertex] and view.is_float[vertex] and math.prod(constant.shape) <= _FEW:
            yield vertex, constant.read()


def what_is_before(coloring: Coloring, vertex: int) -> list[int]:
    """The infer and clear vertices between the last products and one; none if they are many."""
    codes, producers = coloring.list_codes, coloring.edges.producers

    def makers(vertex: int) -> list[int]:
        return [maker for maker in producers(vertex) if codes[maker] in (INFER, CLEAR)]

    found = list(islice(walk([vertex], makers), 1, MOST_NEAR))
    return found if len(found) < MOST_NEAR - 1 else []


def moves(coloring: Coloring) -> np.ndarray:
    """The vertices that hand values on and are no activations; bool [vertices]."""
    activates = coloring.view.is_vertex_of(lambda node_type: node_type.op.startswith(_ACTIVATIONS))
    return (coloring.list_codes == CLEAR) & ~activates


def linear(coloring: Coloring, others: np.ndarray) -> np.ndarray:
    """The vertices that add or scale by a single number, and others; bool [vertices]."""
    view = coloring.view
    found = (coloring.has_op(ADDITIONS | SCALINGS) | others) & view.is_float
    for number in view.of_op(*SCALINGS):
        if () not in [view.shape(name) for name in view.nodes[number].input if name[0] != "^"]:
            found[view.base[number]] = False
    return found


def is_turned(view: GraphView, product: int, side: int) -> bool:
    """Whether a product, a node by number, transposes its first or second operand."""
    names = (("transpose_a", "adj_x"), ("transpose_b", "adj_y"))[side]
    return any(view.attr(product, name).b for name in names)


def terms(view: GraphView, product: int) -> float:
    """How many numbers a matrix product, a node by number, adds up for each that it makes.

    Infinity where that is not known, 0 of an outer product.
    """
    equation = view.attr(product, "equation").s.decode()
    if not equation:
        left, right = (is_turned(view, product, side) for side in (0, 1))
        equation = f"...{'ki' if left else 'ik'},...{'jk' if right else 'kj'}->...ij"
    read, _, made = equation.partition("->")
    lengths = dict.fromkeys({*read} - {*made, *".,"}, math.inf)
    # Behind the operands come control inputs.
    for axes, name in zip(read.split(","), view.nodes[product].input, strict=False):
        shape, (first, _, last) = view.shape(name), axes.partition("...")
        if shape is not None:
            sizes = (*shape[: len(first)], *shape[len(shape) - len(last) :])
            for axis, size in zip(first + last, sizes, strict=True):
                if axis in lengths and size is not None:
                    lengths[axis] = size
    return math.prod(lengths.values()) if lengths else 0
