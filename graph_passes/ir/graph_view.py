"""An index of one graph, made once and read by every stage.

Painting works on *vertices*: one per slot (type attribute) of a node, numbered in node order.
Edges join the vertex of the port that makes a tensor to the vertex of each port that reads it.
`view` makes the index of a GraphDef or the body of a function, `inlining` that of an inlined graph.
"""

from __future__ import annotations

import array
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tensorflow.core.framework import attr_value_pb2, node_def_pb2, tensor_pb2, types_pb2

from graph_passes.ir.adjacency import Adjacency, Neighbours
from graph_passes.ir.indexing import InvalidGraphError, NodeIndex, packed
from graph_passes.ir.vertices import OPAQUE, Vertices, join_ports
from graph_passes.ops.node_types import NodeType
from graph_passes.ops.op_types import Layout, OpType, Slot

Shape = tuple[int | None, ...]
"""A static shape; None stands for a dimension that is not known."""

Shapes = Callable[[str], Sequence[Shape | None]]
"""Gives for a node's name the shapes of its outputs, () for an unknown node."""

FunctionShapes = Callable[[str], Shapes | None]
"""Gives for a function's name the shapes of its body, where they are known."""

FunctionDevices = Callable[[str, str], str]
"""Gives for the names of a function and of an argument that is a variable the device that holds it,
"" where it is not known."""

FLOAT = types_pb2.DT_FLOAT
ARGUMENT = "_Arg"
RESULT = "_Retval"

INLINED_ARGUMENT = "_InlinedArgument"
"""Op of a node that is another name for what a calling node takes at a port (`inlining`)."""

NO_ALIASES: Mapping[int, tuple[int, int]] = types.MappingProxyType({})


