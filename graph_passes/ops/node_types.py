"""What many nodes have in common: op type, layout and dtypes.

A graph of a hundred thousand nodes has a few hundred *node types*. Whatever depends on op and
dtypes alone (the list a slot is on, whether it has a kernel) is found out once a node type and
then spread over the nodes by number.
"""

from __future__ import annotations

import array
import dataclasses
import re
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from tensorflow.core.framework import node_def_pb2, op_def_pb2, types_pb2

from graph_passes.ops.op_types import NO_LAYOUT, Attrs, Layout, OpType, registered_op_type

COLOCATION = "_class"
"""The attribute that names the nodes with which a node must share a device."""
MARK = "_amp_rule"
"""The attribute by which a node says what it is to be: "action;where;why". Attributes whose names
begin with "_" are ignored by TensorFlow, and stay with a node when its graph is copied or saved."""
GRADIENT_SCOPE = re.compile(r"(?:^|/)gradient(?:_tape|s)(?:_\d+)?/")
"""What the names of gradients have in common: that of "a/MatMul" is "gradient_tape/a/MatMul/MatMul"
or, of `tf.gradients`, "gradients/a/MatMul_grad/MatMul", which counts where it is called again."""

WHOLE = frozenset((types_pb2.DT_INT32, types_pb2.DT_INT64, types_pb2.DT_BOOL))
"""The dtypes of sizes, axes, indices and conditions."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class NodeType:
    """One node type of node. Within a graph equal node_types are one object.

    Attributes:
        op: the op that nodes of this node type have.
        op_type: its op type, None where this TensorFlow does not know the op.
        layout: the slots of its ports; none for an unknown op.
        dtypes: for each slot its dtype.
        is_call: whether nodes of this node type call a function by an op named after it.
    """

    op: str
    op_type: OpType | None
    layout: Layout
    dtypes: tuple[int, ...]
    is_call: bool = False

    @property
    def has_effect(self) -> bool:
        """Whether a node may do more than make tensors; of an unknown op nobody knows."""
        return self.op_type is None or self.op_type.op_def.is_stateful or self.is_call

    @property
    def runs_functions(self) -> bool:
        """Whether nodes of this node type run functions whose bodies are not in the graph."""
        op_type = self.op_type
        return op_type is not None and op_type.runs_functions and not self.is_inlined_call

    @property
    def is_inlined_call(self) -> bool:
        """Whether the op stands for a call whose functions' bodies are in the graph too."""
        return self.op_type is not None and self.op_type.name != self.op


