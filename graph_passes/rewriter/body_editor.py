"""Changes a graph or a function in place: the one way in which stages behind units do so."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, MutableMapping

from tensorflow.core.framework import function_pb2, node_def_pb2

from graph_passes.ir.copying import Graph, nodes_of
from graph_passes.ops.node_types import COLOCATION, NodeTypeTable
from graph_passes.rewriter.emitter import Emitter, Prototype, TensorFact
from graph_passes.rewriter.surgery import relocate


class BodyEditor:
    """Edits a GraphDef or the body of a FunctionDef in place.

    Attributes:
        proto: what is edited.
        is_function: whether tensors are named as within functions.
        nodes: its nodes.
        first: the number of the first of them in a view, where arguments stand before the nodes
            and results behind them.
    """

    def __init__(self, proto: Graph) -> None:
        self.proto = proto
        self.nodes = nodes_of(proto)
        self.is_function = isinstance(proto, function_pb2.FunctionDef)
        self.first, self._old = 0, len(self.nodes)
        self._results: list[str] = []
        self._ret: MutableMapping[str, str] = {}
        if isinstance(proto, function_pb2.FunctionDef):
            self.first = len(proto.signature.input_arg)
            self._results, self._ret = [arg.name for arg in proto.signature.output_arg], proto.ret
        self._by_name: dict[str, node_def_pb2.NodeDef] = {}
        self._node_types = NodeTypeTable()

    @functools.cached_property
    def names(self) -> set[str]:
        """The names of nodes, arguments and results; receives those of new nodes."""
        names = {node.name for node in self.nodes}
        if isinstance(self.proto, function_pb2.FunctionDef):
            signature = self.proto.signature
            names.update(arg.name for arg in (*signature.input_arg, *signature.output_arg))
        return names

    def find(self, name: str) -> node_def_pb2.NodeDef | None:
        """A node by its name, None where there is none, as for an argument."""
        for node in self.nodes[len(self._by_name) :]:  # those added since the last search
            self._by_name[node.name] = node
        return self._by_name.get(name)

    def node(self, name: str) -> node_def_pb2.NodeDef:
        """A node by its name.

        Raises:
            KeyError: there is none.
        """
        node = self.find(name)
        if node is None:
            raise KeyError(name)
        return node

    def fact(self, tensor: str) -> TensorFact:
        """The dtype of a tensor, 0 where its op is not known. Its shape is not looked for."""
        name, _, port = tensor.partition(":")
        node = self.find(name)
        if node is None:
            arguments = self.proto.signature.input_arg  # type: ignore[union-attr]
            return TensorFact(next(arg.type for arg in arguments if arg.name == name), None)
        node_type = self._node_types.node_types_of([node])[0]
        layout = node_type.layout
        slots = layout.out_slots
        return TensorFact(node_type.dtypes[slots[layout.port(port)]] if slots else 0, None)

    def output(self, name: str, port: int = 0) -> str:
        """The name of a tensor that a node makes."""
        layout = self._node_types.node_types_of([self.node(name)])[0].layout
        return name + layout.suffix(port, named=self.is_function)

    def emitter(self, stem: str, device: str = "") -> Emitter:
        """Adds nodes whose names begin with the stem."""
        return Emitter(
            node_def_pb2.NodeDef(name=stem, device=device),
            nodes=self.nodes,  # type: ignore[arg-type]
            known=(),
            taken=self.names,
            fact=self.fact,
            is_function=self.is_function,
        )

    def add(self, prototype: Prototype, name: str, tensor: str, device: str) -> str:
        """Adds a node of one input under a name that is free, and returns its first tensor."""
        node = self.nodes.add()  # type: ignore[attr-defined]
        node.CopyFrom(prototype.node)
        node.name, node.device = name, device
        node.input.append(tensor)
        return name + prototype.node_type.layout.suffix(0, named=self.is_function)

    def rewire(self, number: int, port: int, tensor: str) -> None:
        """Lets a node, by its number in a view of the body, read another tensor at a port."""
        position = number - self.first
        if position < self._old:
            self.nodes[position].input[port] = tensor
        else:
            self._ret[self._results[position - self._old]] = tensor

    def redirect(self, tensors: Mapping[str, str]) -> None:
        """Lets all readers of some tensors, but for the nodes added, read others."""
        read_as = dict(tensors)
        if not self.is_function:
            read_as.update((f"{old}:0", new) for old, new in tensors.items())
        for node in self.nodes[: self._old]:
            read = node.input[:]  # a list: most nodes read none of them
            if not read_as.keys().isdisjoint(read):
                node.input[:] = [read_as.get(tensor, tensor) for tensor in read]
        for result, tensor in list(self._ret.items()):
            if tensor in read_as:
                self._ret[result] = read_as[tensor]

    def remove(self, names: Collection[str]) -> None:
        """Removes nodes that nothing reads any more, and that wait for none themselves."""
        gone = [position for position, node in enumerate(self.nodes) if node.name in names]
        for position in reversed(gone):
            del self.nodes[position]  # type: ignore[attr-defined]
        for node in self.nodes:
            waits = [name for name in node.input[:] if name[0] == "^" and name[1:] in names]
            for name in waits:
                node.input.remove(name)
            if COLOCATION in node.attr:
                relocate(node, dict.fromkeys(names, ""))
        self._old -= sum(position < self._old for position in gone)
        self._by_name.clear()
