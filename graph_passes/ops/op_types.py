"""What an op type's definition says about the dtypes of its ports.

A *slot* is one type attribute of one node: a `type` attr, one entry of a `list(type)` attr, or the
fixed dtype of ports that no attr names. A *layout* maps the input and output ports of a node to
its slots. Most op types have one layout; those with variadic ports have one per arity, cached.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeAlias

from tensorflow.core.framework import attr_value_pb2, node_def_pb2, op_def_pb2, types_pb2
from tensorflow.python.framework import op_def_registry

Attrs: TypeAlias = Mapping[str, attr_value_pb2.AttrValue]
"""The attrs of a node, by name."""

SINGLE = -1
"""`Slot.index` of a slot that is not an entry of a list."""

_ONEDNN_PREFIX = "_MklNative"
FILTER_AND_BIAS = f"{_ONEDNN_PREFIX}Conv2DBackpropFilterWithBias"
"""oneDNN's op for the gradients of a convolution's filter and bias."""

_WITHOUT_LAYOUT = {
    f"_Mkl{op}": op for op in ("BatchMatMul", "BatchMatMulV2", "Einsum", "MatMul", "Softmax")
}
"""oneDNN's op -> the other, where no layout of an image tells those apart that work in its own."""


def of_onednn(op: str) -> str:
    """The op that oneDNN's kernel alone runs, in place of one that others run too."""
    plain = f"_Mkl{op}"
    return plain if plain in _WITHOUT_LAYOUT else _ONEDNN_PREFIX + op


def stands_for(op: str) -> str:
    """The op of a program in whose place an op is, itself for all but oneDNN's."""
    if op == FILTER_AND_BIAS:
        return "Conv2DBackpropFilter"
    return _WITHOUT_LAYOUT.get(op) or op.removeprefix(_ONEDNN_PREFIX)


class Slot(NamedTuple):
    """One type attribute of a node.

    Attributes:
        attr: name of the attr, "" for ports whose dtype the op definition fixes.
        index: position within a `list(type)` attr, else `SINGLE`.
        fixed: the dtype that the op definition fixes, else DT_INVALID.
    """

    attr: str
    index: int = SINGLE  # type: ignore[assignment]  # hides tuple.index, which is not used
    fixed: int = types_pb2.DT_INVALID

    def __str__(self) -> str:
        """The name used in reports: `T`, `Tin[2]`, or the fixed dtype's."""
        if not self.attr:
            return types_pb2.DataType.Name(self.fixed)
        return self.attr if self.index == SINGLE else f"{self.attr}[{self.index}]"


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """Which slot each port of a node belongs to."""

    slots: tuple[Slot, ...]
    in_slots: tuple[int, ...]
    out_slots: tuple[int, ...]
    output_offsets: Mapping[str, int]

    @property
    def is_output(self) -> list[bool]:
        """For each slot whether an output has it."""
        made = set(self.out_slots)
        return [slot in made for slot in range(len(self.slots))]

    def port(self, name: str) -> int:
        """The output that a name stands for: "2" in a GraphDef, "arg:1" in a function; "" is 0.

        -1 for a name that stands for none; of an op that is not known every argument may be one.
        """
        if not name or name.isdigit():
            return int(name or 0)
        arg, _, entry = name.partition(":")
        if (entry and not entry.isdigit()) or (self.slots and arg not in self.output_offsets):
            return -1
        return self.output_offsets.get(arg, 0) + int(entry or 0)

    def suffix(self, port: int, *, named: bool) -> str:
        """What stands behind a node's name in that of an output, named by argument in functions."""
        if not named:
            return f":{port}" if port else ""
        arg, first = [each for each in self.output_offsets.items() if each[1] <= port][-1]
        return f":{arg}:{port - first}"


NO_LAYOUT = Layout((), (), (), {})


