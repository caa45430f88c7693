"""Reads every node of a graph once: names, node_types, and what reads what.

Reading a field of a proto costs more than all else that is done with a node, so each is read once
and kept as a number where it can be.
"""

from __future__ import annotations

import array
import functools
import itertools
from collections.abc import Sequence

import numpy as np
from tensorflow.core.framework import node_def_pb2

from graph_passes.ops.node_types import NodeType, NodeTypeTable
from graph_passes.ops.op_types import NO_LAYOUT

_UNKNOWN = -(1 << 31)
_CHUNK = 4096
"""Nodes that are read together."""


class InvalidGraphError(ValueError):
    """The graph is not one that TensorFlow could run: an input that nothing makes, say."""


class NodeIndex:
    """What was read of the nodes, in their order.

    Attributes:
        numbers: name of a node -> its number.
        node_types: the node_types of the nodes.
        node_type_of: for each node the number of its node type.
        arity: for each node how many tensors it reads.
        makers: for each tensor read, by reader and port, the number of the node whose output 0 it
            is, else ~n for the entry n of `references`.
        references: tensors that are other outputs, or were read before the node that makes them
            was met; their names -> 0, 1, 2 ...
        named_outputs: whether tensors are named by output arguments, as within functions.
        waits: node that has control inputs -> the names of the nodes that it waits for.
        located: the nodes that name others to share a device with, in order.
        marked: those of the nodes that were read here that say what they are to be, in order.
        device_of: for each node the number of its device.
    """

    def __init__(self, node_types: NodeTypeTable, *, named_outputs: bool = False) -> None:
        """Makes an empty index; node_types that are not in the table are added to it."""
        self.numbers: dict[str, int] = {}
        self.named_outputs = named_outputs
        # Where outputs are named: name of a tensor -> the node whose output 0 it is.
        self._outputs: dict[str, int] = {}
        self.node_types = node_types
        self.node_type_of = array.array("i")
        self.arity = array.array("i")
        self.makers = array.array("i")
        self.references: dict[str, int] = {}
        self.waits: dict[int, list[str]] = {}
        self.located = array.array("i")
        self.marked = array.array("i")
        self.device_of = array.array("i")

    def extend(
        self, nodes: Sequence[node_def_pb2.NodeDef], numbers_of: Sequence[int] | None = None
    ) -> None:
        """Reads nodes and adds them, under numbers that are 0, 1, 2 ... by default.

        Raises:
            InvalidGraphError: two nodes have the same name.
        """
        numbers = range(len(nodes)) if numbers_of is None else numbers_of
        # Many at a time, for the speed of comprehensions, but not all: their inputs take memory.
        for start in range(0, len(nodes), _CHUNK):
            self._read(nodes[start : start + _CHUNK], numbers[start : start + _CHUNK])
        if len(self.numbers) < len(self.node_type_of):
            raise InvalidGraphError("two nodes have the same name")

    def _read(self, nodes: Sequence[node_def_pb2.NodeDef], numbers: Sequence[int]) -> None:
        names = [node.name for node in nodes]
        self.numbers.update(zip(names, numbers, strict=True))
        codes, devices = self.node_types.devices, [node.device for node in nodes]
        for device in dict.fromkeys(devices):
            codes.setdefault(device, len(codes))
        self.device_of.extend(map(codes.__getitem__, devices))
        families, node_type_of, located, marked = self.node_types.read(nodes)
        self.located.extend([numbers[place] for place in located])
        self.marked.extend([numbers[place] for place in marked])
        self.node_type_of.extend(node_type_of)
        if self.named_outputs:
            self._outputs.update(zip(names, numbers, strict=True))  # arguments
            outputs = map(str.__add__, names, [family.first_output for family in families])
            self._outputs.update(zip(outputs, numbers, strict=True))
        inputs = [node.input[:] for node in nodes]  # lists: the field itself is slow to iterate
        self._read_inputs(inputs, numbers)

    def _read_inputs(self, inputs: Sequence[Sequence[str]], numbers: Sequence[int]) -> None:
        """Finds the makers of what nodes read, given all inputs of each node."""
        arity = np.fromiter(map(len, inputs), np.int32, len(inputs))
        flat = list(itertools.chain.from_iterable(inputs))
        find = (self._outputs if self.named_outputs else self.numbers).get
        found = map(find, flat, itertools.repeat(_UNKNOWN))
        makers = np.fromiter(found, np.int32, len(flat))
        (unknown,) = (makers == _UNKNOWN).nonzero()
        if len(unknown):
            readers = np.repeat(np.arange(len(arity)), arity)
            references, waits = self.references, self.waits
            for position, reader in zip(unknown.tolist(), readers[unknown].tolist(), strict=True):
                name = flat[position]
                if name[0] == "^":
                    waits.setdefault(numbers[reader], []).append(name[1:])
                else:
                    makers[position] = ~references.setdefault(name, len(references))
            is_read = makers != _UNKNOWN
            arity = np.bincount(readers[is_read], minlength=len(arity)).astype(np.int32)
            makers = makers[is_read]
        self.arity.frombytes(arity.tobytes())
        self.makers.frombytes(makers.tobytes())

    def edited(
        self, nodes: Sequence[node_def_pb2.NodeDef], moved: np.ndarray, anew: Sequence[int]
    ) -> NodeIndex:
        """The index of a graph that has most of its nodes in common with this one.

        Args:
            nodes: the nodes of that graph.
            moved: for each node here its number there, -1 where it is gone; int32 [nodes here].
            anew: numbers of the nodes there to be read, in order. All others are as they are here.

        Raises:
            InvalidGraphError: two nodes have the same name, or a node reads one that is gone.
        """
        origin = np.full(len(nodes), -1, np.int32)
        origin[moved[moved >= 0]] = np.flatnonzero(moved >= 0)
        names = np.array([*self.numbers, ""], object)[origin]
        names[anew] = [nodes[number].name for number in anew]
        numbers = dict(zip(names.tolist(), range(len(nodes)), strict=True))
        read, new = (NodeIndex(self.node_types, named_outputs=self.named_outputs) for _ in range(2))
        for index in (read, new):
            index.references, index.numbers = self.references, numbers
        if len(numbers) != len(nodes):
            raise InvalidGraphError("two nodes have the same name")
        read._outputs.update(numbers)  # arguments
        read.extend([nodes[number] for number in anew], anew)
        origin[anew] = -1
        old = origin >= 0

        def merge(of_old: array.array[int], of_read: array.array[int]) -> array.array[int]:
            values = np.asarray(of_old)[origin]
            values[~old] = of_read
            return packed(values)

        new.node_type_of = merge(self.node_type_of, read.node_type_of)
        new.arity = merge(self.arity, read.arity)
        new.device_of = merge(self.device_of, read.device_of)
        readers = np.repeat(np.arange(len(nodes)), new.arity)
        ports = np.arange(len(readers)) - new.starts[readers]
        of_old = old[readers]
        before = np.asarray(self.makers)[(self.starts[origin[readers]] + ports)[of_old]]
        after = np.where(before < 0, before, moved[np.maximum(before, 0)])
        if np.any((after < 0) & (before >= 0)):
            raise InvalidGraphError("a node reads a tensor of one that is gone")
        makers = np.empty(len(readers), np.int32)
        makers[of_old], makers[~of_old] = after, read.makers
        new.makers = packed(makers)
        # What is gone has the number -1, and there may be no node left.
        stays = np.where(np.append(old, False)[moved], moved, -1).tolist()
        kept = {stays[number]: names for number, names in self.waits.items()}
        new.waits = dict(sorted((read.waits | kept).items()))
        new.waits.pop(-1, None)
        new.located.extend(sorted({*read.located, *(stays[n] for n in self.located)} - {-1}))
        return new

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """For each node the number of its first tensor in `makers`, and the end; int32."""
        starts = np.zeros(len(self.arity) + 1, np.int32)
        np.cumsum(self.arity, out=starts[1:])
        return starts

    def name(self, number: int) -> str:
        """The name of a node. Takes time: for messages."""
        return next(itertools.islice(self.numbers, number, None))

    def node_type(self, number: int) -> NodeType:
        """The node type of a node."""
        return self.node_types.node_types[self.node_type_of[number]]

    def split(self, tensor: str) -> tuple[str, int]:
        """The node and the output port that a tensor's name stands for.

        `name` and `name:2` in a GraphDef; `node:output_arg:1` in a function, where an argument
        goes by its name alone. A inlined graph has both.
        """
        if ":" not in tensor:
            return tensor, 0
        name, _, port = tensor.partition(":")
        number = self.numbers.get(name)
        return name, (NO_LAYOUT if number is None else self.node_type(number).layout).port(port)


