"""What the graphs of a SavedModel do with variables, and which of them that lets change."""

from __future__ import annotations

import functools
from collections.abc import Hashable

from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf.meta_graph_pb2 import MetaGraphDef

from graph_passes.functions.call_tree import CALL_KINDS
from graph_passes.ir.eligibility import node_name
from tf_amp.conversion.bodies import Body, Node, bodies_of, type_of
from tf_amp.conversion.graphs import names_in
from tf_amp.conversion.variable_classes import VariableClasses
from tf_amp.conversion.variable_names import VariableNames

_FLOAT = types_pb2.DT_FLOAT
LOOKUPS = {"ResourceGather": "dtype", "GatherV2": "Tparams", "Gather": "Tparams"}
"""What takes rows of its first input -> the attr for the dtype of these."""
# They take a handle and do not care for the dtype.
_NEUTRAL = frozenset(
    ("VarIsInitializedOp", "DestroyResourceOp", "DisableCopyOnRead", "VariableShape", "NoOp")
)


class VariableUses:
    """The variables of one MetaGraph and all that is done with them.

    Attributes:
        meta: the MetaGraph.
        bodies: its main graph, named "", and its functions.
        names: which names of a variable are one.
    """

    def __init__(
        self,
        number: int,
        meta: MetaGraphDef,
        slots: VariableClasses,
        target: int,
        embeddings: bool,
    ) -> None:
        """Reads the names of variables.

        Args:
            number: of the MetaGraph.
            meta: as above.
            slots: receives the names, and what uses of them say.
            target: the dtype that weights are to be stored in.
            embeddings: whether tables are stored so whose rows are used in float32.
        """
        self.meta, self._slots, self._target = meta, slots, target
        self._embeddings = embeddings
        self.bodies = {body.name: body for body in bodies_of(meta.graph_def)}
        self.names = VariableNames(number, meta, self.bodies, slots)
        self._preserved = {
            node_name(name)
            for signature in meta.signature_def.values()
            for info in (*signature.inputs.values(), *signature.outputs.values())
            for name in names_in(info)
        }

    def classify(self) -> None:
        """Looks at all that is done with variables, and joins, blocks and wants them for it."""
        for body in self.bodies.values():
            tensors = {node_name(t) for t in body.returned().values()}
            for node in body.nodes.values():
                if node.op in CALL_KINDS or node.op in _NEUTRAL or node.op == "Identity":
                    continue
                for position, reference in enumerate(node.input):
                    slot = None if reference.startswith("^") else self.names.slot(body, reference)
                    if slot is None:
                        continue
                    if node.op == "ReadVariableOp":
                        self._classify_readers(body, node, slot, tensors)
                    elif node.op == "AssignVariableOp" and position == 0:
                        self._classify_value(body, node, slot)
                    elif self._is_lookup(body, node, position, tensors):
                        self._slots.want(slot)
                    else:
                        self._slots.block(slot, self._reason(node, position, "works on it"))
            if body.name in self.meta.object_graph_def.concrete_functions:
                for name in tensors:
                    if (slot := self.names.slot(body, name)) is not None:
                        self._slots.block(slot, "a function gives it back")

    def _classify_readers(self, body: Body, made: Node, slot: Hashable, returned: set[str]) -> None:
        for source in with_identities(body, made):
            if source.name in returned or (not body.is_function and source.name in self._preserved):
                self._slots.block(slot, "its value is an output")
            for reader, position in body.readers.get(source.name, ()):
                if (
                    self.is_cast(reader)
                    or self._is_folded(body, reader, returned)
                    or self._is_lookup(body, reader, position, returned)
                ):
                    self._slots.want(slot)
                elif reader.op == "AssignVariableOp" and position == 1:
                    other = self.names.slot(body, reader.input[0])
                    if other is None:
                        self._slots.block(slot, "it is assigned to a variable")
                    else:
                        self._slots.join(slot, other)
                elif reader.op not in ("SaveV2", "Identity") and not self.is_aside(body, reader):
                    self._slots.block(slot, self._reason(reader, position, "reads it in float32"))

    def _reason(self, node: Node, position: int, otherwise: str) -> str:
        """Why a variable that a node takes stays float32, and the remedy where there is one."""
        if node.op in LOOKUPS and position == 0 and not self._embeddings:
            return f"{node.op} gives its rows to float32 ops, see --embeddings"
        return f"{node.op} {otherwise}"

    def is_aside(self, body: Body, node: Node) -> bool:
        """Whether no signature computes it: a regularization loss in a graph of TensorFlow 1."""
        return bool(self._preserved) and not body.is_function and node.name not in self._served

    @functools.cached_property
    def _served(self) -> set[str]:
        """The nodes of the main graph that signatures need."""
        nodes = self.bodies[""].nodes
        found: set[str] = set()
        pending = [name for name in self._preserved if name in nodes]
        for name in pending:
            if name not in found:
                found.add(name)
                pending.extend(filter(nodes.__contains__, map(node_name, nodes[name].input)))
        return found

    def is_cast(self, node: Node) -> bool:
        """Whether a node casts float32 to the target dtype."""
        casts = (_FLOAT, self._target)
        return node.op == "Cast" and (type_of(node, "SrcT"), type_of(node, "DstT")) == casts

    def _is_folded(self, body: Body, node: Node, returned: set[str]) -> bool:
        readers = body.readers.get(node.name, ())
        return (
            node.op == "Mul"
            and bool(readers)
            and node.name not in returned
            and all(self.is_cast(reader) for reader, _ in readers)
        )

    def _is_lookup(self, body: Body, node: Node, position: int, returned: set[str]) -> bool:
        if node.op not in LOOKUPS or position or node.name in self._preserved:
            return False
        if self._embeddings:
            return True
        readers = body.readers.get(node.name, [])
        are_cast = bool(readers) and all(self.is_cast(reader) for reader, _ in readers)
        return are_cast and node.name not in returned

    def _classify_value(self, body: Body, assign: Node, slot: Hashable) -> None:
        made, index, _ = origin_of(body, assign.input[1])
        if made is not None and made.op == "RestoreV2":
            key = _restored_key(body, made, index)
            if key is None:
                self._slots.block(slot, "it is stored in slices")
            else:
                self._slots.join(slot, ("key", key))
        elif made is not None and made.op == "ReadVariableOp":
            return  # joined by its readers
        elif body.is_function:
            self._slots.block(slot, "a function sets it")


