"""New nodes, written op by op: `new.op.MatMul(x, w, name="sum", transpose_b=True)`.

What follows from the surroundings is filled in: type attributes and counts from the inputs, the
op's defaults, a free name, device and colocation of the node that is replaced, the static shapes of
outputs, and in loops of TensorFlow 1 the frame of constants.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, MutableSequence, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from tensorflow.core.framework import attr_value_pb2, node_def_pb2, op_def_pb2
from tensorflow.python.framework import tensor_util

from graph_passes.ir.graph_view import Shape
from graph_passes.ops.node_types import COLOCATION, NodeType, NodeTypeTable
from graph_passes.ops.op_types import registered_op_type
from graph_passes.rewriter.matcher import NoMatchError
from graph_passes.rewriter.output_shapes import shapes_of_outputs

_FEW_ELEMENTS = 8
"""Constants of no more are mostly shapes, which come again from unit to unit."""
_FIELDS = {"type": "type", "int": "i", "float": "f", "bool": "b", "string": "s", "shape": "shape"}


class TensorFact(NamedTuple):
    """What is known of a tensor: its dtype, and its static shape, None where it is unknown."""

    dtype: int
    shape: Shape | None


class Prototype(NamedTuple):
    """A node with all attributes but neither name nor inputs, and its node type."""

    node: node_def_pb2.NodeDef
    node_type: NodeType


def free_name(name: str, *taken: Container[str]) -> str:
    """The name itself where it is free, else followed by the first number that makes it so."""
    found, count = name, 0
    while any(found in names for names in taken):
        count += 1
        found = f"{name}_{count}"
    return found


class Emitter:
    """Adds nodes to a graph or to the body of a function.

    Attributes:
        op: `op.NAME(*inputs, name=..., shape=..., **attrs)` adds a node and returns its tensor, a
            tuple where the op has several outputs. `name` goes behind the stem, "" is the stem
            itself; `shape` is the static shape of the first output where it is not that which
            `output_shapes` works out.
        made: tensors of new nodes -> what is known of them.
        makers: tensor of a new node -> the node.
        read: the tensors that new nodes read.
        new_nodes: the new nodes, each with its node type and what is known of what it reads.
    """

    def __init__(
        self,
        like: node_def_pb2.NodeDef,
        *,
        nodes: MutableSequence[node_def_pb2.NodeDef],
        known: Container[str],
        taken: set[str],
        fact: Callable[[str], TensorFact],
        is_function: bool,
        has_frames: bool = False,
        stem: str = "",
    ) -> None:
        """Starts writing.

        Args:
            like: the node whose device and colocation new nodes have.
            nodes: the field of a proto that receives them.
            known: the names that the graph has.
            taken: other names that are not free; receives those of new nodes.
            fact: what is known of a tensor of the graph.
            is_function: whether tensors are named as within functions.
            has_frames: whether the graph has loops of TensorFlow 1.
            stem: what names of new nodes begin with; the name of `like` by default.
        """
        self.device, self.stem = like.device, stem or like.name
        self.made: dict[str, TensorFact] = {}
        self.makers: dict[str, node_def_pb2.NodeDef] = {}
        self.new_nodes: list[tuple[node_def_pb2.NodeDef, NodeType, Sequence[TensorFact]]] = []
        self.read: set[str] = set()
        self._colocation = like.attr.get(COLOCATION)
        self._nodes, self._known, self._taken, self._fact = nodes, known, taken, fact
        self._is_function, self._has_frames = is_function, has_frames

    @property
    def op(self) -> _Ops:
        """Adds nodes, see above."""
        return _Ops(self.add)  # kept, it would keep the emitter from being freed at once

    def fact(self, tensor: str) -> TensorFact:
        """What is known of a tensor, new or old."""
        return self.made.get(tensor) or self._fact(tensor)

    def add(
        self,
        op: str,
        *inputs: str,
        name: str | None = None,
        shape: Shape | None = None,
        **attrs: Any,
    ) -> Any:
        """Adds a node as `op.NAME` does.

        Raises:
            ValueError: the op is not registered, or an attribute is missing.
        """
        facts = [self.fact(tensor) for tensor in inputs]
        dtypes = tuple(fact.dtype for fact in facts)
        prototype = prototype_of(op, dtypes, tuple(attrs.items()))
        return self._add(prototype, inputs, facts, op if name is None else name, shape, attrs)

    def copy(
        self,
        node: node_def_pb2.NodeDef,
        *inputs: str,
        name: str,
        op: str | None = None,
        shape: Shape | None = None,
    ) -> Any:
        """Adds a node with the op, if no other is given, and the attributes of another."""
        prototype = _finished(op or node.op, dict(node.attr))
        return self._add(prototype, inputs, [self.fact(t) for t in inputs], name, shape, {})

    def _add(
        self,
        prototype: Prototype,
        inputs: Sequence[str],
        facts: Sequence[TensorFact],
        name: str,
        shape: Shape | None,
        attrs: dict[str, Any],
    ) -> Any:
        node, node_type = self._nodes.add(), prototype.node_type  # type: ignore[attr-defined]
        node.CopyFrom(prototype.node)
        full = f"{self.stem}/{name}" if name else self.stem
        node.name = free = free_name(full, self._known, self._taken)
        self._taken.add(free)
        if self.device:
            node.device = self.device
        if self._colocation is not None:
            node.attr[COLOCATION].CopyFrom(self._colocation)
        self.new_nodes.append((node, node_type, facts))
        node.input.extend(inputs)
        self.read.update(inputs)
        shapes = list(shapes_of_outputs(node.op, [fact.shape for fact in facts], attrs))
        if shape is not None:
            shapes[:1] = [shape]
        tensors = []
        for port, slot in enumerate(node_type.layout.out_slots):
            known = shapes[port] if port < len(shapes) else None
            tensor = free + node_type.layout.suffix(port, named=self._is_function)
            self.made[tensor] = TensorFact(node_type.dtypes[slot], known)
            self.makers[tensor] = node
            tensors.append(tensor)
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    @property
    def shapes(self) -> dict[str, tuple[Shape | None, ...]]:
        """Name of a new node -> the static shapes of its outputs."""
        found: dict[str, tuple[Shape | None, ...]] = {}
        for tensor, fact in self.made.items():
            name = self.makers[tensor].name
            found[name] = (*found.get(name, ()), fact.shape)
        return found

    def wait(self, tensor: str, *others: str) -> None:
        """Lets the node that makes a new tensor wait for those that make other new ones."""
        self.makers[tensor].input.extend(f"^{self.makers[other].name}" for other in others)

    def constant(
        self, value: Any, *, name: str, beside: str, dtype: Any = None, shape: Shape | None = None
    ) -> str:
        """Adds a constant and returns its tensor.

        Args:
            value: the value, of float32 or int32 unless `dtype` says otherwise.
            name: what goes behind the stem.
            beside: a tensor that its reader reads as well. In a graph with loops of
                TensorFlow 1, a control input from the node that makes it keeps the constant in the
                frame of the loop.
            dtype: what NumPy is to make of the value.
            shape: all known; that of a tensor whose elements all have the one value.
        """
        array = np.asarray(value)
        if dtype is None:
            dtype = np.float32 if array.dtype.kind == "f" else np.int32
        array = array.astype(dtype, copy=False)
        if array.size > _FEW_ELEMENTS:
            prototype = _constant(array, shape)
        else:
            prototype = _small_constant(array.dtype.str, array.shape, array.tobytes(), shape)
        known = array.shape if shape is None else shape
        tensor: str = self._add(prototype, (), (), name, known, {})
        if self._has_frames:
            self.makers[tensor].input.append(f"^{beside.partition(':')[0]}")
        return tensor

    def length(self, tensor: str, axis: int, *, name: str) -> str:
        """Adds what tells the size of an axis when the graph runs, a vector of one number."""
        ends = (("begin", axis), ("end", axis + 1), ("step", 1))
        bounds = [self.constant([at], name=f"{name}_{end}", beside=tensor) for end, at in ends]
        sizes = self.add("Shape", tensor, name=f"{name}_of")
        return self.add("StridedSlice", sizes, *bounds, name=name, shape=(1,))

    def reshape(self, tensor: str, sizes: Shape, *, name: str, shape: Shape | None = None) -> str:
        """Adds a Reshape to certain sizes, of which one may be None, and returns its tensor.

        Args:
            tensor: what is reshaped.
            sizes: what it is reshaped to.
            name: of the Reshape; the constant has the same with "_shape" behind it.
            shape: its static shape, where more is known than `sizes` says.

        Raises:
            NoMatchError: two sizes are not known, or one beside a 0, or nothing shows that there
                are as many elements as all sizes ask for.
        """
        if not _follows(sizes):
            raise NoMatchError(f"more than one size of the shape {sizes} is not known")
        filled = [-1 if size is None else size for size in sizes]
        known: Any = self.fact(tensor).shape
        if None not in sizes and (known is None or None in known or prod(known) != prod(filled)):
            raise NoMatchError(f"{tensor!r} of shape {known} may not fit the shape {sizes}")
        wanted = self.constant(np.array(filled, np.int32), name=f"{name}_shape", beside=tensor)
        return self.add("Reshape", tensor, wanted, name=name, shape=shape or sizes)

    def reshape_like(self, tensor: str, like: str, *, name: str) -> str:
        """Adds a Reshape to the shape of the tensor `like`, as `reshape`."""
        shape = self.fact(like).shape
        if shape is not None and _follows(shape):
            return self.reshape(tensor, shape, name=name)
        wanted = self.add("Shape", like, name=f"{name}_shape")
        return self.add("Reshape", tensor, wanted, name=name, shape=shape)


def _follows(sizes: Shape) -> bool:
    """Whether the number of elements tells all sizes."""
    return sizes.count(None) <= (0 not in sizes)


class _Ops:
    """Makes `op.NAME(...)` of an emitter's `add`."""

    __slots__ = ("_add",)

    def __init__(self, add: Callable[..., Any]) -> None:
        self._add = add

    def __getattr__(self, op: str) -> Callable[..., Any]:
        return functools.partial(self._add, op)


