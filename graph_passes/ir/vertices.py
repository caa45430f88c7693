"""Numbers the vertices of a graph and joins them by edges, all nodes at once.

What nodes of one type have in common is tabled by type, and NumPy spreads the tables over
the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from graph_passes.ir.indexing import InvalidGraphError, NodeIndex

OPAQUE = 0
"""The vertex that stands for every port of a node whose op type is unknown."""

_NO_OUTPUT = -1


class Vertices:
    """The vertices of a graph: one per slot of a node, in node order, behind `OPAQUE`.

    Attributes:
        base: for each node the number of its first vertex; int32 [nodes].
        owners: for each vertex the node it belongs to, -1 for `OPAQUE`; int32 [vertices].
        slot_numbers: for each vertex the number of its slot among those of all node_types, 0 for
            `OPAQUE`; int32 [vertices].
        dtypes: for each vertex its dtype; int32 [vertices].
    """

    def __init__(self, index: NodeIndex) -> None:
        tables, node_type_of = index.node_types.slot_tables, np.asarray(index.node_type_of)
        counts = np.asarray(tables.counts)[node_type_of]
        self.base = np.cumsum(counts, dtype=np.int32) - counts + 1
        nodes = np.arange(len(counts), dtype=np.int32)
        self.owners = np.concatenate([np.full(1, -1, np.int32), np.repeat(nodes, counts)])
        self.slot_numbers = np.arange(len(self.owners), dtype=np.int32)
        first = np.asarray(tables.first_slots)[node_type_of] - self.base
        self.slot_numbers[1:] += first[self.owners[1:]]
        self.dtypes = np.asarray(tables.dtypes)[self.slot_numbers]


def join_ports(
    index: NodeIndex, vertices: Vertices, aliases: Mapping[int, tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Makes the edges of a graph, by reading node, then by port.

    Args:
        index: what the nodes read.
        vertices: the graph's vertices.
        aliases: number of a node that is another name for what a calling node takes -> number and
            input port of that node.

    Returns:
        For each edge the vertex of the port that makes the tensor, that of the port that reads it,
        and the node that reads it; int32 [edges].

    Raises:
        InvalidGraphError: an input names no tensor, or a node has the wrong number of inputs.
    """
    return _Joiner(index, vertices, aliases).sources(), *_targets(index, vertices)


class _Joiner:
    """Finds the vertices of the tensors that nodes read."""

    def __init__(
        self, index: NodeIndex, vertices: Vertices, aliases: Mapping[int, tuple[int, int]]
    ) -> None:
        self._index = index
        self._base = vertices.base
        self._aliases = aliases

    def sources(self) -> np.ndarray:
        makers = np.asarray(self._index.makers)
        by_reference = makers < 0
        sources = self._first_outputs()[np.maximum(makers, 0)]
        sources[by_reference] = OPAQUE
        if np.any(sources == _NO_OUTPUT):
            name = self._index.name(int(makers[np.argmin(sources)]))
            raise InvalidGraphError(f"node {name!r} has no output 0")
        names, read = list(self._index.references), ~makers[by_reference]
        found = np.zeros(len(names), np.int32)
        for number in sorted(set(read.tolist())):  # of an edited graph not all are read any more
            found[number] = self._find(names[number])
        sources[by_reference] = found[read]
        return sources

    def _first_outputs(self) -> np.ndarray:
        """For each node the vertex of its output 0, or `_NO_OUTPUT`."""
        tables = self._index.node_types.slot_tables
        node_type_of = np.asarray(self._index.node_type_of)
        first = np.asarray(tables.first_outputs)[node_type_of]
        first = np.where(first == _NO_OUTPUT, _NO_OUTPUT, self._base + first)
        first[np.asarray(tables.is_unknown, bool)[node_type_of]] = OPAQUE
        for alias in self._aliases:
            first[alias] = self._taken(alias)
        return first

    def _taken(self, alias: int) -> int:
        """The vertex of the port that an alias is another name for."""
        call, port = self._aliases[alias]
        return int(self._base[call]) + self._index.layout(call).in_slots[port]

    def _find(self, tensor: str) -> int:
        index = self._index
        producer, _, name = tensor.partition(":")
        number = index.numbers.get(producer)
        if number is None:
            raise InvalidGraphError(f"no node makes the tensor {tensor!r}")
        if number in self._aliases:
            return self._taken(number)
        node_type = index.node_type(number)
        if node_type.op_type is None:
            return OPAQUE
        port, out_slots = node_type.layout.port(name), node_type.layout.out_slots
        if not 0 <= port < len(out_slots):
            raise InvalidGraphError(f"node {producer!r} has no output {name!r}")
        return int(self._base[number]) + out_slots[port]


def _targets(index: NodeIndex, vertices: Vertices) -> tuple[np.ndarray, np.ndarray]:
    tables, node_type_of = index.node_types.slot_tables, np.asarray(index.node_type_of)
    arity, expected = np.asarray(index.arity), np.asarray(tables.arities)[node_type_of]
    unknown = np.asarray(tables.is_unknown, bool)[node_type_of]
    wrong = ((arity != expected) & ~unknown).nonzero()[0].tolist()
    if wrong:
        number, op = wrong[0], index.node_type(wrong[0]).op
        raise InvalidGraphError(
            f"node {index.name(number)!r} ({op}) has {arity[number]} inputs, not {expected[number]}"
        )
    first = np.asarray(tables.first_ports)[node_type_of] - index.starts[:-1]
    readers = np.repeat(np.arange(len(arity), dtype=np.int32), arity)
    # Of an unknown op nothing is known of its ports.
    positions = np.where(unknown[readers], 0, first[readers] + np.arange(len(readers)))
    read = vertices.base[readers] + np.asarray(tables.in_slots)[positions]
    return np.where(positions, read, OPAQUE), readers
