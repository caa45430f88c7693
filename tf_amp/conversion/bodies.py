"""The bodies of a graph and of its functions: who reads what, and small edits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from tensorflow.core.framework import node_def_pb2, types_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.graph_pb2 import GraphDef

from graph_passes.ir.copying import nodes_of
from graph_passes.ir.eligibility import node_name

Node: TypeAlias = node_def_pb2.NodeDef
_FIRST_OUTPUTS = {
    "Cast": "y",
    "Identity": "output",
    "ReadVariableOp": "value",
    "Gather": "output",
    "GatherV2": "output",
    "ResourceGather": "output",
}


class Body:
    """A graph's main part, or the body of a function.

    Attributes:
        name: the function's, "" for the main graph.
        proto: the graph or function; the methods below change it.
        nodes: name -> node.
        readers: node or argument -> the nodes that read it, each with the position of the input.
    """

    def __init__(self, proto: GraphDef | FunctionDef) -> None:
        self.proto = proto
        self.name = proto.signature.name if isinstance(proto, FunctionDef) else ""
        self.nodes = {node.name: node for node in nodes_of(proto)}
        self.readers: dict[str, list[tuple[Node, int]]] = {}
        for node in self.nodes.values():
            for position, reference in enumerate(node.input):
                if not reference.startswith("^"):
                    self.readers.setdefault(node_name(reference), []).append((node, position))

    @property
    def is_function(self) -> bool:
        """Whether it is the body of a function."""
        return isinstance(self.proto, FunctionDef)

    def returned(self) -> dict[str, str]:
        """Of a function: what it gives back -> the tensor."""
        return dict(self.proto.ret) if isinstance(self.proto, FunctionDef) else {}

    def first_output(self, node: Node) -> str:
        """How others refer to the output of a Cast, an Identity, a ReadVariableOp or a Gather."""
        return f"{node.name}:{_FIRST_OUTPUTS[node.op]}:0" if self.is_function else node.name

    def add(self, op: str, name: str, inputs: Sequence[str], **types: int) -> Node:
        """Adds a node under a name that is free, with type attrs."""
        free = name
        while free in self.nodes:
            free += "_1"
        added: Node = nodes_of(self.proto).add()  # type: ignore[attr-defined]
        added.name, added.op = free, op
        added.input.extend(inputs)
        for attr, value in types.items():
            added.attr[attr].type = value
        self.nodes[free] = added
        return added

    def add_cast(self, name: str, reference: str, source: int, target: int) -> Node:
        """Adds a Cast of a tensor."""
        return self.add("Cast", name, [reference], SrcT=source, DstT=target)

    def redirect(self, old: str, new: str, *, but: Sequence[Node] = ()) -> None:
        """Makes the readers of a node or argument with one output read a tensor instead."""
        left_out = {node.name for node in but}
        for reader, position in self.readers.pop(old, []):
            if reader.name not in left_out:
                reader.input[position] = new
                self.readers.setdefault(node_name(new), []).append((reader, position))
        if isinstance(self.proto, FunctionDef):
            for result, tensor in self.proto.ret.items():
                if node_name(tensor) == old:
                    self.proto.ret[result] = new

    def remove(self, names: set[str], *, controls: dict[str, str]) -> None:
        """Removes nodes that nothing reads; who waited for one waits for another in its place."""
        if not names:
            return
        nodes = nodes_of(self.proto)
        for node in nodes:
            if any(i.startswith("^") and i[1:] in names for i in node.input):
                new = [f"^{controls[i[1:]]}" if i[1:] in names else i for i in node.input]
                del node.input[:]
                data = [i for i in new if not i.startswith("^")]
                node.input.extend((*data, *dict.fromkeys(i for i in new if i.startswith("^"))))
        for number in reversed(range(len(nodes))):
            if nodes[number].name in names:
                del nodes[number]  # type: ignore[attr-defined]
        for name in names:
            del self.nodes[name]


def bodies_of(graph: GraphDef) -> Iterator[Body]:
    """The main graph's body, then those of its functions."""
    yield Body(graph)
    for function in graph.library.function:
        yield Body(function)


def type_of(node: Node, attr: str) -> int:
    """The value of a type attr, DT_INVALID where the node lacks it."""
    return node.attr[attr].type if attr in node.attr else types_pb2.DT_INVALID