@functools.lru_cache(maxsize=4096)
def prototype_of(
    op: str, dtypes: tuple[int, ...], chosen: tuple[tuple[str, Any], ...] = ()
) -> Prototype:
    """The node of an op for inputs of certain dtypes, with some attributes chosen."""
    op_def = _definition(op)
    attrs, kinds = dict(chosen), {attr.name: attr.type for attr in op_def.attr}
    variadic = [arg.number_attr for arg in op_def.input_arg if arg.number_attr]
    count = len(dtypes) - (len(op_def.input_arg) - len(variadic))
    position = 0
    for arg in op_def.input_arg:
        if arg.type_attr and position < len(dtypes):
            attrs.setdefault(arg.type_attr, dtypes[position])
        if arg.number_attr:
            attrs.setdefault(arg.number_attr, count)
        position += count if arg.number_attr else 1
    values = {}
    for name, value in attrs.items():
        values[name] = made = attr_value_pb2.AttrValue()
        setattr(made, _FIELDS[kinds[name]], value.encode() if isinstance(value, str) else value)
    return _finished(op, values)


def _definition(op: str) -> op_def_pb2.OpDef:
    op_type = registered_op_type(op)
    if op_type is None:
        raise ValueError(f"TensorFlow knows no op {op!r}")
    return op_type.op_def


