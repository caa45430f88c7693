"""Casts of values that a loop does not change move out of the loop.

A weight that a loop's body reads and casts is the same in every round. The caller reads and casts
it once, and the result enters the loop as one more loop variable that no round changes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container

from tensorflow.core.framework import function_pb2, node_def_pb2, types_pb2

from graph_passes.functions.call_tree import Call, Region
from graph_passes.functions.loop_editor import LoopEditor
from graph_passes.ir.eligibility import node_name
from graph_passes.ir.function_references import may_name_functions
from graph_passes.ops.op_types import registered_op_type
from graph_passes.policy.op_classes import ops_of
from graph_passes.rewriter.body_editor import BodyEditor

_READ = "ReadVariableOp"
_HARMLESS, _PYTHON = ops_of("harmless_to_variables"), ops_of("python_code")


@dataclasses.dataclass(frozen=True, eq=False)
class _Source:
    """What the casts of one value read, in the loop's body.

    Attributes:
        position: of the loop variable.
        read: a node that reads the variable whose resource it is, None for a plain value.
        casts: names of the casts.
    """

    position: int
    read: node_def_pb2.NodeDef | None
    casts: list[str] = dataclasses.field(default_factory=list)


def hoist_casts(
    root: Region, target: int, own: Callable[[Region], Container[str]] = lambda _: ()
) -> int:
    """Moves casts of what loops do not change to the loops' callers, innermost loops first.

    A read of a variable moves along only where nothing that the loop runs may write a float32
    variable and no control input orders the read inside the loop.

    Args:
        root: the call tree; its bodies are changed in place, so they must be private copies.
        target: the low-precision dtype.
        own: gives the names of nodes that the program has itself in a body: of these casts the
            readers leave, and they stay.

    Returns:
        How many casts have left a loop. One that leaves two nested loops counts twice.
    """
    count = 0
    for region in reversed(list(root.walk())):
        caller = BodyEditor(region.proto)
        for call in region.calls:
            if call.kind.is_loop and (found := _find(call, target)):
                count += _hoist_from(call, found, caller, target, own(call.callee("body")))
    return count


def _hoist_from(
    call: Call, found: list[_Source], caller: BodyEditor, target: int, stay: Container[str]
) -> int:
    body, cond = (call.callee(attr).proto for attr in ("body", "cond"))
    loop = LoopEditor(caller, call.node, body, cond)  # type: ignore[arg-type]
    controls = _before_loop(caller, loop.node)
    emit = caller.emitter(f"{call.node}/hoisted")
    arguments: dict[str, str] = {}
    for source in found:
        tensor, read = loop.node.input[source.position], source.read
        emit.device = "" if read is None else read.device
        if read is not None:
            tensor = emit.copy(read, tensor, name=read.name.rpartition("/")[2])
            emit.makers[tensor].input.extend(controls)
        raised = caller.find(tensor.partition(":")[0])
        if raised is not None and _casts(raised, target, types_pb2.DT_FLOAT):
            low = raised.input[0]  # there and back is the same value
        else:
            low = emit.op.Cast(tensor, SrcT=types_pb2.DT_FLOAT, DstT=target)
        argument, _ = loop.add_variable("hoisted_cast", low, target)
        arguments.update(dict.fromkeys(source.casts, argument))
    loop.body.redirect({loop.body.output(name): to for name, to in arguments.items()})
    loop.body.remove({name for name in arguments if name not in stay})
    return len(arguments)


def _casts(node: node_def_pb2.NodeDef, source: int, to: int) -> bool:
    """Whether a node is a Cast between two dtypes that waits for no other node."""
    if node.op != "Cast" or any(name[0] == "^" for name in node.input):
        return False
    return (node.attr["SrcT"].type, node.attr["DstT"].type) == (source, to)


def _find(call: Call, target: int) -> list[_Source]:
    """The casts in a loop's body of what no round changes, by what they read."""
    unchanged = Unchanged(call)
    found: dict[int, _Source] = {}
    for node in unchanged.body.node_def:
        if not _casts(node, types_pb2.DT_FLOAT, target):
            continue
        source = unchanged.source(node.input[0])
        if source is not None:
            found.setdefault(source[0], _Source(*source)).casts.append(node.name)
    return [found[position] for position in sorted(found)]  # names are given in this order


class Unchanged:
    """What no round of a loop changes: loop variables, and reads of variables that none writes.

    Attributes:
        body: the loop's body.
    """

    def __init__(self, call: Call) -> None:
        self.body: function_pb2.FunctionDef = call.callee("body").proto  # type: ignore[assignment]
        self._call = call
        self._makers = {node.name: node for node in self.body.node_def}
        ends = zip(self.body.signature.input_arg, self.body.signature.output_arg, strict=True)
        self._positions = {
            taken.name: position
            for position, (taken, made) in enumerate(ends)
            if self._origin(self.body.ret[made.name]) == taken.name
        }

    def source(self, tensor: str) -> tuple[int, node_def_pb2.NodeDef | None] | None:
        """What a tensor of the body is a copy of, None where a round may change it.

        Returns:
            The position of the loop variable, and the node that reads the variable whose resource
            it is, None for a plain value.
        """
        origin = self._origin(tensor)
        if origin in self._positions:
            return self._positions[origin], None
        read = self._makers.get(origin.partition(":")[0])
        if read is None or read.op != _READ or len(read.input) != 1:
            return None
        position = self._positions.get(self._origin(read.input[0]))
        return None if position is None or self._may_write else (position, read)

    def numbers(self) -> tuple[list[int], list[int]]:
        """The positions of such loop variables, and of such reads among the body's nodes."""
        reads = [
            number
            for number, node in enumerate(self.body.node_def)
            if node.op == _READ and self.source(node.name) is not None
        ]
        return list(self._positions.values()), reads

    @functools.cached_property
    def _may_write(self) -> bool:
        """Whether anything that the loop runs could write a float32 variable."""
        for region in (below for callee in self._call.callees for below in callee.walk()):
            inside = {inner.node for inner in region.calls}
            for node in region.nodes:
                if node.name not in inside and _may_write(node.op):
                    return True
        return False

    def _origin(self, tensor: str) -> str:
        """The tensor of which a tensor is a plain copy."""
        while True:
            maker = self._makers.get(tensor.partition(":")[0])
            if maker is None or maker.op != "Identity":
                return tensor
            tensor = maker.input[0]


def _may_write(op: str) -> bool:
    """Whether an op could write a variable, or runs what could: a function, or Python."""
    if op in _HARMLESS or op in _PYTHON:
        return op in _PYTHON
    op_type = registered_op_type(op)
    takes = () if op_type is None else op_type.op_def.input_arg
    return may_name_functions(op) or any(arg.type == types_pb2.DT_RESOURCE for arg in takes)


def _before_loop(caller: BodyEditor, loop: node_def_pb2.NodeDef) -> list[str]:
    """Control inputs that let a read run no earlier than the loop would have let it.

    What orders the loop after a write may stand at the loop itself or at any of its inputs.
    """
    read = loop.input[:]
    controls = [name for name in read if name[0] == "^"]
    makers = sorted(set(map(node_name, read)))
    waiting = [name for name in makers if (maker := caller.find(name)) and maker.input]
    return [*controls, *(f"^{name}" for name in waiting if f"^{name}" not in controls)]
