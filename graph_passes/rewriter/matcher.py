"""Reading a graph by its structure: producers, readers and the few shapes of subgraph in use.

Patterns match operators and the way they are joined, never names. Tensors are the names that
nodes' inputs hold, so that two outputs of one node stay apart.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from tensorflow.core.framework import attr_value_pb2, node_def_pb2, tensor_pb2, tensor_shape_pb2
from tensorflow.python.framework import tensor_util

from graph_passes.ir.graph_view import GraphView, Shape

SHAPERS = ("Reshape", "Squeeze", "ExpandDims", "Identity", "StopGradient")
"""Ops that give the elements of their first input as they are."""
MOVES = (*SHAPERS, "Transpose")
"""Ops that give them in another order at most."""
SPREADS = ("BroadcastTo", "Tile")
"""Ops that repeat the elements of their first input."""
SELECTS = ("SelectV2", "Select")
"""Ops that give those of one of two tensors."""
SIZES = ("Shape", "ShapeN", "Size", "Rank")
"""Ops that ask for the shape of a tensor only."""
UNARY = (
    *("Abs", "Cos", "Erf", "Erfc", "Exp", "Expm1", "Identity", "Log", "Log1p", "Neg", "Relu"),
    *("Relu6", "Rsqrt", "Sigmoid", "Sin", "Softplus", "Sqrt", "Square", "Tanh"),
)
"""Element-wise ops of one tensor."""
ADDS = ("AddV2", "Add")
"""Sums of two tensors."""
SUMS = ("AddN", *ADDS)
"""Sums of any number of tensors."""

_KEEP_SHAPE = ("Identity", "StopGradient", "Cast", "Enter")
_MOST_STEPS = 16
"""Ops between a tensor and the constant or variable whose shape it has."""
_FEW = 8
"""Constants of no more elements are mostly shapes and axes, which come again all over a graph."""


class NoMatchError(Exception):
    """A subgraph is not an instance of the pattern; the message says what is amiss."""


class Matcher:
    """Walks one graph. What is read again and again is remembered.

    Attributes:
        view: the graph.
        ops: for each node its op.
        op: gives a node's op type.
        attr: gives an attribute of a node, or the op's default.
        maker: gives the node that makes a tensor.
        inputs: gives the tensors that a node reads, control inputs left out.
        makers: gives the nodes that make these, by port.
        readers: gives the nodes that read an output of a node, in order.
        shape_of: gives the static shape of a tensor, None where it is not known.
        shape: gives that of the first tensor that a node makes.
        output: gives the first tensor that a node makes, as its readers write it.
    """

    def __init__(self, view: GraphView) -> None:
        self.view = view
        self.ops = view.op_names
        self._starts, self._sources = view.edge_starts, view.maker_nodes.tolist()
        self._constants: dict[int, np.ndarray] = {}
        self.op: Callable[[int], str] = self.ops.__getitem__
        self.attr: Callable[[int, str], attr_value_pb2.AttrValue] = view.attr
        # Bound methods of its own would keep the matcher, and the graph, from being freed at once.
        maker = functools.cache(functools.partial(_maker, view))
        inputs = functools.cache(_inputs(view))
        makers = functools.partial(_makers, self._starts, self._sources, inputs, maker)
        self.maker: Callable[[str], int] = maker
        self.inputs: Callable[[int], list[str]] = inputs
        self.makers: Callable[[int], list[int]] = functools.cache(makers)
        self.readers: Callable[[int], list[int]] = functools.cache(view.reading_nodes)
        self.shape_of: Callable[[str], Shape | None] = functools.cache(view.shape)
        self.output: Callable[[int], str] = functools.cache(functools.partial(_output, view))
        shape_of, output = self.shape_of, self.output
        self.shape: Callable[[int], Shape | None] = functools.cache(lambda n: shape_of(output(n)))

    def node(self, number: int) -> node_def_pb2.NodeDef:
        """A node by its number."""
        return self.view.nodes[number]

    def tensor(self, number: int, port: int) -> str:
        """The tensor that a node reads at a port."""
        return self.inputs(number)[port]

    def source(self, number: int, port: int) -> int:
        """The node that makes the tensor that a node reads at a port."""
        found = self._sources[self._starts[number] + port]
        return found if found >= 0 else self.maker(self.tensor(number, port))

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

    def scalar(self, tensor: str) -> float | None:
        """The value of a constant with one element; None of any other tensor."""
        if self.op(self.maker(tensor)) != "Const":
            return None
        value = self.constant(tensor)
        return float(value.item()) if value.size == 1 and value.dtype.kind in "fiu" else None

    def numbers_at(self, number: int, port: int) -> list[int] | None:
        """The axes or sizes that a node is given by a constant at a port, None without one."""
        if self.op(self.source(number, port)) != "Const":
            return None
        return self.constant(self.tensor(number, port)).ravel().tolist()

    def stored_shape(self, tensor: str) -> Shape | None:
        """The static shape of a tensor, or that of the constant or variable that it comes from.

        So that graphs without static shapes have some.
        """
        shape = self.shape_of(tensor)
        for _ in range(_MOST_STEPS):
            if shape is not None:
                return shape
            number = self.maker(tensor)
            op, node = self.op(number), self.node(number)
            if op == "Const":
                return _sizes(node.attr["value"].tensor.tensor_shape)
            if op == "Reshape" and (sizes := self.numbers_at(number, 1)) is not None:
                return tuple(None if size < 0 else size for size in sizes)
            if op == "ReadVariableOp":  # a handle that is fed has a shape of its own
                handle = self.node(self.maker(self.through(self.tensor(number, 0), *_KEEP_SHAPE)))
                return _sizes(handle.attr["shape"].shape) if handle.op == "VarHandleOp" else None
            if op not in _KEEP_SHAPE:
                return _sizes(node.attr["shape"].shape) if "shape" in node.attr else None
            tensor = self.tensor(number, 0)
            shape = self.shape_of(tensor)
        return None

    def constant(self, tensor: str) -> np.ndarray:
        """The value of a constant tensor.

        Raises:
            NoMatchError: the tensor is not a constant.
        """
        number = self.maker(tensor)
        found = self._constants.get(number)
        if found is None:
            value = self.node(self.expect(number, "Const")).attr["value"].tensor
            if math.prod(dim.size for dim in value.tensor_shape.dim) <= _FEW:
                found = _small(value.SerializeToString())
            else:
                found = tensor_util.MakeNdarray(value)
            self._constants[number] = found
        return found


@functools.lru_cache(maxsize=4096)
def _small(content: bytes) -> np.ndarray:
    value: np.ndarray = tensor_util.MakeNdarray(tensor_pb2.TensorProto.FromString(content))
    value.flags.writeable = False  # all graphs share it
    return value


def _sizes(proto: tensor_shape_pb2.TensorShapeProto) -> Shape | None:
    if proto.unknown_rank:
        return None
    return tuple(None if dim.size < 0 else dim.size for dim in proto.dim)


def _output(view: GraphView, number: int) -> str:
    op_type = view.op_type(number) if view.is_function else None
    return view.names[number] if op_type is None else view.names[number] + op_type.first_output


def _maker(view: GraphView, tensor: str) -> int:
    found = view.index.get(tensor)  # most tensors go by the name of a node
    return view.index[view.split(tensor)[0]] if found is None else found


def _inputs(view: GraphView) -> Callable[[int], list[str]]:
    if view.node_index.named_outputs:
        nodes = view.nodes
        return lambda number: [name for name in nodes[number].input[:] if name[0] != "^"]
    # Names that are at hand cost less than those that protos make anew.
    names, references = view.names, list(view.node_index.references)
    starts, makers = view.edge_starts, view.node_index.makers

    def inputs(number: int) -> list[str]:
        read = makers[starts[number] : starts[number + 1]]
        return [names[maker] if maker >= 0 else references[~maker] for maker in read]

    return inputs


def _makers(
    starts: Sequence[int],
    sources: list[int],
    inputs: Callable[[int], list[str]],
    maker: Callable[[str], int],
    number: int,
) -> list[int]:
    found = sources[starts[number] : starts[number + 1]]
    return [maker(tensor) for tensor in inputs(number)] if -1 in found else found