@dataclasses.dataclass(eq=False, slots=True)
class Family:
    """The node_types of one op.

    Attributes:
        op: the op.
        op_type: its op type, None where this TensorFlow does not know the op.
        key_of: gives the key of a node for its attrs, see `OpType.key_of`.
        type_attr: the attr whose dtype is that key, "" where it is made otherwise.
        first_output: see `OpType.first_output`.
        numbers: key -> the node type's number.
        known: key -> the node type, for those that are known from other graphs as well.
        is_function: whether the op is the name of a function.
    """

    op: str
    op_type: OpType | None
    is_function: bool = False
    known: dict[Hashable, NodeType] = dataclasses.field(default_factory=dict)
    key_of: Callable[[Attrs], Hashable] = lambda _: None
    type_attr: str = ""
    first_output: str = ""
    numbers: dict[Hashable, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        op_type = self.op_type
        if op_type is not None:
            self.key_of, self.type_attr = op_type.key_of, op_type.type_attr
            self.first_output = op_type.first_output
            self.known = op_type.node_types


_COLUMNS = 5


class SlotTables:
    """What the vertices and edges of a graph are made from, for each node type by its number.

    Attributes:
        dtypes: of the slots of all types, from 1 on.
        in_slots: for the inputs of all types, from 1 on, the type's slot that the input belongs to.
    """

    def __init__(self) -> None:
        self.dtypes, self.in_slots = (array.array("i", (0,)) for _ in range(2))
        self._rows = array.array("i")

    def add(self, node_types: Sequence[NodeType]) -> None:
        """Adds the node types behind those that were added before."""
        for node_type in node_types[len(self._rows) // _COLUMNS :]:
            layout = node_type.layout
            output = layout.out_slots[0] if layout.out_slots else -1
            arity = -1 if node_type.op_type is None else len(layout.in_slots)
            firsts = len(self.dtypes), len(self.in_slots)
            self._rows.extend((len(layout.slots), output, arity, *firsts))
            self.dtypes.extend(node_type.dtypes)
            self.in_slots.extend(layout.in_slots)

    def rows(self, node_types: array.array[int]) -> np.ndarray:
        """What is known of the types of some nodes, by their numbers; int32 [5, nodes].

        How many slots it has; its slot that output 0 belongs to, -1 without an output; how many
        inputs it has, -1 for an unknown op; and the numbers of its first slot and first input.
        """
        return np.asarray(self._rows).reshape(-1, _COLUMNS).T.take(node_types, axis=1)


class NodeTypeTable:
    """The node_types of the nodes of one graph or several, numbered as they are met.

    Attributes:
        node_types: the node_types by number.
        families: op -> its node_types.
        devices: device -> its number; the empty device has number 0.
    """

    def __init__(
        self, signature_of: Callable[[str], op_def_pb2.OpDef | None] = lambda _: None
    ) -> None:
        """Makes an empty table; `signature_of` gives the definition of an op that is a function."""
        self.node_types: list[NodeType] = []
        self.families: dict[str, Family] = {}
        self.devices: dict[str, int] = {"": 0}
        self._signature_of = signature_of
        self._slot_tables = SlotTables()

    @property
    def slot_tables(self) -> SlotTables:
        """Tables of the node types met so far."""
        self._slot_tables.add(self.node_types)
        return self._slot_tables

    def read(
        self, nodes: Sequence[node_def_pb2.NodeDef]
    ) -> tuple[list[Family], list[int], list[int], list[int]]:
        """For each of some nodes its family and its node type's number; the places of some nodes.

        These are the places of the nodes that are located, and of those that are marked.
        """
        known = self.families
        families = [known.get(op) or self._family(op) for op in [node.op for node in nodes]]
        numbers, located, marked = [], [], []
        for place, (family, node) in enumerate(zip(families, nodes, strict=True)):
            attrs = node.attr  # made anew by each reading
            if family.type_attr:
                value = attrs.get(family.type_attr)  # [] would write to a map that lacks the key
                key: Hashable = None if value is None else value.type
            else:
                key = family.key_of(attrs)
            number = family.numbers.get(key)
            numbers.append(self._add(family, key, node) if number is None else number)
            if COLOCATION in attrs:
                located.append(place)
            if MARK in attrs:
                marked.append(place)
        return families, numbers, located, marked

    def node_types_of(self, nodes: Sequence[node_def_pb2.NodeDef]) -> list[NodeType]:
        """The node_types of some nodes."""
        return [self.node_types[number] for number in self.read(nodes)[1]]

    def _family(self, op: str) -> Family:
        """The node_types of an op that has not been met yet."""
        function = self._signature_of(op)
        op_type = registered_op_type(op) if function is None else OpType(function)
        return self.families.setdefault(op, Family(op, op_type, function is not None))

    def define(self, op: str, op_type: OpType) -> None:
        """Makes an op known that is neither registered nor a function."""
        self.families[op] = Family(op, op_type)

    def _add(self, family: Family, key: Hashable, node: node_def_pb2.NodeDef) -> int:
        """Numbers the node type of a node that is the first with its key."""
        node_type = family.known.get(key)
        if node_type is None:
            node_type = family.known[key] = _read_node_type(family, node)
        number = family.numbers[key] = len(self.node_types)
        self.node_types.append(node_type)
        return number


def _read_node_type(family: Family, node: node_def_pb2.NodeDef) -> NodeType:
    op_type = family.op_type
    if op_type is None:
        return NodeType(family.op, None, NO_LAYOUT, ())
    layout = op_type.layout_of(node)
    dtypes = tuple(op_type.dtype_of(node, slot) for slot in layout.slots)
    return NodeType(family.op, op_type, layout, dtypes, family.is_function)
