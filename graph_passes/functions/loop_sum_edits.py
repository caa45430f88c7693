"""Changes that move sums out of a loop: in its caller, at its node and in its functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
from tensorflow.core.framework import (
    attr_value_pb2,
    function_pb2,
    node_def_pb2,
    tensor_pb2,
    types_pb2,
)
from tensorflow.python.framework import tensor_util

from graph_passes.functions.call_tree import Graph, Region
from graph_passes.functions.loop_sums import BIAS_SUM, LoopSum
from graph_passes.functions.loop_variables import add_to_functions, add_to_loop, free_name, names_in
from graph_passes.ir.eligibility import node_name
from graph_passes.ir.view import FLOAT, Shape
from graph_passes.ops.op_types import registered_op_type

_INT, _VARIANT = types_pb2.DT_INT32, types_pb2.DT_VARIANT
_ROWS = "TensorListConcatV2"
_LIST_TYPES = {"element_dtype": FLOAT, "shape_type": _INT}


_MARK = "/gradient_sums/"


def has_moved_sums(function: function_pb2.FunctionDef) -> bool:
    """Whether a sum was moved out of a loop of a function: XLA cannot compile it then."""
    return any(node.op == _ROWS and _MARK in node.name for node in function.node_def)


class CallerEdit:
    """A copy of a calling graph to which nodes are added.

    Attributes:
        graph: the copy.
        shapes: static shapes of the outputs of added nodes.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = type(graph)()
        self.graph.CopyFrom(graph)  # type: ignore[arg-type]
        self.is_function = isinstance(graph, function_pb2.FunctionDef)
        self.nodes = Region(self.graph).nodes
        self.shapes: dict[str, tuple[Shape | None, ...]] = {}
        self._by_name = {node.name: node for node in self.nodes}
        self._taken = set(self._by_name)
        self._added: set[str] = set()
        if self.is_function:
            self._taken |= names_in(self.graph)  # type: ignore[arg-type]

    def node(self, name: str) -> node_def_pb2.NodeDef:
        """A node by its name."""
        return self._by_name[name]

    def add(
        self,
        op: str,
        name: str,
        inputs: Sequence[str],
        device: str,
        types: Mapping[str, int],
        shape: Shape | None = None,
    ) -> node_def_pb2.NodeDef:
        """Adds a node under a free name like the one given."""
        name = free_name(name, self._taken)
        self._taken.add(name)
        self._added.add(name)
        node = self._by_name[name] = self.nodes.add(  # type: ignore[attr-defined]
            name=name, op=op, device=device, input=inputs
        )
        for attr, dtype in types.items():
            node.attr[attr].type = dtype
        if shape is not None:
            self.shapes[name] = (shape,)
        return node

    def constant(self, name: str, value: int | tuple[int, ...], dtype: str, device: str) -> str:
        """Adds a constant and returns its tensor."""
        proto = _tensor(value, dtype)
        node = self.add("Const", name, (), device, {"dtype": proto.dtype})
        node.attr["value"].tensor.CopyFrom(proto)
        return self.output(node)

    def output(self, node: node_def_pb2.NodeDef, port: int = 0) -> str:
        """The name of an output: its port, or the position in the one output list of a loop."""
        if not self.is_function:
            return f"{node.name}:{port}" if port else node.name
        return _output(node, port)

    def redirect(self, tensors: Mapping[str, str]) -> None:
        """Lets all readers of some tensors, but for the nodes added, read others."""
        read_as = dict(tensors)
        if not self.is_function:
            read_as.update((f"{old}:0", new) for old, new in tensors.items())
        for node in self.nodes:
            read = node.input[:]  # a list: most nodes read none of them
            if not read_as.keys().isdisjoint(read) and node.name not in self._added:
                node.input[:] = [read_as.get(tensor, tensor) for tensor in read]
        if self.is_function:
            ret = self.graph.ret  # type: ignore[union-attr]
            for result, tensor in list(ret.items()):
                if tensor in read_as:
                    ret[result] = read_as[tensor]

    def is_zero(self, tensor: str) -> bool:
        """Whether a tensor is certain to be all zeros."""
        node = self._by_name.get(node_name(tensor))
        while node is not None and node.op in ("Fill", "Identity"):
            node = self._by_name.get(node_name(node.input[1 if node.op == "Fill" else 0]))
        if node is None or node.op != "Const":
            return node is not None and node.op == "ZerosLike"
        return not tensor_util.MakeNdarray(node.attr["value"].tensor).any()