def with_identities(body: Body, made: Node) -> list[Node]:
    """A node with the Identity nodes behind it."""
    found = [made]
    for source in found:
        behind = (reader for reader, _ in body.readers.get(source.name, ()))
        found.extend(node for node in behind if node.op == "Identity" and node not in found)
    return found


def origin_of(body: Body, reference: str) -> tuple[Node | None, int, list[Node]]:
    """What makes a tensor, the number of the output, and the Identity nodes between."""
    between: list[Node] = []
    made = body.nodes.get(node_name(reference))
    while made is not None and made.op == "Identity" and made.input and made not in between:
        between.append(made)
        reference = made.input[0]
        made = body.nodes.get(node_name(reference))
    last = reference.rpartition(":")[2]
    return made, int(last) if last.isdecimal() and ":" in reference else 0, between


def _restored_key(body: Body, restore: Node, index: int) -> str | None:
    """The key of the checkpoint that an output is read from, None for a slice."""
    found = []
    for reference in restore.input[1:3]:
        constant = body.nodes.get(node_name(reference))
        if constant is None or constant.op != "Const":
            return None
        values = constant.attr["value"].tensor.string_val
        if not values:
            return None
        # Equal values at the end may be written once.
        found.append(values[min(index, len(values) - 1)].decode())
    key, part = found
    return None if part else key
