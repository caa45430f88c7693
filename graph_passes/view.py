"""An index of one graph, made once and read by every stage.

Painting works on *vertices*: one per slot (type attribute) of a node, numbered in node order.
Edges join the vertex of the port that makes a tensor to the vertex of each port that reads it.
The same view serves a GraphDef and the body of a FunctionDef, whose arguments and results appear
as pseudo-nodes of the ops `_Arg` and `_Retval`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from tensorflow.core.framework import (
    function_pb2,
    graph_pb2,
    node_def_pb2,
    op_def_pb2,
    types_pb2,
)

from graph_passes.adjacency import Adjacency
from graph_passes.op_registry import Layout, OpType, Slot, registered_op_type

OPAQUE = 0
"""The vertex that stands for every port of a node whose op type is unknown."""

Shape = tuple[int | None, ...]
"""A static shape; None stands for a dimension that is not known."""

Shapes = Callable[[str], Sequence[Shape | None]]
"""Gives for a node's name the shapes of its outputs, () for an unknown node."""

FLOAT = types_pb2.DT_FLOAT
_ARGUMENT = "_Arg"
_RESULT = "_Retval"
_NO_LAYOUT = Layout((), (), (), {})

JOINED_ARGUMENT = "_JoinedArgument"
"""Op of a node that is another name for what a calling node takes at a port (`joining`)."""


class InvalidGraphError(ValueError):
    """The graph is not one that TensorFlow could run: an input that nothing makes, say."""