class OpType:
    """An op type, resolved once for all nodes that have it.

    Attributes:
        name: the op type.
        op_def: its definition.
        layout: the layout of every node of this type, None where it depends on the node.
        type_attr: the attr whose dtype alone decides them, "" where there is no such attr.
        key_of: gives for a node's attrs what decides its layout and dtypes, as one hashable value.
        first_output: what within functions stands behind a node's name in that of its output 0;
            "" where no node of this type has an output.
        runs_functions: whether nodes of this type name functions that they run (While, If ...).
        node_types: by key, what all graphs so far have had of it (`node_types.NodeType`).
    """

    def __init__(self, op_def: op_def_pb2.OpDef) -> None:
        self.name = op_def.name
        self.op_def = op_def
        self._defaults = {
            attr.name: attr.default_value for attr in op_def.attr if attr.HasField("default_value")
        }
        numbers = {arg.number_attr for arg in (*op_def.input_arg, *op_def.output_arg)} - {""}
        lists = {attr.name for attr in op_def.attr if attr.type == "list(type)"}
        types = tuple(attr.name for attr in op_def.attr if attr.type == "type")
        self._arity_attrs = tuple(sorted(numbers)), tuple(sorted(lists))
        self.key_of = _key_reader(types, *self._arity_attrs)
        self.type_attr = types[0] if len(types) == 1 and not numbers and not lists else ""
        self.first_output = next((f":{arg.name}:0" for arg in op_def.output_arg), "")
        self.runs_functions = any(attr.type in ("func", "list(func)") for attr in op_def.attr)
        self.node_types: dict[Hashable, Any] = {}
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self.layout: Layout | None = None
        if not numbers and not lists:
            self.layout = self._build(lambda _: 0)

    @functools.cached_property
    def is_pure(self) -> bool:
        """Whether nodes of this type only make tensors of tensors: no state, no ref variables."""
        args = (*self.op_def.input_arg, *self.op_def.output_arg)
        return not (self.op_def.is_stateful or any(arg.is_ref for arg in args))

    def attr(self, node: node_def_pb2.NodeDef, name: str) -> attr_value_pb2.AttrValue:
        """The node's attr, or the op definition's default where the node leaves it out."""
        value = node.attr.get(name)  # [] would write to a map that lacks the key
        if value is None:
            value = self._defaults.get(name)
        return attr_value_pb2.AttrValue() if value is None else value

    def layout_of(self, node: node_def_pb2.NodeDef) -> Layout:
        """The layout of one node, cached by its arity."""
        if self.layout is not None:
            return self.layout
        numbers, lists = self._arity_attrs
        counts = {name: self.attr(node, name).i for name in numbers}
        counts.update((name, len(self.attr(node, name).list.type)) for name in lists)
        key = tuple(counts.values())
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._build(counts.__getitem__)
        return layout

    def dtype_of(self, node: node_def_pb2.NodeDef, slot: Slot) -> int:
        """The dtype that a node's slot holds (a value of `types_pb2.DataType`)."""
        if not slot.attr:
            return slot.fixed
        value = self.attr(node, slot.attr)
        return value.type if slot.index == SINGLE else value.list.type[slot.index]

    def allows(self, slot: Slot, dtype: int) -> bool:
        """Whether the op definition lets a slot hold a dtype."""
        for attr in self.op_def.attr:
            if attr.name == slot.attr:
                legal = attr.allowed_values.list.type
                return not legal or dtype in legal
        return slot.fixed == dtype

    def _build(self, count: Callable[[str], int]) -> Layout:
        slots: list[Slot] = []
        position: dict[Slot, int] = {}

        def place(slot: Slot) -> int:
            if slot not in position:
                position[slot] = len(slots)
                slots.append(slot)
            return position[slot]

        def ports(arg: op_def_pb2.OpDef.ArgDef) -> list[int]:
            if arg.type_list_attr:
                entries = range(count(arg.type_list_attr))
                return [place(Slot(arg.type_list_attr, entry)) for entry in entries]
            slot = Slot(arg.type_attr) if arg.type_attr else Slot("", SINGLE, arg.type)
            return [place(slot)] * (count(arg.number_attr) if arg.number_attr else 1)

        in_slots = [port for arg in self.op_def.input_arg for port in ports(arg)]
        out_slots: list[int] = []
        offsets: dict[str, int] = {}
        for arg in self.op_def.output_arg:
            offsets[arg.name] = len(out_slots)
            out_slots.extend(ports(arg))
        # Attrs without a port (TensorListReserve's element_dtype) are slots as well.
        for attr in self.op_def.attr:
            if attr.type == "type":
                place(Slot(attr.name))
            elif attr.type == "list(type)":
                for entry in range(count(attr.name)):
                    place(Slot(attr.name, entry))
        return Layout(tuple(slots), tuple(in_slots), tuple(out_slots), offsets)


def _key_reader(
    types: tuple[str, ...], numbers: tuple[str, ...], lists: tuple[str, ...]
) -> Callable[[Attrs], Hashable]:
    """Makes `OpType.key_of`. An attr that a node leaves out counts as None.

    This is read for every node of a graph, but where one attr decides (`OpType.type_attr`).
    """

    def some_types(attrs: Attrs) -> Hashable:
        get = attrs.get  # [] would write to a map that lacks the key
        return tuple([None if (value := get(name)) is None else value.type for name in types])

    def anything(attrs: Attrs) -> Hashable:
        get = attrs.get
        counts = (None if (value := get(name)) is None else value.i for name in numbers)
        listed = (None if (value := get(name)) is None else (*value.list.type,) for name in lists)
        return (some_types(attrs), *counts, *listed)

    return anything if numbers or lists else some_types


_REGISTERED: dict[str, OpType] = {}


def registered_op_type(name: str) -> OpType | None:
    """The op type of that name in the running TensorFlow, or None where there is none.

    Only known names are remembered: a library of custom ops may be loaded later.
    """
    known = _REGISTERED.get(name)
    if known is None and (op_def := op_def_registry.get(name)) is not None:
        known = _REGISTERED.setdefault(name, OpType(op_def))
    return known
