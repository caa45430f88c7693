"""What the painting stages read and write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from graph_passes.adjacency import Adjacency
from graph_passes.config import PrecisionConfig
from graph_passes.kernels import KernelSupport
from graph_passes.op_lists import FLOAT32, LIST_NAMES, OpLists
from graph_passes.reasons import Reason
from graph_passes.view import FLOAT, GraphView

ALLOW, INFER, CLEAR, DENY = (LIST_NAMES.index(name) + 1 for name in LIST_NAMES)
"""List codes in `Canvas.listed`; 0 is a vertex on no list."""


class Canvas:
    """One graph being painted.

    Attributes:
        view: the graph.
        config: what the caller chose.
        lists: the op lists in force.
        support: answers whether a retyped node has a kernel.
        edges: edges between float32 vertices, implicit tensor-list edges included.
        listed: for each vertex the code of its op's list, 0 for none and for other dtypes;
            uint8 [vertices].
        eligible: for each vertex whether its node may be converted; bool [vertices].
        low: for each vertex 1 where it is to be in the target dtype (the colour ALLOW).
        denied: for each vertex 1 where it has the colour DENY.
        why: for each vertex the code of the reason recorded so far, 0 for none.
        parents: for a vertex behind a denied one, the vertex it was reached from.
    """

    def __init__(
        self,
        view: GraphView,
        config: PrecisionConfig,
        lists: OpLists,
        support: KernelSupport,
        target: int,
        ineligible: Mapping[int, Reason],
    ) -> None:
        self.view = view
        self.config = config
        self.lists = lists
        self.support = support
        self.target = target
        vertices = len(view.dtypes)
        owners = np.array(view.vertex_nodes, np.int64)
        code_of_op = {op: LIST_NAMES.index(row.list_name) + 1 for op, row in lists.entries.items()}
        codes: dict[str, int] = {}
        by_node = np.zeros(len(view.nodes) + 1, np.uint8)
        runs_functions = np.zeros(len(view.nodes) + 1, bool)
        for number, op_type in enumerate(view.op_types):
            if op_type is not None:
                name = op_type.name
                code = codes.get(name)
                if code is None:
                    code = codes[name] = code_of_op.get(name, 0)
                by_node[number] = code
                runs_functions[number] = op_type.runs_functions
        for number in view.joined_calls:  # their functions change with them
            by_node[number] = by_node[number] or CLEAR
            runs_functions[number] = False
        # Index -1 (the opaque vertex) falls on the extra entry, which is on no list.
        self.listed = np.where(view.is_float, by_node[owners], 0).astype(np.uint8)
        allowed = np.ones(len(view.nodes) + 1, bool)
        allowed[-1] = False
        allowed[list(ineligible)] = False
        # A node that runs a function must agree with the function's signature, which is float32.
        bound = runs_functions[owners] & view.is_float
        self.eligible = allowed[owners] & ~bound
        self.edges: Adjacency
        self.low = bytearray(vertices)
        self.denied = bytearray(vertices)
        self.why = bytearray(vertices)
        for vertex in np.flatnonzero(~self.eligible & view.is_float).tolist():
            number = view.vertex_nodes[vertex]
            self.why[vertex] = ineligible.get(number, Reason.RUNS_FUNCTION)
        self.parents: dict[int, int] = {}

    def relist(self, listed: Mapping[str, str]) -> None:
        """Gives single nodes another list than their op has.

        Args:
            listed: name of a node -> the list, or `FLOAT32` for what stays float32 and denies
                nothing outside its unit.
        """
        view = self.view
        for name, list_name in listed.items():
            number = view.index[name]
            first = view.base[number]
            vertices = range(first, first + len(view.layouts[number].slots))
            floats = [vertex for vertex in vertices if view.is_float[vertex]]
            if list_name == FLOAT32:
                self.listed[floats] = 0
                self.block(floats, Reason.INSIDE_UNIT)
            else:
                self.listed[floats] = LIST_NAMES.index(list_name) + 1

    def connect(self, implicit_edges: list[tuple[int, int]]) -> None:
        """Makes the edge tables, with implicit edges between the ends of tensor lists."""
        self.edges = self.view.adjacency(FLOAT, implicit_edges)

    def where(self, mask: np.ndarray) -> list[int]:
        """The vertices of a mask, in order."""
        return np.flatnonzero(mask).tolist()  # type: ignore[no-any-return]

    def paint(self, vertices: Iterable[int], reason: Reason) -> None:
        """Gives vertices the colour ALLOW; the first reason stays."""
        low, why = self.low, self.why
        for vertex in vertices:
            if not low[vertex]:
                low[vertex] = 1
                why[vertex] = reason

    def erase(self, vertices: Iterable[int], reason: Reason) -> None:
        """Takes the colour ALLOW from vertices."""
        for vertex in vertices:
            if self.low[vertex]:
                self.low[vertex] = 0
                self.why[vertex] = reason

    def deny(self, vertices: Iterable[int], reason: Reason) -> None:
        """Gives vertices the colour DENY, which takes the colour ALLOW away."""
        for vertex in vertices:
            self.low[vertex] = 0
            if not self.denied[vertex]:
                self.denied[vertex] = 1
                self.why[vertex] = reason

    def block(self, vertices: Iterable[int], reason: Reason) -> None:
        """Makes vertices ineligible: they stay float32, and nothing follows from it."""
        for vertex in vertices:
            if self.eligible[vertex]:
                self.eligible[vertex] = False
                self.why[vertex] = reason

    def has_kernel(self, vertex: int) -> bool:
        """Whether the vertex's node has a kernel with this slot in the target dtype."""
        number = self.view.vertex_nodes[vertex]
        op_type = self.view.op_types[number]
        return op_type is not None and self.support.has_kernel(
            op_type, self.view.slot_of(vertex), self.view.nodes[number]
        )

    def is_permitted(self, vertex: int) -> bool:
        """Whether the op definition lets the vertex's slot hold the target dtype."""
        op_type = self.view.op_types[self.view.vertex_nodes[vertex]]
        return op_type is not None and op_type.allows(self.view.slot_of(vertex), self.target)