@dataclasses.dataclass
class LoopEdit:
    """Changes one loop, its functions and what stands behind it.

    Attributes:
        caller: the calling graph.
        name: of the loop's node.
        body: the loop's body, a private copy.
        cond: the same of its condition.
        rows: tensor of the body -> the tensor behind the loop with the rows of all rounds.
        taken: names that no new loop variable may have.
    """

    caller: CallerEdit
    name: str
    body: function_pb2.FunctionDef
    cond: function_pb2.FunctionDef
    rows: dict[str, str] = dataclasses.field(default_factory=dict)
    taken: set[str] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        names = names_in(self.body) | names_in(self.cond)
        self.taken = names | {name.removesuffix("_out") for name in names}

    def move(self, sums: Sequence[LoopSum]) -> dict[str, str]:
        """Moves sums to the caller; returns what is to be read instead of what the loop gave."""
        moved: dict[str, str] = {}
        for each in sums:
            totals = []
            for term in each.terms:
                pairs = zip(term.operands, term.widths, strict=True)
                rows = [self._rows_of(tensor, width, term.device) for tensor, width in pairs]
                node = self.caller.add(
                    term.op, self._inner("sum"), rows, term.device, {"T": FLOAT}, each.shape
                )
                if term.op == BIAS_SUM:
                    node.attr["data_format"].s = b"NHWC"
                else:
                    node.attr["transpose_a"].b = True
                    node.attr["transpose_b"].b = False
                totals.append(self.caller.output(node))
            ended = self.caller.output(self.caller.node(self.name), each.position)
            moved[ended] = self._add_up(each, ended, totals)
        self._leave_out(sums)
        return moved

    def _inner(self, name: str) -> str:
        return f"{self.name}{_MARK}{name}"

    def _rows_of(self, tensor: str, width: int, device: str) -> str:
        """The rows that a tensor of the body has in all rounds; [rows, width], behind the loop."""
        if tensor in self.rows:
            return self.rows[tensor]
        caller = self.caller
        shape = caller.constant(self._inner("row_shape"), (-1, width), "int32", device)
        limit = caller.constant(self._inner("limit"), -1, "int32", device)
        empty = caller.add(
            "EmptyTensorList", self._inner("list"), (shape, limit), device, _LIST_TYPES
        )
        position = add_to_loop(caller.node(self.name), caller.output(empty), _VARIANT)
        self._push(tensor, device)
        lengths = caller.constant(self._inner("lengths"), (), "int64", device)
        ended = caller.output(caller.node(self.name), position)
        rows = (None, width)
        made = caller.add(
            _ROWS, self._inner("rows"), (ended, shape, lengths), device, _LIST_TYPES, rows
        )
        caller.shapes[made.name] = (rows, (None,))
        self.rows[tensor] = caller.output(made)
        return self.rows[tensor]

    def _push(self, tensor: str, device: str) -> None:
        """Lets every round put a tensor into a list."""
        name = free_name("gradient_rows", self.taken)
        self.taken.add(name)
        push = self.body.node_def.add(
            name=f"{name}/push", op="TensorListPushBack", device=device, input=(name, tensor)
        )
        push.attr["element_dtype"].type = FLOAT
        add_to_functions(self.body, self.cond, name, _VARIANT, _output(push))
        for function in (self.body, self.cond):
            shape = attr_value_pb2.AttrValue()
            shape.list.shape.add()
            attrs = function.arg_attr[len(function.signature.input_arg) - 1]
            attrs.attr["_output_shapes"].CopyFrom(shape)

    def _add_up(self, each: LoopSum, ended: str, totals: list[str]) -> str:
        """Adds what the sum was before the loop, which `ended` is now; returns the tensor."""
        caller = self.caller
        if not caller.is_zero(caller.node(self.name).input[each.position]):
            totals = [ended, *totals]
        if len(totals) == 1:
            return totals[0]
        node = caller.add(
            "AddN", self._inner("total"), totals, each.terms[0].device, {"T": FLOAT}, each.shape
        )
        node.attr["N"].i = len(totals)
        return caller.output(node)

    def _leave_out(self, sums: Sequence[LoopSum]) -> None:
        """Takes the sums and their terms out of the body."""
        body = self.body
        before = {each.total: each.before for each in sums}
        gone = {each.addition for each in sums}
        gone |= {term.node for each in sums for term in each.terms}
        positions = [n for n, node in enumerate(body.node_def) if node.name in gone]
        for position in reversed(positions):
            del body.node_def[position]
        for node in body.node_def:
            read = node.input[:]
            if not before.keys().isdisjoint(read):
                node.input[:] = [before.get(tensor, tensor) for tensor in read]
        for result, tensor in list(body.ret.items()):
            body.ret[result] = before.get(tensor, tensor)


@functools.lru_cache(maxsize=256)
def _tensor(value: int | tuple[int, ...], dtype: str) -> tensor_pb2.TensorProto:
    return tensor_util.make_tensor_proto(np.array(value, dtype))


def _output(node: node_def_pb2.NodeDef, port: int = 0) -> str:
    """An output as the body of a function has it, of a node whose first output is all or a list."""
    op_type = registered_op_type(node.op)
    if op_type is None:
        raise KeyError(node.op)
    return f"{node.name}:{op_type.op_def.output_arg[0].name}:{port}"