def concatenated(parts: Sequence[tuple[str, NodeIndex]]) -> NodeIndex:
    """The indices of several graphs, one behind the other, as that of one.

    Args:
        parts: for each graph what goes before its names, and its index; all have one table of
            node_types.

    Returns:
        The index of a graph in which tensors may be named as within functions.
    """
    whole = NodeIndex(parts[0][1].node_types, named_outputs=True)
    for prefix, index in parts:
        first, known = len(whole.node_type_of), len(whole.references)
        whole.numbers.update(zip(map(prefix.__add__, index.numbers), itertools.count(first)))
        whole.references.update(zip(map(prefix.__add__, index.references), itertools.count(known)))
        whole.node_type_of.extend(index.node_type_of)
        whole.arity.extend(index.arity)
        whole.device_of.extend(index.device_of)
        makers = np.asarray(index.makers)
        whole.makers.extend(packed(np.where(makers < 0, makers - known, makers + first)))
        whole.located.extend(packed(np.asarray(index.located) + first))
        for number, names in index.waits.items():
            whole.waits[number + first] = [prefix + name for name in names]
    return whole


def packed(values: np.ndarray) -> array.array[int]:
    """Numbers in 4 bytes each that are read as plain ints, one by one as from a list."""
    return array.array("i", values.astype(np.int32, copy=False).tobytes())
