"""Weights stored in the target dtype: variables that all who read them would cast anyway.

A variable has many names in a SavedModel, see `variable_names`. All change together, or none does.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tensorflow.core.framework import types_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.protobuf.meta_graph_pb2 import MetaGraphDef
from tensorflow.core.protobuf.saved_object_graph_pb2 import SavedObjectGraph

from graph_passes.ir.eligibility import node_name
from tf_amp.conversion.bodies import Body, Node
from tf_amp.conversion.checkpoint import Checkpoint
from tf_amp.conversion.variable_classes import VariableClasses
from tf_amp.conversion.variable_uses import LOOKUPS, VariableUses, origin_of, with_identities
from tf_amp.hosts.offline import InferredShapes
from tf_amp.model_files import ModelError

_FLOAT = types_pb2.DT_FLOAT
_MAX_FLOAT16 = 65504.0


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
    uses = [
        VariableUses(number, meta, slots, target, embeddings) for number, meta in enumerate(metas)
    ]
    objects = checkpoint.object_graph()
    for number, meta in enumerate(metas):
        if objects is not None:
            for node, key in _keys_of_objects(meta.object_graph_def, objects):
                slots.join(("object", number, node), ("key", key))
    for each in uses:
        each.classify()
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
        found = Counter(reasons.values()) or Counter(slots.blocked.values())
        why = "; ".join(f"{count}: {each}" for each, count in found.most_common(3))
        why = why or "the model has no resource variable of float32"
        raise ModelError(f"No variable can be stored in the target dtype. {why}.")
    for number, each in enumerate(uses):
        _Retyping(number, each, slots, target).retype(chosen)
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


class _Retyping:
    """Gives variables of one MetaGraph the target dtype."""

    def __init__(
        self, number: int, uses: VariableUses, slots: VariableClasses, target: int
    ) -> None:
        self._number, self._uses, self._slots, self._target = number, uses, slots, target

    def retype(self, chosen: set[Hashable]) -> None:
        """Gives the variables of classes the target dtype.

        Raises:
            ModelError: TensorFlow does not take the result.
        """
        is_chosen = {
            slot: self._slots.find(slot) in chosen for slot in self._uses.names.resources.values()
        }
        changed: set[str] = set()
        for body in self._uses.bodies.values():
            if self._retype_body(body, is_chosen):
                changed.add(body.name)
        for number, node in enumerate(self._uses.meta.object_graph_def.nodes):
            slot = ("object", self._number, number)
            if node.WhichOneof("kind") == "variable" and self._slots.find(slot) in chosen:
                node.variable.dtype = self._target
        built = InferredShapes(self._uses.meta.graph_def)
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
            for (b, n), slot in self._uses.names.resources.items()
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
            elif node.op in LOOKUPS:
                self._retype_lookup(body, node, removed)
            elif node.op == "AssignVariableOp":
                node.attr["dtype"].type = target
                self._retype_value(body, node)
        body.remove(set(removed), controls=removed)
        return True

    def _retype_readers(self, body: Body, made: Node, removed: dict[str, str]) -> None:
        for source in with_identities(body, made):
            if source is not made:
                source.attr["T"].type = self._target
            for reader, position in list(body.readers.get(source.name, ())):
                if self._uses.is_cast(reader):
                    body.redirect(reader.name, body.first_output(source))
                    removed[reader.name] = source.name
                elif reader.op in LOOKUPS:
                    self._retype_lookup(body, reader, removed)
                elif reader.op == "SaveV2":
                    reader.attr["dtypes"].list.type[position - 3] = self._target
                elif reader.op == "Mul" or self._uses.is_aside(body, reader):
                    name = f"{source.name}-0-CastToFp32-0-AutoMixedPrecision"
                    cast = body.add_cast(name, reader.input[position], self._target, _FLOAT)
                    reader.input[position] = body.first_output(cast)

    def _retype_lookup(self, body: Body, node: Node, removed: dict[str, str]) -> None:
        node.attr[LOOKUPS[node.op]].type = self._target
        rows = body.first_output(node)
        readers = [reader for reader, _ in body.readers.get(node.name, ())]
        casts = [reader for reader in readers if self._uses.is_cast(reader)]
        if len(casts) < len(readers) or node.name in map(node_name, body.returned().values()):
            name = f"{node.name}-0-CastToFp32-0-AutoMixedPrecision"
            behind = body.add_cast(name, rows, self._target, _FLOAT)
            body.redirect(node.name, body.first_output(behind), but=(behind, *casts))
        for cast in casts:
            body.redirect(cast.name, rows)
            removed[cast.name] = node.name

    def _retype_value(self, body: Body, assign: Node) -> None:
        made, index, between = origin_of(body, assign.input[1])
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


def _short(dtype: int) -> str:
    return "float16" if dtype == types_pb2.DT_HALF else "bfloat16"
