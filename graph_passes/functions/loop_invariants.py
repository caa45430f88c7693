"""Casts of values that a loop does not change move out of the loop.

A weight that a loop's body reads and casts is the same in every round. The caller reads and casts
it once, and the result enters the loop as one more loop variable that no round changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tensorflow.core.framework import function_pb2, node_def_pb2, types_pb2

from graph_passes.functions.call_tree import Call, Region
from graph_passes.functions.loop_variables import add_to_functions, add_to_loop, free_name, names_in
from graph_passes.ir.function_references import called_functions, may_name_functions

_READ = "ReadVariableOp"
# Ops that take a resource and change no float32 variable.
_HARMLESS = frozenset(
    (
        _READ,
        "Identity",
        "IteratorGetNext",
        "LookupTableFindV2",
        "LookupTableSizeV2",
        "ResourceGather",
        "ResourceGatherNd",
        "RngReadAndSkip",
        "RngSkip",
        "VarIsInitializedOp",
        "VariableShape",
    )
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Source:
    """What the casts of one value read, in the loop's body.

    Attributes:
        position: of the loop variable.
        read: the node that reads the variable whose resource it is, None for a plain value.
        casts: names of the casts.
    """

    position: int
    read: node_def_pb2.NodeDef | None
    casts: list[str] = dataclasses.field(default_factory=list)


def hoist_casts(root: Region, target: int) -> int:
    """Moves casts of what loops do not change to the loops' callers, innermost loops first.

    A read of a variable moves along only where nothing that the loop runs may write a float32
    variable and no control input orders the read inside the loop.

    Args:
        root: the call tree; its bodies are changed in place, so they must be private copies.
        target: the low-precision dtype.

    Returns:
        How many casts have left a loop. One that leaves two nested loops counts twice.
    """
    count = 0
    for region in reversed(list(root.walk())):
        editor: _CallerEditor | None = None
        for call in region.calls:
            found = _find(call, target) if call.kind.is_loop else []
            if found:
                editor = editor or _CallerEditor(region, target)
                count += _hoist_from(call, found, editor, target)
    return count


def _hoist_from(call: Call, found: list[_Source], editor: _CallerEditor, target: int) -> int:
    body: function_pb2.FunctionDef = call.callee("body").proto  # type: ignore[assignment]
    cond: function_pb2.FunctionDef = call.callee("cond").proto  # type: ignore[assignment]
    editor.open(call.node)
    taken = names_in(body) | names_in(cond)
    replaced: dict[str, str] = {}
    for source in found:
        name = free_name("hoisted_cast", taken)
        taken |= {name, f"{name}_out"}
        add_to_functions(body, cond, name, target)
        editor.pass_to_loop(editor.add(source))
        replaced.update((cast, name) for cast in source.casts)
    _replace(body, replaced)
    return len(replaced)


def _find(call: Call, target: int) -> list[_Source]:
    """The casts in a loop's body of what no round changes, by what they read."""
    body: function_pb2.FunctionDef = call.callee("body").proto  # type: ignore[assignment]
    makers = {node.name: node for node in body.node_def}
    casts = [node for node in makers.values() if node.op == "Cast"]
    if not casts:
        return []
    arguments = {arg.name: position for position, arg in enumerate(body.signature.input_arg)}
    constant = {
        arg: position
        for arg, position in arguments.items()
        if _origin(body.ret[body.signature.output_arg[position].name], makers) == arg
    }
    writes = None
    found: dict[tuple[int, str], _Source] = {}
    for node in casts:
        if (node.attr["SrcT"].type, node.attr["DstT"].type) != (types_pb2.DT_FLOAT, target):
            continue
        if any(name[0] == "^" for name in node.input):
            continue
        origin = _origin(node.input[0], makers)
        position = constant.get(origin)
        read = None
        maker = makers.get(origin.partition(":")[0])
        if position is None and maker is not None and maker.op == _READ and len(maker.input) == 1:
            position = constant.get(_origin(maker.input[0], makers))
            read = maker
            if position is not None and writes is None:
                writes = may_write_variable(call)
            if writes:
                continue
        if position is not None:
            key = (position, read.name if read is not None else "")
            found.setdefault(key, _Source(position, read)).casts.append(node.name)
    return [source for _, source in sorted(found.items())]  # names are given in this order