def _finished(op: str, attrs: dict[str, attr_value_pb2.AttrValue]) -> Prototype:
    """A node with the op's defaults for what is not given."""
    node = node_def_pb2.NodeDef(op=op)
    for attr in _definition(op).attr:
        if attr.name in attrs:
            node.attr[attr.name].CopyFrom(attrs[attr.name])
        elif attr.HasField("default_value"):
            node.attr[attr.name].CopyFrom(attr.default_value)
        else:
            raise ValueError(f"a new {op} needs the attribute {attr.name!r}")
    node_type = NodeTypeTable().node_types_of([node])[0]
    return Prototype(node, node_type)


def _constant(value: np.ndarray, shape: Shape | None) -> Prototype:
    """A constant of some value, or of a shape whose elements all have the one value."""
    tensor = tensor_util.make_tensor_proto(value)
    for size in shape or ():
        tensor.tensor_shape.dim.add(size=size)
    dtype = attr_value_pb2.AttrValue(type=tensor.dtype)
    return _finished("Const", {"dtype": dtype, "value": attr_value_pb2.AttrValue(tensor=tensor)})


@functools.lru_cache(maxsize=1024)
def _small_constant(
    dtype: str, shape: tuple[int, ...], content: bytes, filled: Shape | None
) -> Prototype:
    return _constant(np.frombuffer(content, dtype).reshape(shape), filled)
