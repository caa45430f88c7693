"""Casts of values that a loop does not change move out of the loop.

A weight that a loop's body reads and casts is the same in every round. The caller reads and casts
it once, and the result enters the loop as one more loop variable that no round changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tensorflow.core.framework import function_pb2, node_def_pb2, types_pb2

from graph_passes.call_graph import Call, Region
from graph_passes.calls import called_functions

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
# Producers that are there before anything runs.
_SOURCES = frozenset(("Const", "Placeholder", "VarHandleOp"))


@dataclasses.dataclass(frozen=True)
class _Source:
    """What the casts of one value read, in the loop's body.

    Attributes:
        position: of the loop variable.
        read: the node that reads the variable whose resource it is, None for a plain value.
    """

    position: int
    read: str | None


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
    return sum(
        _hoist_loop(region, call, target)
        for region in reversed(list(root.walk()))
        for call in region.calls
        if call.kind.is_loop
    )


def _hoist_loop(caller: Region, call: Call, target: int) -> int:
    body, cond = call.callee("body").proto, call.callee("cond").proto
    if not isinstance(body, function_pb2.FunctionDef) or not isinstance(
        cond, function_pb2.FunctionDef
    ):
        return 0
    found = dict(_find(body, call, target))
    if not found:
        return 0
    loop = next(node for node in caller.nodes if node.name == call.node)
    editor = _CallerEditor(caller, loop, target)
    for source, casts in found.items():
        name = _free_argument(body, cond)
        _enter(body, cond, name, target)
        tensor = editor.add(source, None if source.read is None else _node(body, source.read))
        editor.pass_to_loop(tensor)
        _replace(body, {cast.name for cast in casts}, name)
    return sum(map(len, found.values()))


def _find(
    body: function_pb2.FunctionDef, call: Call, target: int
) -> dict[_Source, list[node_def_pb2.NodeDef]]:
    """The casts in a body of what no round changes, by what they read."""
    makers = {node.name: node for node in body.node_def}
    arguments = {arg.name: position for position, arg in enumerate(body.signature.input_arg)}
    constant = {
        arg: position
        for arg, position in arguments.items()
        if _origin(body.ret[body.signature.output_arg[position].name], makers) == arg
    }
    writes = None
    found: dict[_Source, list[node_def_pb2.NodeDef]] = {}
    for node in body.node_def:
        if node.op != "Cast" or (node.attr["SrcT"].type, node.attr["DstT"].type) != (
            types_pb2.DT_FLOAT,
            target,
        ):
            continue
        if any(name[0] == "^" for name in node.input):
            continue
        origin = _origin(node.input[0], makers)
        position = constant.get(origin)
        read = None
        maker = makers.get(origin.partition(":")[0])
        if position is None and maker is not None and maker.op == _READ and len(maker.input) == 1:
            position = constant.get(_origin(maker.input[0], makers))
            read = maker.name
            if position is not None and writes is None:
                writes = may_write_variable(call)
            if writes:
                continue
        if position is not None:
            found.setdefault(_Source(position, read), []).append(node)
    return found


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
                if node.name in inside or node.op in _HARMLESS:
                    continue
                if any(name.partition(":")[0] in resources for name in node.input):
                    return True
                if any(name != node.op for name in called_functions(node)):
                    return True  # a call whose function is not in view
    return False


def _node(function: function_pb2.FunctionDef, name: str) -> node_def_pb2.NodeDef:
    return next(node for node in function.node_def if node.name == name)


def _free_argument(*functions: function_pb2.FunctionDef) -> str:
    taken: set[str] = set()
    for function in functions:
        taken.update(arg.name for arg in function.signature.input_arg)
        taken.update(arg.name for arg in function.signature.output_arg)
        taken.update(node.name for node in function.node_def)
    return _free("hoisted_cast", taken)


def _free(name: str, taken: Iterable[str]) -> str:
    taken = set(taken)
    count = 0
    while f"{name}_{count}" in taken:
        count += 1
    return f"{name}_{count}"


def _enter(
    body: function_pb2.FunctionDef, cond: function_pb2.FunctionDef, name: str, target: int
) -> None:
    """Adds a loop variable that no round changes."""
    for function in (body, cond):
        function.signature.input_arg.add(name=name, type=target)
    body.signature.output_arg.add(name=f"{name}_out", type=target)
    body.ret[f"{name}_out"] = name


def _replace(function: function_pb2.FunctionDef, casts: set[str], name: str) -> None:
    """Lets the readers of casts read an argument, and removes the casts."""
    kept = [node for node in function.node_def if node.name not in casts]
    for node in kept:
        for port, tensor in enumerate(node.input):
            if tensor.partition(":")[0] in casts:
                node.input[port] = name
    for result, tensor in function.ret.items():
        if tensor.partition(":")[0] in casts:
            function.ret[result] = name
    positions = [i for i, node in enumerate(function.node_def) if node.name in casts]
    for position in reversed(positions):
        del function.node_def[position]


class _CallerEditor:
    """Adds what a loop is to take to the loop's caller."""

    def __init__(self, caller: Region, loop: node_def_pb2.NodeDef, target: int) -> None:
        self._nodes = caller.nodes
        self._in_function = isinstance(caller.proto, function_pb2.FunctionDef)
        self._loop = loop
        self._target = target
        self._taken = {node.name for node in caller.nodes}
        if self._in_function:
            self._taken.update(a.name for a in caller.proto.signature.input_arg)  # type: ignore[union-attr]

    def add(self, source: _Source, read: node_def_pb2.NodeDef | None) -> str:
        """Adds the cast, and the read, of one loop variable. Returns the cast tensor's name."""
        tensor = self._loop.input[source.position]
        device = ""
        if read is not None:
            node = self._add_node(f"{self._loop.name}/{read.name.rpartition('/')[2]}", read)
            node.input.extend([tensor, *self._before_loop()])
            tensor = f"{node.name}:value:0" if self._in_function else node.name
            device = read.device
        cast = node_def_pb2.NodeDef(op="Cast", device=device)
        cast.attr["SrcT"].type = types_pb2.DT_FLOAT
        cast.attr["DstT"].type = self._target
        cast.attr["Truncate"].b = False
        cast = self._add_node(f"{self._loop.name}/Cast", cast)
        cast.input.append(tensor)
        return f"{cast.name}:y:0" if self._in_function else cast.name

    def _add_node(self, name: str, template: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
        node = self._nodes.add()  # type: ignore[attr-defined]
        node.CopyFrom(template)
        del node.input[:]
        node.name = _free(name, self._taken)
        self._taken.add(node.name)
        return node

    def _before_loop(self) -> list[str]:
        """Control inputs that let a read run no earlier than the loop would have let it.

        In a function, automatic control dependencies order the loop after the writes of what it
        reads. In another graph that order may follow from any of the loop's inputs.
        """
        controls = [name for name in self._loop.input if name[0] == "^"]
        if not self._in_function:
            ops = {node.name: node.op for node in self._nodes}
            makers = {name.partition(":")[0] for name in self._loop.input if name[0] != "^"}
            controls.extend(
                f"^{maker}"
                for maker in sorted(makers)
                if ops[maker] not in _SOURCES and f"^{maker}" not in controls
            )
        return controls

    def pass_to_loop(self, tensor: str) -> None:
        """Gives the loop one more loop variable."""
        loop = self._loop
        dtypes = loop.attr["T"].list.type
        loop.input.insert(len(dtypes), tensor)
        dtypes.append(self._target)
        if "output_shapes" in loop.attr and loop.attr["output_shapes"].list.shape:
            loop.attr["output_shapes"].list.shape.add(unknown_rank=True)
