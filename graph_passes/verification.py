"""Post-conditions of a rewrite, read back from the new graph itself.

Nothing the plan says is believed: dtypes come from the attrs of the new nodes, and tensors are
looked up by the names that the new inputs hold. Only what the rewrite touched is read (retyped
nodes, their readers, rewired readers, and Casts); the rest is the caller's graph, unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tensorflow.core.framework import (
    function_pb2,
    graph_pb2,
    node_def_pb2,
    op_def_pb2,
    types_pb2,
)

from graph_passes.application import Applied
from graph_passes.call_graph import CallKind, Library, Region, function_names
from graph_passes.op_registry import OpType, registered_op_type
from graph_passes.planning import Plan
from graph_passes.reasons import Reason
from graph_passes.view import GraphView, InvalidGraphError, view_function, view_graph


class VerificationError(Exception):
    """The rewritten graph breaks a post-condition; it must not run."""


def verify(
    plan: Plan, applied: Applied, original: graph_pb2.GraphDef | function_pb2.FunctionDef
) -> None:
    """Checks a rewritten graph.

    The dtypes at both ends of each touched edge agree; every retyped node has a kernel; preserved
    nodes, signatures and control inputs are as they were; every Cast is read, changes the dtype,
    and reads no Cast of this rewrite; names are unique.

    Raises:
        VerificationError: a post-condition does not hold. The message names the node.
    """
    view = plan.canvas.view
    reader = _Reader(view, applied)
    touched = set(applied.retyped)
    touched.update(number for number, _, _ in applied.rewired)
    for vertex in plan.low:
        touched.update(max(view.vertex_nodes[target], 0) for target in view.readers(vertex))
    for number in touched:
        _check_inputs(reader, number)
        _check_controls(view, reader, number)
    for vertex in plan.low:
        _check_kernel(plan, reader, view.vertex_nodes[vertex])
    for number in set(applied.retyped):
        if plan.canvas.why[view.base[number]] == Reason.PRESERVED:
            raise VerificationError(f"the preserved node {view.nodes[number].name!r} was retyped")
    _check_casts(view, reader, applied)
    if view.is_function:
        _check_signature(applied.proto, original)


class _Reader:
    """Reads nodes and dtypes of the new graph."""

    def __init__(self, view: GraphView, applied: Applied) -> None:
        self._view = view
        proto = applied.proto
        if view.is_function:
            self._shift = len(proto.signature.input_arg)
            self._nodes = proto.node_def
            self._results = [arg.name for arg in proto.signature.output_arg]
            self._ret = proto.ret
        else:
            self._shift = 0
            self._nodes = proto.node
            self._results = []
        count = len(view.nodes) - self._shift - len(self._results)
        self.casts = {node.name: node for node in self._nodes[count:]}
        self._added = len(self._nodes) - count
        if len(self.casts) != self._added or any(name in view.index for name in self.casts):
            raise VerificationError("two nodes have the same name")

    def node(self, number: int) -> node_def_pb2.NodeDef:
        """A node of the new graph; pseudo-nodes show the new results."""
        position = number - self._shift
        if position < 0:
            return self._view.nodes[number]
        end = len(self._nodes) - self._added
        if position >= end:
            pseudo = node_def_pb2.NodeDef()
            pseudo.CopyFrom(self._view.nodes[number])
            pseudo.input[0] = self._ret[self._results[position - end]]
            return pseudo
        return self._nodes[position]

    def op_type(self, number: int) -> OpType | None:
        """The op type of a node."""
        return self._view.op_types[number]

    def input_dtypes(self, number: int) -> list[int]:
        """The dtypes that a node takes, by port."""
        return _port_dtypes(self.op_type(number), self.node(number), "in_slots")

    def tensor_dtype(self, tensor: str) -> int | None:
        """The dtype of a tensor, None where an op that TensorFlow does not know makes it."""
        name, port = self._view.split(tensor)
        cast = self.casts.get(name)
        if cast is not None:
            return cast.attr["DstT"].type
        number = self._view.index.get(name)
        if number is None:
            raise VerificationError(f"no node makes the tensor {tensor!r}")
        if number in self._view.aliases:
            return self._taken_dtype(*self._view.aliases[number])
        if self.op_type(number) is None:
            return None
        return _port_dtypes(self.op_type(number), self.node(number), "out_slots")[port]

    def _taken_dtype(self, number: int, port: int) -> int | None:
        op_type, node = self.op_type(number), self.node(number)
        if op_type is None:
            return None
        layout = op_type.layout_of(node)
        return op_type.dtype_of(node, layout.slots[layout.in_slots[port]])


def _port_dtypes(
    op_type: OpType | None, node: node_def_pb2.NodeDef, ports: str
) -> list[int]:
    if op_type is None:
        return []
    layout = op_type.layout_of(node)
    return [op_type.dtype_of(node, layout.slots[slot]) for slot in getattr(layout, ports)]


def _data_inputs(node: node_def_pb2.NodeDef) -> list[str]:
    return [name for name in node.input if not name.startswith("^")]


def _check_inputs(reader: _Reader, number: int) -> None:
    node = reader.node(number)
    taken = reader.input_dtypes(number)
    inputs = _data_inputs(node)
    if reader.op_type(number) is None:
        # An op that TensorFlow does not know takes what the original made.
        taken = [types_pb2.DT_FLOAT if _is_low(reader.tensor_dtype(i)) else 0 for i in inputs]
        taken = [dtype or reader.tensor_dtype(i) or 0 for dtype, i in zip(taken, inputs, strict=True)]
    for port, (tensor, dtype) in enumerate(zip(inputs, taken, strict=True)):
        made = reader.tensor_dtype(tensor)
        if made is not None and made % 100 != dtype % 100:  # a ref dtype is its dtype plus 100
            raise VerificationError(
                f"input {port} of node {node.name!r} ({node.op}) takes "
                f"{types_pb2.DataType.Name(dtype)}, but {tensor!r} is "
                f"{types_pb2.DataType.Name(made)}"
            )


def _is_low(dtype: int | None) -> bool:
    return dtype in (types_pb2.DT_HALF, types_pb2.DT_BFLOAT16)


def _check_controls(view: GraphView, reader: _Reader, number: int) -> None:
    before = [name for name in view.nodes[number].input if name.startswith("^")]
    after = [name for name in reader.node(number).input if name.startswith("^")]
    if before != after:
        raise VerificationError(f"node {view.nodes[number].name!r} has other control inputs")


def _check_kernel(plan: Plan, reader: _Reader, number: int) -> None:
    op_type, node = reader.op_type(number), reader.node(number)
    has_kernel: Callable[..., bool] = plan.canvas.support.has_kernel
    for slot in op_type.layout_of(node).slots if op_type else ():
        if op_type.dtype_of(node, slot) == plan.canvas.target and not has_kernel(  # type: ignore[union-attr]
            op_type, slot, node
        ):
            raise VerificationError(
                f"node {node.name!r} ({node.op}) has no {plan.canvas.config.device} kernel with "
                f"{slot} in {plan.canvas.config.target_dtype}"
            )


def _check_casts(view: GraphView, reader: _Reader, applied: Applied) -> None:
    read = {name for _, _, name in applied.rewired}
    for number, port, name in applied.rewired:
        tensor = reader.node(number).input[port]
        if view.split(tensor)[0] != name:
            raise VerificationError(f"a reader of the Cast {name!r} reads {tensor!r} instead")
    for name, cast in reader.casts.items():
        if name not in read:
            raise VerificationError(f"nothing reads the Cast {name!r}")
        if cast.attr["SrcT"].type == cast.attr["DstT"].type:
            raise VerificationError(f"the Cast {name!r} does not change the dtype")
        if view.split(cast.input[0])[0] in reader.casts:
            raise VerificationError(f"the Cast {name!r} reads another Cast")
        made = reader.tensor_dtype(cast.input[0])
        if made is not None and made % 100 != cast.attr["SrcT"].type:
            raise VerificationError(
                f"the Cast {name!r} takes {types_pb2.DataType.Name(cast.attr['SrcT'].type)}, but "
                f"{cast.input[0]!r} is {types_pb2.DataType.Name(made)}"
            )


def _check_signature(
    new: function_pb2.FunctionDef, original: function_pb2.FunctionDef
) -> None:
    if new.signature != original.signature or new.control_ret != original.control_ret:
        raise VerificationError(f"the signature of {original.signature.name!r} changed")


def verify_calls(
    root: Region,
    called: Mapping[str, function_pb2.FunctionDef],
    library: Library,
) -> None:
    """Checks a call tree whose bodies are functions.

    Each calling node has the dtypes of the functions that it names, arguments and results of
    every body have the dtypes of its signature, and within each body the two ends of every edge
    agree.

    Args:
        root: the tree.
        called: the functions of the tree by name.
        library: gives any other function by name.

    Raises:
        VerificationError: a call or an edge does not agree. The message names the node.
    """
    signatures = root.called_as_ops(library)
    for region in root.walk():
        proto = region.proto
        try:
            if isinstance(proto, graph_pb2.GraphDef):
                view_graph(proto).require_matching_dtypes()
            else:
                view_function(proto, signatures).require_matching_dtypes()
        except InvalidGraphError as error:
            raise VerificationError(str(error)) from error
        calls = {call.node: call.kind for call in region.calls}
        for node in region.nodes:
            kind = calls.get(node.name)
            for attr, _, name in function_names(node, kind) if kind else ():
                _check_call(node, kind, attr, called[name].signature)  # type: ignore[arg-type]


def _check_call(
    node: node_def_pb2.NodeDef, kind: CallKind, attr: str, signature: op_def_pb2.OpDef
) -> None:
    ends = [("takes", kind.arguments, signature.input_arg)]
    if attr != kind.predicate:
        ends.append(("gives", kind.results, signature.output_arg))
    for verb, dtypes, args in ends:
        if [arg.type for arg in args] != list(node.attr[dtypes].list.type):
            raise VerificationError(
                f"the call {node.name!r} ({node.op}) does not have the dtypes that "
                f"{signature.name!r} {verb}"
            )