class GraphView:
    """The indexed graph. Read-only once built.

    Attributes:
        nodes: the NodeDefs, pseudo-nodes included, in graph order.
        op_types: for each node its op type, None where this TensorFlow does not know the op.
        layouts: for each node its layout.
        base: for each node the number of its first vertex.
        dtypes: for each vertex its dtype (a value of `types_pb2.DataType`).
        vertex_nodes: for each vertex the node it belongs to, -1 for `OPAQUE`.
        sources: for each edge the vertex of the port that makes the tensor.
        targets: for each edge the vertex of the port that reads it.
        edge_starts: for each node the number of its first edge; edges are numbered by reading
            node, then by port.
        control_readers: name of a node -> the nodes that have it as a control input.
        is_function: whether the graph is the body of a function.
        ops: the ops that nodes have.
        functions: names of the functions that nodes may call as ops.
        joined_calls: numbers of the calling nodes whose functions' bodies are in the graph too.
        aliases: number of a `JOINED_ARGUMENT` -> number and input port of its calling node.
    """

    def __init__(
        self,
        nodes: Sequence[node_def_pb2.NodeDef],
        functions: Mapping[str, op_def_pb2.OpDef],
        *,
        is_function: bool,
        shapes: Shapes | None = None,
    ) -> None:
        self._shapes = shapes
        self.nodes = nodes
        self.functions = functions
        self.is_function = is_function
        self.index: dict[str, int] = {}
        self.op_types: list[OpType | None] = []
        self.layouts: list[Layout] = []
        self.base: list[int] = []
        self.control_readers: dict[str, list[int]] = {}
        self._vertex_of_tensor: dict[str, int] = {}
        self.joined_calls: set[int] = set()
        self.aliases: dict[int, tuple[int, int]] = {}
        self._index_nodes()
        self._index_edges()

    def _index_nodes(self) -> None:
        index, tensor = self.index, self._vertex_of_tensor
        base, op_types, layouts = self.base, self.op_types, self.layouts
        dtypes: list[int] = [types_pb2.DT_INVALID]
        known: dict[str, OpType | None] = {}
        plain_names = not self.is_function
        for number, node in enumerate(self.nodes):
            op, name = node.op, node.name
            try:
                op_type = known[op]
            except KeyError:
                op_type = known[op] = self._resolve(op)
            index[name] = number
            op_types.append(op_type)
            first = len(dtypes)
            base.append(first)
            if op_type is None:
                layouts.append(_NO_LAYOUT)
                if op == JOINED_ARGUMENT:
                    tensor[name] = self._add_alias(number, node)
                continue
            only = op_type.only_attr
            if only:
                layout = op_type.layout
                value = node.attr.get(only)  # [] would write to a map that lacks the key
                dtypes.append(value.type if value is not None else op_type.attr(node, only).type)
            else:
                if op_type.name != op:
                    self.joined_calls.add(number)
                layout = op_type.layout_of(node)
                dtypes.extend([op_type.dtype_of(node, slot) for slot in layout.slots])
            layouts.append(layout)  # type: ignore[arg-type]
            if plain_names or op == _ARGUMENT:
                out_slots = layout.out_slots  # type: ignore[union-attr]
                if out_slots:
                    tensor[name] = first + out_slots[0]
        if len(index) != len(self.nodes):
            raise InvalidGraphError("two nodes have the same name")
        self.dtypes = dtypes
        self.ops = frozenset(known)
        ends = [*base[1:], len(dtypes)] if base else []
        counts = np.array(ends, np.int64) - np.array(base, np.int64)
        self.vertex_nodes = [-1, *np.repeat(np.arange(len(base)), counts).tolist()]

    def _add_alias(self, number: int, node: node_def_pb2.NodeDef) -> int:
        call, port = self.index[node.attr["call"].s.decode()], node.attr["port"].i
        self.aliases[number] = (call, port)
        return self.base[call] + self.layouts[call].in_slots[port]

    def _resolve(self, op: str) -> OpType | None:
        if op in self.functions:
            return OpType(self.functions[op])
        return registered_op_type(op)

    def _index_edges(self) -> None:
        sources: list[int] = []
        offsets: list[int] = []
        starts: list[int] = []
        opaque: list[tuple[int, int]] = []
        vertex_of = self._vertex_of_tensor.get
        layouts = self.layouts
        for number, node in enumerate(self.nodes):
            start = len(sources)
            starts.append(start)
            found: Sequence[int | None] = [vertex_of(name) for name in node.input]
            if None in found:
                found = self._resolve_inputs(number, node)
            in_slots = layouts[number].in_slots
            sources += found  # type: ignore[arg-type]
            if len(found) == len(in_slots):
                offsets += in_slots
            elif self.op_types[number] is None:
                offsets += [0] * len(found)
                opaque.append((start, len(sources)))
            else:
                raise InvalidGraphError(
                    f"node {node.name!r} ({node.op}) has {len(found)} inputs, not {len(in_slots)}"
                )
        starts.append(len(sources))
        self.edge_starts = starts
        self.sources = np.array(sources, np.int64)
        counts = np.array(starts[1:], np.int64) - np.array(starts[:-1], np.int64)
        bases = np.repeat(np.array(self.base, np.int64), counts)
        self.targets = bases + np.array(offsets, np.int64)
        for start, end in opaque:
            self.targets[start:end] = OPAQUE

    def _resolve_inputs(self, number: int, node: node_def_pb2.NodeDef) -> list[int]:
        """The vertices of a node's inputs, where not all are known by name yet."""
        tensor = self._vertex_of_tensor
        found = []
        for name in node.input:
            vertex = tensor.get(name)
            if vertex is None:
                if name[0] == "^":
                    self.control_readers.setdefault(name[1:], []).append(number)
                    continue
                vertex = tensor[name] = self._find_tensor(name)
            found.append(vertex)
        return found

    def _find_tensor(self, name: str) -> int:
        producer, port = self.split(name)
        number = self.index.get(producer)
        if number is None:
            raise InvalidGraphError(f"no node makes the tensor {name!r}")
        if self.op_types[number] is None:
            return OPAQUE
        out_slots = self.layouts[number].out_slots
        if port >= len(out_slots):
            raise InvalidGraphError(f"node {producer!r} has no output {port}")
        return self.base[number] + out_slots[port]

    def split(self, tensor: str) -> tuple[str, int]:
        """The node and the output port that a tensor's name stands for.

        `name` and `name:2` in a GraphDef; `node:output_arg:1` in a function, where an argument
        goes by its name alone. A joined graph has both.
        """
        name, _, rest = tensor.partition(":")
        if not rest:
            return name, 0
        if rest.isdigit():
            return name, int(rest)
        arg, _, entry = rest.partition(":")
        number = self.index.get(name)
        offset = 0 if number is None else self.layouts[number].output_offsets.get(arg, 0)
        return name, offset + int(entry or 0)

    def shape(self, tensor: str) -> Shape | None:
        """The static shape of a tensor: None where it is unknown, a None dimension likewise."""
        if self._shapes is None:
            return None
        name, port = self.split(tensor)
        known = self._shapes(name)
        return known[port] if port < len(known) else None

    def node_of(self, vertex: int) -> node_def_pb2.NodeDef:
        """The node that a vertex belongs to."""
        return self.nodes[self.vertex_nodes[vertex]]

    def slot_of(self, vertex: int) -> Slot:
        """The slot of its node that a vertex stands for."""
        number = self.vertex_nodes[vertex]
        return self.layouts[number].slots[vertex - self.base[number]]

    def op_of(self, vertex: int) -> str:
        """The op type of the node that a vertex belongs to, "" for `OPAQUE`."""
        number = self.vertex_nodes[vertex]
        return "" if number < 0 else self.nodes[number].op

    def calls_function(self, number: int) -> bool:
        """Whether a node is a call, by an op named after the function."""
        return self.nodes[number].op in self.functions and number not in self.joined_calls

    @functools.cached_property
    def is_float(self) -> np.ndarray:
        """For each vertex whether it is float32; shape [vertices], bool."""
        return np.array(self.dtypes, np.int32) == FLOAT

    def adjacency(self, dtype: int, extra: Sequence[tuple[int, int]] = ()) -> Adjacency:
        """The edges between vertices of one dtype, with extra (source, target) pairs added."""
        of_dtype = np.array(self.dtypes, np.int32) == dtype
        kept = of_dtype[self.sources] & of_dtype[self.targets]
        sources, targets = self.sources[kept], self.targets[kept]
        if extra:
            added = np.array(extra, np.int64)
            sources = np.concatenate([sources, added[:, 0]])
            targets = np.concatenate([targets, added[:, 1]])
        return Adjacency(len(self.dtypes), sources, targets)

    def require_matching_dtypes(self) -> None:
        """Checks both ends of every edge.

        Raises:
            InvalidGraphError: a node reads a tensor of another dtype; the message names it.
        """
        dtypes = np.array(self.dtypes, np.int32) % 100  # a ref dtype is its dtype plus 100
        known = (self.sources != OPAQUE) & (self.targets != OPAQUE)
        wrong = np.flatnonzero((dtypes[self.sources] != dtypes[self.targets]) & known)
        if len(wrong):
            reader = self.node_of(int(self.targets[wrong[0]]))
            maker = self.node_of(int(self.sources[wrong[0]]))
            raise InvalidGraphError(
                f"node {reader.name!r} ({reader.op}) does not take the dtype of {maker.name!r}"
            )

    @functools.cached_property
    def _by_source(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(self.sources, kind="stable")
        return self.sources[order], self.targets[order]

    def readers(self, vertex: int) -> list[int]:
        """The vertices that read a tensor of this vertex, `OPAQUE` among them."""
        sources, targets = self._by_source
        start, end = np.searchsorted(sources, (vertex, vertex + 1))
        return targets[start:end].tolist()  # type: ignore[no-any-return]

    def reading_nodes(self, number: int) -> set[int]:
        """The nodes that read an output of a node, control inputs not counted."""
        outputs = {self.base[number] + slot for slot in self.layouts[number].out_slots}
        found = {self.vertex_nodes[v] for output in outputs for v in self.readers(output)}
        # A vertex may stand for inputs and outputs at once, and `OPAQUE` for any node at all.
        return {n for n in found if n >= 0} | self._opaque_readers(number, -1 in found)

    def _opaque_readers(self, number: int, any_at_all: bool) -> set[int]:
        if not any_at_all:
            return set()
        name = self.nodes[number].name
        return {
            reader
            for reader, op_type in enumerate(self.op_types)
            if op_type is None and any(self.split(t)[0] == name for t in self.nodes[reader].input)
        }

    def producers(self, number: int) -> list[int]:
        """The vertices of the tensors that a node reads, by port."""
        return self.sources[self.edge_starts[number] : self.edge_starts[number + 1]].tolist()


def view_graph(graph_def: graph_pb2.GraphDef, shapes: Shapes | None = None) -> GraphView:
    """Indexes the main graph of a GraphDef.

    Args:
        graph_def: the graph.
        shapes: static shapes, where they are known.

    Raises:
        InvalidGraphError: an input names no tensor, a name is used twice, or a node has the wrong
            number of inputs.
    """
    functions = {f.signature.name: f.signature for f in graph_def.library.function}
    return GraphView(list(graph_def.node), functions, is_function=False, shapes=shapes)


def view_joined(
    graph_def: graph_pb2.GraphDef,
    functions: Mapping[str, op_def_pb2.OpDef],
    shapes: Shapes | None = None,
) -> GraphView:
    """Indexes a joined graph.

    Args:
        graph_def: the graph that `joining.join` made.
        functions: definitions of functions that are called as ops, and of the joined calls.
        shapes: static shapes, where they are known.

    Raises:
        InvalidGraphError: as `view_graph`.
    """
    return GraphView(list(graph_def.node), functions, is_function=False, shapes=shapes)


def view_function(
    function_def: function_pb2.FunctionDef,
    functions: Mapping[str, op_def_pb2.OpDef] | None = None,
    shapes: Shapes | None = None,
) -> GraphView:
    """Indexes the body of a function.

    Args:
        function_def: the function.
        functions: definitions of the functions that the body calls as ops.
        shapes: static shapes, where they are known.

    Raises:
        InvalidGraphError: as `view_graph`, or an argument stands for several tensors.
    """
    nodes: list[node_def_pb2.NodeDef] = []
    for arg in function_def.signature.input_arg:
        if arg.number_attr or arg.type_list_attr or arg.type_attr:
            raise InvalidGraphError(f"the argument {arg.name!r} has no fixed dtype")
        pseudo = node_def_pb2.NodeDef(name=arg.name, op=_ARGUMENT)
        pseudo.attr["T"].type = arg.type
        nodes.append(pseudo)
    nodes.extend(function_def.node_def)
    for arg in function_def.signature.output_arg:
        # A result may bear the name of a node or an argument; "/" keeps this name out of the way.
        result = function_def.ret.get(arg.name)  # [] would write to a map that lacks the key
        if not result:
            raise InvalidGraphError(f"nothing is named as the result {arg.name!r}")
        pseudo = node_def_pb2.NodeDef(name=f"{arg.name}/{_RESULT}", op=_RESULT)
        pseudo.attr["T"].type = arg.type
        pseudo.input.append(result)
        nodes.append(pseudo)
    return GraphView(nodes, functions or {}, is_function=True, shapes=shapes)
