"""What names a variable in a SavedModel.

It has many: handles in the main graph, arguments of functions, an object, a key of the checkpoint.
Those that may be one variable, or of which a function takes now this and now that one, form a
class of `VariableClasses`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from tensorflow.core.framework import types_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.protobuf.meta_graph_pb2 import MetaGraphDef

from graph_passes.functions.call_tree import CALL_KINDS, function_names
from graph_passes.ir.eligibility import node_name
from tf_amp.conversion.bodies import Body, Node
from tf_amp.conversion.variable_classes import VariableClasses

_RESOURCE = types_pb2.DT_RESOURCE


class VariableNames:
    """The names of variables in one MetaGraph.

    Attributes:
        resources: (body, node or argument that is a handle) -> the name of the variable.
    """

    def __init__(
        self, number: int, meta: MetaGraphDef, bodies: Mapping[str, Body], slots: VariableClasses
    ) -> None:
        """Finds them.

        Args:
            number: the graph's, since names of two graphs differ.
            meta: the graph.
            bodies: its bodies by their names.
            slots: is told which names may mean one variable, and what must stay float32.
        """
        self._number, self._meta, self._bodies, self._slots = number, meta, bodies, slots
        self.resources: dict[tuple[str, str], Hashable] = {}
        for body in bodies.values():
            self._find_handles(body)
        for body in bodies.values():
            self._join_calls(body)
        self._join_bound_inputs()

    def _find_handles(self, body: Body) -> None:
        proto = body.proto
        if isinstance(proto, FunctionDef):
            for position, arg in enumerate(proto.signature.input_arg):
                if arg.type == _RESOURCE:
                    slot = ("argument", self._number, body.name, position)
                    self.resources[body.name, arg.name] = slot
        for node in body.nodes.values():
            if node.op == "VarHandleOp":
                shared, container = (_text(node, name) for name in ("shared_name", "container"))
                where = "" if shared else body.name
                shared = shared or node.name.encode()
                slot = ("handle", self._number, container, shared, where)  # type: ignore[assignment]
                self.resources[body.name, node.name] = slot
        pending = [n for n in body.nodes.values() if n.op == "Identity"]
        while True:  # a chain of them may stand in any order
            left = [n for n in pending if not self._follow(body, n)]
            if len(left) == len(pending):
                return
            pending = left

    def _follow(self, body: Body, node: Node) -> bool:
        slot = self.resources.get((body.name, node_name(node.input[0]))) if node.input else None
        if slot is not None:
            self.resources[body.name, node.name] = slot
        return slot is not None

    def slot(self, body: Body, reference: str) -> Hashable | None:
        """The name of the variable whose handle a tensor of a body is, None for other tensors."""
        return self.resources.get((body.name, node_name(reference)))

    def _join_calls(self, body: Body) -> None:
        for node in body.nodes.values():
            kind = CALL_KINDS.get(node.op)
            if kind is None:
                continue
            slots = [self.slot(body, name) for name in node.input if not name.startswith("^")]
            given = _read_outputs(body, node)
            gives = any(
                dtype == _RESOURCE and number in given
                for number, dtype in enumerate(node.attr[kind.results].list.type)
            )
            for position, slot in enumerate(slots):
                if slot is None:
                    continue
                if gives:
                    self._slots.block(slot, f"{node.op} may give it back")
                for _, _, name in function_names(node, kind):
                    argument = ("argument", self._number, name, position - kind.leading)
                    self._slots.join(slot, argument)
            if kind.is_loop:
                self._join_rounds(node.attr["body"].func.name)

    def _join_rounds(self, name: str) -> None:
        """Joins what a round of a loop gives with what the next one takes."""
        body = self._bodies.get(name)
        if body is not None:
            results = body.proto.signature.output_arg  # type: ignore[union-attr]
            for position, result in enumerate(results):
                slot = self.slot(body, body.returned().get(result.name, ""))
                if slot is not None:
                    self._slots.join(slot, ("argument", self._number, name, position))

    def _join_bound_inputs(self) -> None:
        for name, function in self._meta.object_graph_def.concrete_functions.items():
            body = self._bodies.get(name)
            if body is None:
                continue
            arguments = body.proto.signature.input_arg  # type: ignore[union-attr]
            first = len(arguments) - len(function.bound_inputs)
            for position, node in enumerate(function.bound_inputs, first):
                if position >= 0 and arguments[position].type == _RESOURCE:
                    slot = ("argument", self._number, name, position)
                    self._slots.join(slot, ("object", self._number, node))
        for node, saved in enumerate(self._meta.object_graph_def.nodes):
            if saved.WhichOneof("kind") == "variable" and saved.saveable_objects:
                self._slots.block(("object", self._number, node), "it is saved in a way of its own")


def _read_outputs(body: Body, node: Node) -> set[int]:
    """The numbers of the outputs that others read, of a node whose outputs are one list."""
    found = set()
    for reader, position in body.readers.get(node.name, ()):
        last = reader.input[position].rpartition(":")[2]
        found.add(int(last) if last.isdecimal() else 0)
    for tensor in body.returned().values():
        if node_name(tensor) == node.name:
            found.add(int(tensor.rpartition(":")[2]))
    return found


def _text(node: Node, attr: str) -> bytes:
    value = node.attr.get(attr)  # [] would write to a map that lacks the key
    return b"" if value is None else value.s