def _origin(tensor: str, makers: dict[str, node_def_pb2.NodeDef]) -> str:
    """The tensor of which a tensor is a plain copy."""
    while True:
        maker = makers.get(tensor.partition(":")[0])
        if maker is None or maker.op != "Identity":
            return tensor
        tensor = maker.input[0]


def may_write_variable(call: Call) -> bool:
    """Whether anything that a call runs could write a float32 variable."""
    for callee in call.callees:
        for region in callee.walk():
            inside = {inner.node for inner in region.calls}
            signature = region.proto.signature  # type: ignore[union-attr]
            resources = {a.name for a in signature.input_arg if a.type == types_pb2.DT_RESOURCE}
            for node in region.nodes:
                if node.op == "Identity" and node.attr["T"].type == types_pb2.DT_RESOURCE:
                    resources.add(node.name)
            for node in region.nodes:
                op = node.op
                if op in _HARMLESS or node.name in inside:
                    continue
                if not resources.isdisjoint([name.partition(":")[0] for name in node.input[:]]):
                    return True
                if may_name_functions(op) and any(name != op for name in called_functions(node)):
                    return True  # a call whose function is not in view
    return False


def _replace(function: function_pb2.FunctionDef, arguments: Mapping[str, str]) -> None:
    """Lets the readers of casts read arguments, and removes the casts."""
    gone = []
    for position, node in enumerate(function.node_def):
        if node.name in arguments:
            gone.append(position)
            continue
        before = node.input[:]
        after = [arguments.get(tensor.partition(":")[0], tensor) for tensor in before]
        if after != before:
            node.input[:] = after
    for result, tensor in list(function.ret.items()):
        argument = arguments.get(tensor.partition(":")[0])
        if argument is not None:
            function.ret[result] = argument
    for position in reversed(gone):
        del function.node_def[position]


class _CallerEditor:
    """Adds what a loop is to take to the loop's caller."""

    def __init__(self, caller: Region, target: int) -> None:
        self._nodes = caller.nodes
        self._in_function = isinstance(caller.proto, function_pb2.FunctionDef)
        self._target = target
        self._by_name = {node.name: node for node in caller.nodes}
        self._taken = set(self._by_name)
        if self._in_function:
            self._taken |= names_in(caller.proto)  # type: ignore[arg-type]
        self._loop = node_def_pb2.NodeDef()
        self._controls: list[str] = []

    def open(self, loop: str) -> None:
        """Chooses the loop to be worked on."""
        self._loop = self._by_name[loop]
        self._controls = self._before_loop()

    def add(self, source: _Source) -> str:
        """Adds the cast, and the read, of one loop variable. Returns the cast tensor's name."""
        tensor = self._loop.input[source.position]
        device = ""
        if source.read is not None:
            node = self._add_node(source.read)
            node.input.extend([tensor, *self._controls])
            tensor = f"{node.name}:value:0" if self._in_function else node.name
            device = node.device
        template = node_def_pb2.NodeDef(name="Cast", op="Cast", device=device)
        template.attr["SrcT"].type = types_pb2.DT_FLOAT
        template.attr["DstT"].type = self._target
        template.attr["Truncate"].b = False
        cast = self._add_node(template)
        cast.input.append(tensor)
        return f"{cast.name}:y:0" if self._in_function else cast.name

    def _add_node(self, template: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
        """A node like another, without inputs, named after the loop and that other."""
        node = self._nodes.add()  # type: ignore[attr-defined]
        node.CopyFrom(template)
        del node.input[:]
        own = template.name.rpartition("/")[2]
        node.name = free_name(f"{self._loop.name}/hoisted/{own}", self._taken)
        self._taken.add(node.name)
        return node

    def _before_loop(self) -> list[str]:
        """Control inputs that let a read run no earlier than the loop would have let it.

        What orders the loop after a write may stand at the loop itself or at any of its inputs.
        """
        read, nodes = self._loop.input[:], self._by_name
        controls = [name for name in read if name[0] == "^"]
        makers = {name.partition(":")[0] for name in read if name[0] != "^"}
        waiting = [maker for maker in sorted(makers & nodes.keys()) if nodes[maker].input]
        controls.extend(f"^{maker}" for maker in waiting if f"^{maker}" not in controls)
        return controls

    def pass_to_loop(self, tensor: str) -> None:
        """Gives the loop one more loop variable."""
        add_to_loop(self._loop, tensor, self._target)