class GraphView:
    """The indexed graph. Read-only once built.

    Attributes:
        nodes: the NodeDefs, pseudo-nodes included, in graph order.
        index: name of a node -> its number.
        node_types: the node_types by number; nodes of other graphs may have some of them.
        node_type_of: for each node the number of its node type.
        base: for each node the number of its first vertex.
        dtypes: for each vertex its dtype (a value of `types_pb2.DataType`).
        vertex_nodes: for each vertex the node it belongs to, -1 for `OPAQUE`.
        slot_numbers: for each vertex the number of its slot among those of all types, for tables
            that `per_slot` makes; 0 for `OPAQUE`. int32 [vertices].
        sources: for each edge the vertex of the port that makes the tensor; int32 [edges].
        targets: for each edge the vertex of the port that reads it; int32 [edges].
        edge_readers: for each edge the node that reads it; int32 [edges].
        edge_starts: for each node the number of its first edge, and the number of edges; edges
            are numbered by reading node, then by port.
        waits: node that has control inputs -> the names of the nodes that it waits for.
        located: the nodes that name others to share a device with, in order.
        is_function: whether the graph is the body of a function.
        node_index: what was read of the nodes.
        is_edited: whether some nodes are others than those of the graph that was indexed.
        aliases: number of a `INLINED_ARGUMENT` -> number and input port of its calling node.
        unchanged: the numbers of nodes in bodies of loops that give the same in every round.
        rounds: for each node how often one run of the graph is taken to run it; None: once each.
    """

    def __init__(
        self,
        nodes: Sequence[node_def_pb2.NodeDef],
        index: NodeIndex,
        *,
        is_function: bool,
        shapes: Shapes | None = None,
        is_edited: bool = False,
        aliases: Mapping[int, tuple[int, int]] = NO_ALIASES,
        unchanged: frozenset[int] = frozenset(),
        rounds: np.ndarray | None = None,
    ) -> None:
        # Asked for again and again, by edited views of the graph too.
        self._shapes = None if shapes is None else functools.cache(shapes)
        self.node_index = index
        self.nodes = nodes
        self.is_function = is_function
        self.is_edited = is_edited
        self.index, self.waits, self.located = index.numbers, index.waits, index.located
        self.node_types = index.node_types.node_types
        self.node_type_of = index.node_type_of
        self.aliases, self.unchanged, self.rounds = aliases, unchanged, rounds
        vertices = Vertices(index)
        self.base, self.vertex_nodes = packed(vertices.base), packed(vertices.owners)
        self.dtypes, self.slot_numbers = packed(vertices.dtypes), vertices.slot_numbers
        self.sources, self.targets, self.edge_readers = join_ports(index, vertices, self.aliases)
        self.edge_starts = packed(index.starts)

    def edited(
        self,
        nodes: Sequence[node_def_pb2.NodeDef],
        moved: np.ndarray,
        anew: Sequence[int],
        shapes: Mapping[str, Sequence[Shape | None]],
    ) -> GraphView:
        """The view of a graph that has most of its nodes in common with this one.

        Args:
            nodes: the nodes of that graph, pseudo-nodes included.
            moved: for each node here its number there, -1 where it is gone; int32 [nodes here].
            anew: numbers of the nodes there that are not as they are here, in order.
            shapes: name of an added node -> static shapes of its outputs.

        Raises:
            InvalidGraphError: as `view_body`, or a node reads one that is gone.
        """
        return GraphView(
            nodes,
            self.node_index.edited(nodes, moved, anew),
            is_function=self.is_function,
            shapes=extend_shapes(self._shapes, shapes),
            is_edited=True,
        )

    @functools.cached_property
    def ops(self) -> frozenset[str]:
        """The ops that nodes have."""
        return frozenset(self.node_types[node_type].op for node_type in set(self.node_type_of))

    @functools.cached_property
    def op_names(self) -> list[str]:
        """For each node its op."""
        of_node_type = [node_type.op for node_type in self.node_types]
        return [of_node_type[node_type] for node_type in self.node_type_of]

    @functools.cached_property
    def names(self) -> list[str]:
        """For each node its name."""
        return list(self.index)

    @functools.cached_property
    def body(self) -> range:
        """The numbers of its nodes without what stands for a function's arguments and results."""
        if not self.is_function:
            return range(len(self.nodes))
        return range(len(self.of_op(ARGUMENT)), len(self.nodes) - len(self.of_op(RESULT)))

    def node_type(self, number: int) -> NodeType:
        """The node type of a node."""
        return self.node_types[self.node_type_of[number]]

    def op_type(self, number: int) -> OpType | None:
        """A node's op type, None where this TensorFlow does not know the op."""
        return self.node_type(number).op_type

    def attr(self, number: int, name: str) -> attr_value_pb2.AttrValue:
        """An attribute of a node, or the op's default; an empty one where there is neither."""
        op_type = self.op_type(number)
        if op_type is None:
            return attr_value_pb2.AttrValue()
        return op_type.attr(self.nodes[number], name)

    def layout(self, number: int) -> Layout:
        """A node's layout."""
        return self.node_type(number).layout

    def is_of_node_type(self, fits: Callable[[NodeType], bool]) -> np.ndarray:
        """For each node whether its node type fits; bool [nodes]."""
        return np.array([*map(fits, self.node_types)], bool)[np.asarray(self.node_type_of)]

    def of_node_type(self, fits: Callable[[NodeType], bool]) -> list[int]:
        """The nodes whose node type fits, in order."""
        return self.is_of_node_type(fits).nonzero()[0].tolist()

    def of_op(self, *ops: str) -> list[int]:
        """The nodes that have one of some ops, in order."""
        families = self.node_index.node_types.families
        numbers = [n for op in ops if op in families for n in families[op].numbers.values()]
        if not numbers:
            return []
        fits = np.zeros(len(self.node_types), bool)
        fits[numbers] = True
        return fits[np.asarray(self.node_type_of)].nonzero()[0].tolist()

    def per_slot(self, values: Callable[[NodeType], Sequence[Any]], dtype: type) -> np.ndarray:
        """A value for each vertex that depends on its node's type alone.

        Args:
            values: gives for a node type the values of its slots.
            dtype: what NumPy is to keep them as; `OPAQUE` has its zero.
        """
        flat = itertools.chain((dtype(0),), *map(values, self.node_types))
        return np.array([*flat], dtype)[self.slot_numbers]

    def is_vertex_of(self, fits: Callable[[NodeType], bool]) -> np.ndarray:
        """For each vertex whether its node's type fits; bool [vertices]."""
        return np.array([*map(fits, self.node_types), False], bool)[self._vertex_types]

    @functools.cached_property
    def _vertex_types(self) -> np.ndarray:
        """For each vertex the number of its node's type, -1 for `OPAQUE`; int32 [vertices]."""
        types = np.append(np.asarray(self.node_type_of), np.int32(-1))
        return types[np.asarray(self.vertex_nodes)]

    def float_constants(self, among: np.ndarray) -> Iterator[tuple[int, tensor_pb2.TensorProto]]:
        """The float32 constants in a mask of vertices, in order, with their values as stored."""
        is_wanted = (among & self.is_float).tobytes()
        for number in self.of_op("Const"):
            if is_wanted[self.base[number]]:
                # get: [] would write to a map that lacks the key.
                value = self.nodes[number].attr.get("value")
                if value is not None:
                    yield number, value.tensor

    @functools.cached_property
    def awaited(self) -> frozenset[str]:
        """The names of the nodes that others have as a control input."""
        return frozenset().union(*self.waits.values())

    def is_ordered(self, number: int) -> bool:
        """Whether a node has a control input, or is one."""
        return number in self.waits or self.names[number] in self.awaited

    @functools.cached_property
    def devices(self) -> dict[str, list[int]]:
        """Device -> the nodes that name it, for those that name one."""
        codes = np.asarray(self.node_index.device_of)
        known = self.node_index.node_types.devices
        return {
            name: np.flatnonzero(codes == code).tolist() for name, code in known.items() if code
        }

    def split(self, tensor: str) -> tuple[str, int]:
        """The node and the output port that a tensor's name stands for."""
        return self.node_index.split(tensor)

    def shape(self, tensor: str) -> Shape | None:
        """The static shape of a tensor: None where it is unknown, a None dimension likewise."""
        if self._shapes is None:
            return None
        name, port = self.split(tensor)
        known = self._shapes(name)
        return known[port] if port < len(known) else None

    def output_shapes(self, number: int) -> Sequence[Shape | None]:
        """The static shapes of a node's outputs, () where none is known."""
        return () if self._shapes is None else self._shapes(self.names[number])

    def node_of(self, vertex: int) -> node_def_pb2.NodeDef:
        """The node that a vertex belongs to."""
        return self.nodes[self.vertex_nodes[vertex]]

    def slot_of(self, vertex: int) -> Slot:
        """The slot of its node that a vertex stands for."""
        number = self.vertex_nodes[vertex]
        return self.layout(number).slots[vertex - self.base[number]]

    def op_of(self, vertex: int) -> str:
        """The op type of the node that a vertex belongs to, "" for `OPAQUE`."""
        number = self.vertex_nodes[vertex]
        return "" if number < 0 else self.node_types[self.node_type_of[number]].op

    def vertices_of(self, number: int, dtype: int) -> list[int]:
        """The vertices of a node that have a dtype, in order of its slots."""
        dtypes = self.node_types[self.node_type_of[number]].dtypes
        return [vertex for vertex, of in enumerate(dtypes, self.base[number]) if of == dtype]

    @functools.cached_property
    def is_float(self) -> np.ndarray:
        """For each vertex whether it is float32; shape [vertices], bool."""
        return np.asarray(self.dtypes) == FLOAT

    def adjacency(self, dtype: int, extra: Sequence[tuple[int, int]] = ()) -> Adjacency:
        """The edges between vertices of one dtype, with `extra` ones as `Adjacency` takes them."""
        of_dtype = np.asarray(self.dtypes) == dtype
        kept = of_dtype[self.sources] & of_dtype[self.targets]
        return Adjacency(len(self.dtypes), self.sources[kept], self.targets[kept], extra)

    def require_matching_dtypes(self) -> None:
        """Checks both ends of every edge.

        Raises:
            InvalidGraphError: a node reads a tensor of another dtype; the message names it.
        """
        dtypes = np.asarray(self.dtypes) % 100  # a ref dtype is its dtype plus 100
        known = (self.sources != OPAQUE) & (self.targets != OPAQUE)
        wrong = np.flatnonzero((dtypes[self.sources] != dtypes[self.targets]) & known)
        if len(wrong):
            reader = self.node_of(int(self.targets[wrong[0]]))
            maker = self.node_of(int(self.sources[wrong[0]]))
            raise InvalidGraphError(
                f"node {reader.name!r} ({reader.op}) does not take the dtype of {maker.name!r}"
            )

    @functools.cached_property
    def control_edges(self) -> tuple[np.ndarray, np.ndarray]:
        """For each control input the node that is waited for and the one that waits; int32."""
        names = itertools.chain.from_iterable(self.waits.values())
        awaited = np.array([*map(self.index.get, names, itertools.repeat(-1))], np.int32)
        counts = [*map(len, self.waits.values())]
        waiting = np.repeat(np.array([*self.waits], np.int32), counts)
        return awaited[awaited >= 0], waiting[awaited >= 0]

    @functools.cached_property
    def _readers(self) -> Neighbours:
        return Neighbours(len(self.dtypes), self.sources, self.targets)

    def readers(self, vertex: int) -> list[int]:
        """The vertices that read a tensor of this vertex, `OPAQUE` among them."""
        return self._readers[vertex].tolist()

    @functools.cached_property
    def _reading_nodes(self) -> Neighbours:
        """For each node those that read it, in order."""
        # What an alias makes is a calling node's input.
        is_output = self.per_slot(lambda node_type: node_type.layout.is_output, bool)[self.sources]
        makers = np.asarray(self.maker_nodes)[is_output].astype(np.int64)
        pairs = np.sort(makers << 32 | self.edge_readers[is_output])
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]
        return Neighbours(len(self.nodes), pairs >> 32, pairs & 0xFFFFFFFF)

    def reading_nodes(self, number: int) -> list[int]:
        """The nodes that read an output of a node, in order, control inputs not counted."""
        return self._reading_nodes[number].tolist()

    @functools.cached_property
    def maker_nodes(self) -> array.array[int]:
        """For each edge the node that makes the tensor, -1 for an op that is not known."""
        return packed(np.asarray(self.vertex_nodes)[self.sources])

    @functools.cached_property
    def tensors(self) -> array.array[int]:
        """For each edge the number of the tensor that is read.

        That is the number of the node that makes it, plus the port times the number of nodes.
        """
        tensors = np.asarray(self.node_index.makers).astype(np.int64)
        names = list(self.node_index.references)
        numbers, positions = np.unique(~tensors[tensors < 0], return_inverse=True)
        found = [self.split(names[number]) for number in numbers.tolist()]
        keys = [self.index[name] + port * len(self.nodes) for name, port in found]
        tensors[tensors < 0] = np.array(keys, np.int64)[positions]
        return array.array("q", tensors.tobytes())

    def makers(self, number: int) -> list[int]:
        """The nodes that make the tensors that a node reads, by port, -1 for unknown ops."""
        return self.maker_nodes[self.edge_starts[number] : self.edge_starts[number + 1]].tolist()

    def producers(self, number: int) -> list[int]:
        """The vertices of the tensors that a node reads, by port."""
        edges = slice(self.edge_starts[number], self.edge_starts[number + 1])
        return self.sources[edges].tolist()


def elements(shape: Iterable[int | None], unknown: int | None = None) -> int | None:
    """The number of elements of a shape; `unknown` stands for dimensions that are not known."""
    total = 1
    for size in shape:
        length = unknown if size is None else size
        if length is None:
            return None
        total *= length
    return total


def no_shapes(_: str) -> None:
    """The shapes of functions where none are known."""


def no_devices(_: str, __: str) -> str:
    """The devices of variables where none are known."""
    return ""


def extend_shapes(
    shapes: Shapes | None, added: Mapping[str, Sequence[Shape | None]]
) -> Shapes | None:
    """The shapes of a graph with those of nodes that were added; None where none are known."""
    return None if shapes is None else lambda node: added.get(node) or shapes(node)
