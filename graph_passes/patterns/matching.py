"""Reading a graph by its structure: producers, readers and the few shapes of subgraph in use.

Patterns match operators and the way they are joined, never names. Tensors are the names that
nodes' inputs hold, so that two outputs of one node stay apart.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from tensorflow.core.framework import node_def_pb2, tensor_pb2
from tensorflow.python.framework import tensor_util

from graph_passes.view import GraphView

_FEW_BYTES = 64
"""Constants of no more are mostly shapes and axes, which come again all over a graph."""


class NoMatchError(Exception):
    """A subgraph is not an instance of the pattern; the message says what is amiss."""


class Matcher:
    """Walks one graph.

    Attributes:
        view: the graph.
        ops: for each node its op.
    """

    def __init__(self, view: GraphView) -> None:
        self.view = view
        self.ops = view.op_names
        self._starts, self._sources = view.edge_starts, view.maker_nodes
        self._inputs: dict[int, list[str]] = {}
        self._readers: dict[int, list[int]] = {}
        self._makers: dict[str, int] = {}
        self._makers_of: dict[int, list[int]] = {}
        self._constants: dict[int, np.ndarray] = {}
        self._values: dict[bytes, np.ndarray] = {}

    def node(self, number: int) -> node_def_pb2.NodeDef:
        """A node by its number."""
        return self.view.nodes[number]

    def op(self, number: int) -> str:
        """A node's op type."""
        return self.ops[number]

    def tensor(self, number: int, port: int) -> str:
        """The tensor that a node reads at a port."""
        return self.view.nodes[number].input[port]

    def maker(self, tensor: str) -> int:
        """The node that makes a tensor."""
        found = self.view.index.get(tensor)  # most tensors go by the name of a node
        if found is None:
            found = self._makers.get(tensor)
        if found is None:
            found = self._makers[tensor] = self.view.index[self.view.split(tensor)[0]]
        return found

    def source(self, number: int, port: int) -> int:
        """The node that makes the tensor that a node reads at a port."""
        found = self._sources[self._starts[number] + port]
        return found if found >= 0 else self.maker(self.tensor(number, port))

    def inputs(self, number: int) -> list[str]:
        """The tensors that a node reads, control inputs left out."""
        found = self._inputs.get(number)
        if found is None:
            found = self._inputs[number] = self.view.nodes[number].input[:]
            if found and found[-1][0] == "^":  # control inputs come last
                found[:] = [name for name in found if name[0] != "^"]
        return found

    def makers(self, number: int) -> list[int]:
        """The nodes that make the tensors that a node reads, by port."""
        found = self._makers_of.get(number)
        if found is None:
            found = self.view.makers(number)
            if -1 in found:
                found = [self.maker(tensor) for tensor in self.inputs(number)]
            self._makers_of[number] = found
        return found

    def output(self, number: int) -> str:
        """The first tensor that a node makes, as its readers write it."""
        if not self.view.is_function:
            return self.view.names[number]
        op_type = self.view.op_type(number)
        arg = op_type.op_def.output_arg[0].name if op_type else ""
        return f"{self.view.names[number]}:{arg}:0"

    def readers(self, number: int) -> list[int]:
        """The nodes that read an output of a node, in order."""
        found = self._readers.get(number)
        if found is None:
            found = self._readers[number] = self.view.reading_nodes(number)
        return found

    def reads(self, number: int, tensor: str) -> bool:
        """Whether a node reads a tensor."""
        return tensor in self.inputs(number)

    def expect(self, number: int, *ops: str) -> int:
        """The same node, if its op is one of those given.

        Raises:
            NoMatchError: it is another op.
        """
        if self.op(number) not in ops:
            raise NoMatchError(f"{self.node(number).name!r} is {self.op(number)}, not {ops[0]}")
        return number

    def other_input(self, number: int, tensor: str) -> str:
        """The other of the two tensors that a commutative node reads.

        Raises:
            NoMatchError: the node does not read the tensor, or reads it twice.
        """
        inputs = self.inputs(number)
        if len(inputs) != 2 or inputs.count(tensor) != 1:
            raise NoMatchError(f"{self.node(number).name!r} does not join {tensor!r} to another")
        return inputs[1 - inputs.index(tensor)]

    def through(self, tensor: str, *ops: str) -> str:
        """Follows a tensor back through single-input ops that only change shape."""
        number = self.maker(tensor)
        while self.ops[number] in ops:
            tensor = self.tensor(number, 0)
            number = self.source(number, 0)
        return tensor

    def is_made_by(self, tensor: str, ops: Collection[str]) -> bool:
        """Whether an op of some types is among those that a tensor is made with."""
        pending, seen = [self.maker(tensor)], {self.maker(tensor)}
        while pending:
            number = pending.pop()
            if self.op(number) in ops:
                return True
            new = set(self.makers(number)) - seen
            seen |= new
            pending.extend(new)
        return False

    def constant(self, tensor: str) -> np.ndarray:
        """The value of a constant tensor.

        Raises:
            NoMatchError: the tensor is not a constant.
        """
        number = self.expect(self.maker(tensor), "Const")
        found = self._constants.get(number)
        if found is None:
            value = self.node(number).attr["value"].tensor
            found = self._constants[number] = self._value(value)
        return found

    def _value(self, value: tensor_pb2.TensorProto) -> np.ndarray:
        if value.ByteSize() > _FEW_BYTES:
            return tensor_util.MakeNdarray(value)
        content = value.SerializeToString()
        found = self._values.get(content)
        if found is None:
            found = self._values[content] = tensor_util.MakeNdarray(value)
        return found
