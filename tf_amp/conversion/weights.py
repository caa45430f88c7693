"""Weights stored in the target dtype: variables that all who read them would cast anyway.

A variable has many names in a SavedModel, see `variable_names`. All change together, or none does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tensorflow.core.framework import types_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.protobuf.meta_graph_pb2 import MetaGraphDef
from tensorflow.core.protobuf.saved_object_graph_pb2 import SavedObjectGraph

from graph_passes.functions.call_tree import CALL_KINDS
from graph_passes.ir.eligibility import node_name
from tf_amp.conversion.bodies import Body, Node, bodies_of, type_of
from tf_amp.conversion.checkpoint import Checkpoint
from tf_amp.conversion.graphs import names_in
from tf_amp.conversion.variable_classes import VariableClasses
from tf_amp.conversion.variable_names import VariableNames
from tf_amp.hosts.offline import InferredShapes
from tf_amp.model_files import ModelError

_FLOAT = types_pb2.DT_FLOAT
_MAX_FLOAT16 = 65504.0
_LOOKUPS = {"ResourceGather": "dtype", "GatherV2": "Tparams", "Gather": "Tparams"}
"""What takes rows of its first input -> the attr for the dtype of these."""
# They take a handle and do not care for the dtype.
_NEUTRAL = frozenset(
    ("VarIsInitializedOp", "DestroyResourceOp", "DisableCopyOnRead", "VariableShape", "NoOp")
)


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """Which variables changed.

    Attributes:
        reasons: for each float32 variable of the checkpoint why it stays as it is, "" where it is
            in the target dtype now.
        keys: those that are, by their keys in the checkpoint.
    """

    reasons: Mapping[str, str]
    keys: frozenset[str]


def retype_variables(
    metas: Sequence[MetaGraphDef], prefix: Path, target: int, *, embeddings: bool = False
) -> StoredWeights:
    """Gives variables the target dtype in the graphs of a SavedModel, which are changed in place.

    A variable is given it if every read of it is cast to the target dtype, or is a factor of a
    product that is (the weights of a convolution that a batch normalization was folded into), or is
    none that a signature needs, and nothing writes it but loading and initializing.

    Rows that are looked up count as read in the target dtype where all that read them are casts to
    it; with `embeddings` everywhere, by a cast behind the lookup.

    Args:
        metas: the graphs, with their products converted already.
        prefix: of the checkpoint that they share.
        target: a value of `types_pb2.DataType`.
        embeddings: whether tables are stored so whose rows are used in float32, which rounds them.

    Raises:
        ModelError: the checkpoint cannot be read, or no variable can be changed.
    """
    checkpoint = Checkpoint(prefix)
    slots = VariableClasses()
    graphs = [
        _Variables(number, meta, slots, target, embeddings) for number, meta in enumerate(metas)
    ]
    objects = checkpoint.object_graph()
    for number, meta in enumerate(metas):
        if objects is not None:
            for node, key in _keys_of_objects(meta.object_graph_def, objects):
                slots.join(("object", number, node), ("key", key))
    for graph in graphs:
        graph.find_uses()
    members = slots.members()
    chosen: set[Hashable] = set()
    reasons: dict[str, str] = {}
    for root, names in members.items():
        keys = [str(name[1]) for name in names if name[0] == "key"]
        if not any(checkpoint.dtypes.get(key) == np.float32 for key in keys):
            continue
        why = slots.blocked.get(root) or ("" if root in slots.wanted else "no product reads it")
        if not why and target == types_pb2.DT_HALF:
            why = _out_of_range(checkpoint, keys)
        reasons.update(dict.fromkeys(keys, why))
        if not why:
            chosen.add(root)
    if not chosen:
        most = next(iter(reasons.values()), "there are none")
        raise ModelError(f"No variable can be stored in the target dtype: {most}.")
    for graph in graphs:
        graph.retype(chosen)
    return StoredWeights(reasons, frozenset(key for key, why in reasons.items() if not why))


def _out_of_range(checkpoint: Checkpoint, keys: Sequence[str]) -> str:
    for key in keys:
        values = np.abs(checkpoint.read(key))
        if values.size and np.max(values, initial=0, where=np.isfinite(values)) > _MAX_FLOAT16:
            return "it has values that float16 cannot hold"
    return ""


def _keys_of_objects(saved: SavedObjectGraph, objects: object) -> Iterator[tuple[int, str]]:
    """Walks both object graphs side by side: variable -> key in the checkpoint."""
    pending, seen = [(0, 0)], set()
    stored = objects.nodes  # type: ignore[attr-defined]
    while pending:
        pair = pending.pop()
        if pair in seen or pair[0] >= len(saved.nodes) or pair[1] >= len(stored):
            continue
        seen.add(pair)
        node, other = saved.nodes[pair[0]], stored[pair[1]]
        if node.WhichOneof("kind") == "variable":
            for attribute in other.attributes:
                yield pair[0], attribute.checkpoint_key
        children = {child.local_name: child.node_id for child in other.children}
        pending.extend(
            (child.node_id, children[child.local_name])
            for child in node.children
            if child.local_name in children
        )


class _Variables:
    """The variables of one MetaGraph and all that is done with them."""

    def __init__(
        self,
        number: int,
        meta: MetaGraphDef,
        slots: VariableClasses,
        target: int,
        embeddings: bool,
    ) -> None:
        self._number, self._meta, self._slots, self._target = number, meta, slots, target
        self._embeddings = embeddings
        self._bodies = {body.name: body for body in bodies_of(meta.graph_def)}
        self._names = VariableNames(number, meta, self._bodies, slots)
        self._preserved = {
            node_name(name)
            for signature in meta.signature_def.values()
            for info in (*signature.inputs.values(), *signature.outputs.values())
            for name in names_in(info)
        }

    def find_uses(self) -> None:
        """Looks at all that is done with variables, and joins, blocks and wants them for it."""
        for body in self._bodies.values():
            tensors = {node_name(t) for t in body.returned().values()}
            for node in body.nodes.values():
                if node.op in CALL_KINDS or node.op in _NEUTRAL or node.op == "Identity":
                    continue
                for position, reference in enumerate(node.input):
                    slot = None if reference.startswith("^") else self._names.slot(body, reference)
                    if slot is None:
                        continue
                    if node.op == "ReadVariableOp":
                        self._classify_readers(body, node, slot, tensors)
                    elif node.op == "AssignVariableOp" and position == 0:
                        self._classify_value(body, node, slot)
                    elif self._is_lookup(body, node, position, tensors):
                        self._slots.want(slot)
                    else:
                        self._slots.block(slot, f"{node.op} works on it")
            if body.name in self._meta.object_graph_def.concrete_functions:
                for name in tensors:
                    if (slot := self._names.slot(body, name)) is not None:
                        self._slots.block(slot, "a function gives it back")

    def _classify_readers(self, body: Body, made: Node, slot: Hashable, returned: set[str]) -> None:
        for source in _with_identities(body, made):
            if source.name in returned or (not body.is_function and source.name in self._preserved):
                self._slots.block(slot, "its value is an output")
            for reader, position in body.readers.get(source.name, ()):
                if (
                    self._is_cast(reader)
                    or self._is_folded(body, reader, returned)
                    or self._is_lookup(body, reader, position, returned)
                ):
                    self._slots.want(slot)
                elif reader.op == "AssignVariableOp" and position == 1:
                    other = self._names.slot(body, reader.input[0])
                    if other is None:
                        self._slots.block(slot, "it is assigned to a variable")
                    else:
                        self._slots.join(slot, other)
                elif reader.op not in ("SaveV2", "Identity") and not self._is_aside(body, reader):
                    self._slots.block(slot, f"{reader.op} reads it in float32")

    def _is_aside(self, body: Body, node: Node) -> bool:
        """Whether no signature computes it: a regularization loss in a graph of TensorFlow 1."""
        return bool(self._preserved) and not body.is_function and node.name not in self._served

    @functools.cached_property
    def _served(self) -> set[str]:
        """The nodes of the main graph that signatures need."""
        nodes = self._bodies[""].nodes
        found: set[str] = set()
        pending = [name for name in self._preserved if name in nodes]
        for name in pending:
            if name not in found:
                found.add(name)
                pending.extend(filter(nodes.__contains__, map(node_name, nodes[name].input)))
        return found

    def _is_cast(self, node: Node) -> bool:
        casts = (_FLOAT, self._target)
        return node.op == "Cast" and (type_of(node, "SrcT"), type_of(node, "DstT")) == casts

    def _is_folded(self, body: Body, node: Node, returned: set[str]) -> bool:
        readers = body.readers.get(node.name, ())
        return (
            node.op == "Mul"
            and bool(readers)
            and node.name not in returned
            and all(self._is_cast(reader) for reader, _ in readers)
        )

    def _is_lookup(self, body: Body, node: Node, position: int, returned: set[str]) -> bool:
        if node.op not in _LOOKUPS or position or node.name in self._preserved:
            return False
        if self._embeddings:
            return True
        readers = body.readers.get(node.name, [])
        are_cast = bool(readers) and all(self._is_cast(reader) for reader, _ in readers)
        return are_cast and node.name not in returned

    def _classify_value(self, body: Body, assign: Node, slot: Hashable) -> None:
        made, index, _ = self._behind(body, assign.input[1])
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

    def _behind(self, body: Body, reference: str) -> tuple[Node | None, int, list[Node]]:
        """What makes a tensor, the number of the output, and the Identity nodes between."""
        between: list[Node] = []
        made = body.nodes.get(node_name(reference))
        while made is not None and made.op == "Identity" and made.input and made not in between:
            between.append(made)
            reference = made.input[0]
            made = body.nodes.get(node_name(reference))
        last = reference.rpartition(":")[2]
        return made, int(last) if last.isdecimal() and ":" in reference else 0, between

    def retype(self, chosen: set[Hashable]) -> None:
        """Gives the variables of classes the target dtype.

        Raises:
            ModelError: TensorFlow does not take the result.
        """
        is_chosen = {
            slot: self._slots.find(slot) in chosen for slot in self._names.resources.values()
        }
        changed: set[str] = set()
        for body in self._bodies.values():
            if self._retype_body(body, is_chosen):
                changed.add(body.name)
        for number, node in enumerate(self._meta.object_graph_def.nodes):
            slot = ("object", self._number, number)
            if node.WhichOneof("kind") == "variable" and self._slots.find(slot) in chosen:
                node.variable.dtype = self._target
        built = InferredShapes(self._meta.graph_def)
        failed = "the graph" if built.graph is None else ""
        for name in sorted(changed - {""}):
            failed = failed or ("" if built.of_function(name) else f"the function {name}")
        if failed:
            raise ModelError(
                f"With weights in the target dtype TensorFlow does not take {failed}. Convert "
                "without weights."
            )

    def _retype_body(self, body: Body, is_chosen: Mapping[Hashable, bool]) -> bool:
        proto, target = body.proto, self._target
        here = {
            n
            for (b, n), slot in self._names.resources.items()
            if b == body.name and is_chosen[slot]
        }
        if not here:
            return False
        if isinstance(proto, FunctionDef):
            for arg in proto.signature.input_arg:
                if arg.name in here:
                    for data in arg.handle_data:
                        data.dtype = target
        removed: dict[str, str] = {}
        for node in list(body.nodes.values()):
            if node.op == "VarHandleOp" and node.name in here:
                node.attr["dtype"].type = target
            elif not node.input or node_name(node.input[0]) not in here:
                continue
            elif node.op == "ReadVariableOp":
                node.attr["dtype"].type = target
                self._retype_readers(body, node, removed)
            elif node.op in _LOOKUPS:
                self._retype_lookup(body, node, removed)
            elif node.op == "AssignVariableOp":
                node.attr["dtype"].type = target
                self._retype_value(body, node)
        body.remove(set(removed), controls=removed)
        return True

    def _retype_readers(self, body: Body, made: Node, removed: dict[str, str]) -> None:
        for source in _with_identities(body, made):
            if source is not made:
                source.attr["T"].type = self._target
            for reader, position in list(body.readers.get(source.name, ())):
                if self._is_cast(reader):
                    body.redirect(reader.name, body.first_output(source))
                    removed[reader.name] = source.name
                elif reader.op in _LOOKUPS:
                    self._retype_lookup(body, reader, removed)
                elif reader.op == "SaveV2":
                    reader.attr["dtypes"].list.type[position - 3] = self._target
                elif reader.op == "Mul" or self._is_aside(body, reader):
                    name = f"{source.name}-0-CastToFp32-0-AutoMixedPrecision"
                    cast = body.add_cast(name, reader.input[position], self._target, _FLOAT)
                    reader.input[position] = body.first_output(cast)

    def _retype_lookup(self, body: Body, node: Node, removed: dict[str, str]) -> None:
        node.attr[_LOOKUPS[node.op]].type = self._target
        rows = body.first_output(node)
        readers = [reader for reader, _ in body.readers.get(node.name, ())]
        casts = [reader for reader in readers if self._is_cast(reader)]
        if len(casts) < len(readers) or node.name in map(node_name, body.returned().values()):
            name = f"{node.name}-0-CastToFp32-0-AutoMixedPrecision"
            behind = body.add_cast(name, rows, self._target, _FLOAT)
            body.redirect(node.name, body.first_output(behind), but=(behind, *casts))
        for cast in casts:
            body.redirect(cast.name, rows)
            removed[cast.name] = node.name

    def _retype_value(self, body: Body, assign: Node) -> None:
        made, index, between = self._behind(body, assign.input[1])
        if made is not None and made.op == "ReadVariableOp":
            return
        if made is None or made.op != "RestoreV2":  # the initial value
            name = f"{assign.name}/{_short(self._target)}"
            cast = body.add_cast(name, assign.input[1], _FLOAT, self._target)
            assign.input[1] = body.first_output(cast)
            return
        made.attr["dtypes"].list.type[index] = self._target
        for node in between:
            node.attr["T"].type = self._target


def _with_identities(body: Body, made: Node) -> list[Node]:
    """A node with the Identity nodes behind it."""
    found = [made]
    for source in found:
        behind = (reader for reader, _ in body.readers.get(source.name, ()))
        found.extend(node for node in behind if node.op == "Identity" and node not in found)
    return found


def _short(dtype: int) -> str:
    return "float16" if dtype == types_pb2.DT_HALF else "bfloat16"


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
