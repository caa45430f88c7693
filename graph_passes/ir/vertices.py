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
_ONE = np.ones(1, np.int32)


class Vertices:
    """The vertices of a graph: one per slot of a node, in node order, behind `OPAQUE`.

    Attributes:
        base: for each node the number of its first vertex; int32 [nodes].
        owners: for each vertex the node it belongs to, -1 for `OPAQUE`; int32 [vertices].
        slot_numbers: for each vertex the number of its slot among those of all node_types, 0 for
            `OPAQUE`; int32 [vertices].
        dtypes: for each vertex its dtype; int32 [vertices].
        outputs: for each node the vertex of its output 0, -1 without an output; int32 [nodes].
        arities: for each node how many inputs its type has, -1 of an unknown op; int32 [nodes].
        ports: for each node the number of its input 0 in `SlotTables.in_slots`; int32 [nodes].
    """

    def __init__(self, index: NodeIndex) -> None:
        tables = index.node_types.slot_tables
        counts, outputs, self.arities, slots, self.ports = tables.rows(index.node_type_of)
        self.base = counts.cumsum(dtype=np.int32) - counts + 1
        numbers = np.arange(-1, len(counts), dtype=np.int32)
        self.owners = numbers.repeat(np.concatenate((_ONE, counts)))
        self.slot_numbers = np.arange(len(self.owners), dtype=np.int32)
        self.slot_numbers[1:] += (slots - self.base)[self.owners[1:]]
        self.dtypes = np.asarray(tables.dtypes)[self.slot_numbers]
        self.outputs = np.where(outputs == _NO_OUTPUT, _NO_OUTPUT, self.base + outputs)
        self.outputs[self.arities < 0] = OPAQUE


def join_ports(
    index: NodeIndex, vertices: Vertices, aliases: Mapping[int, tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Makes the edges of a graph, by reading node, then by port; for aliases see `GraphView`.

    Returns:
        For each edge the vertex of the port that makes the tensor, that of the port that reads it,
        and the node that reads it; int32 [edges].

    Raises:
        InvalidGraphError: an input names no tensor, or a node has the wrong number of inputs.
    """
    sources = _sources(index, vertices, aliases)
    arity, expected = np.asarray(index.arity), vertices.arities
    unknown = expected < 0
    wrong = ((arity != expected) & ~unknown).nonzero()[0].tolist()
    if wrong:
        number, op = wrong[0], index.node_type(wrong[0]).op
        raise InvalidGraphError(
            f"node {index.name(number)!r} ({op}) has {arity[number]} inputs, not {expected[number]}"
        )
    readers = np.arange(len(arity), dtype=np.int32).repeat(arity)
    positions = (vertices.ports - index.starts[:-1])[readers] + np.arange(len(readers))
    positions[unknown[readers]] = 0  # nothing is known of its ports
    in_slots = np.asarray(index.node_types.slot_tables.in_slots)
    read = vertices.base[readers] + in_slots[positions]
    return sources, np.where(positions, read, OPAQUE), readers


def _sources(
    index: NodeIndex, vertices: Vertices, aliases: Mapping[int, tuple[int, int]]
) -> np.ndarray:
    base, first = vertices.base, vertices.outputs
    for alias, (call, port) in aliases.items():
        first[alias] = int(base[call]) + index.node_type(call).layout.in_slots[port]

    def find(tensor: str) -> int:
        producer, _, name = tensor.partition(":")
        number = index.numbers.get(producer)
        if number is None:
            raise InvalidGraphError(f"no node makes the tensor {tensor!r}")
        node_type = index.node_type(number)
        if number in aliases or node_type.op_type is None:
            return int(first[number])
        port, out_slots = node_type.layout.port(name), node_type.layout.out_slots
        if not 0 <= port < len(out_slots):
            raise InvalidGraphError(f"node {producer!r} has no output {name!r}")
        return int(base[number]) + out_slots[port]

    makers = np.asarray(index.makers)
    by_reference = makers < 0
    sources = first[np.maximum(makers, 0)]
    sources[by_reference] = OPAQUE
    if (sources == _NO_OUTPUT).any():
        name = index.name(int(makers[np.argmin(sources)]))
        raise InvalidGraphError(f"node {name!r} has no output 0")
    names, read = list(index.references), ~makers[by_reference]
    found = np.zeros(len(names), np.int32)
    for number in sorted(set(read.tolist())):  # of an edited graph not all are read any more
        found[number] = find(names[number])
    sources[by_reference] = found[read]
    return sources
