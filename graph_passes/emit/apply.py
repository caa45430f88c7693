"""Carries a plan out on a copy of the graph: retypes slots and inserts Casts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2, types_pb2

from graph_passes.coloring.constant_folding import convert_tensors, is_large
from graph_passes.coloring.plan import Plan
from graph_passes.ir.copying import Proto, copy_graph
from graph_passes.ir.view import FLOAT, GraphView
from graph_passes.ops.op_types import SINGLE

_SHORT = {
    types_pb2.DT_HALF: "Fp16",
    types_pb2.DT_BFLOAT16: "Bf16",
    types_pb2.DT_FLOAT: "Fp32",
}


@dataclasses.dataclass(frozen=True)
class Applied:
    """A rewritten graph.

    Attributes:
        proto: the new graph; the original is untouched.
        retyped: numbers of the nodes with a new dtype, in the view's numbering.
        rewired: (reading node, input port, name of the Cast it now reads) of each cut edge.
        casts: name of each inserted Cast -> the vertex whose tensor it casts.
    """

    proto: graph_pb2.GraphDef | function_pb2.FunctionDef
    retyped: tuple[int, ...]
    rewired: tuple[tuple[int, int, str], ...]
    casts: dict[str, int]

    @property
    def touched(self) -> set[int]:
        """Numbers of the nodes that are not as they were."""
        return {*self.retyped, *(reader for reader, _, _ in self.rewired)}


def apply_plan(plan: Plan, proto: Proto) -> Applied:
    """Builds the rewritten graph.

    Casts are named as TensorFlow's own pass names them, there is at most one for each output port
    and dtype, and each has the device of the node that makes its input.

    Args:
        plan: what to change.
        proto: the GraphDef or FunctionDef that the plan was made for.

    Returns:
        The rewritten copy and what was done.
    """
    view, target = plan.coloring.view, plan.coloring.target
    is_low = plan.coloring.low
    folded = [number for number in view.of_op("Const") if is_low[view.base[number]]]
    # get: [] would write to a map that lacks the key.
    values = {number: view.nodes[number].attr.get("value") for number in folded}
    stored = {number: value.tensor for number, value in values.items() if value is not None}
    new = copy_graph(proto, view, [n for n, tensor in stored.items() if is_large(tensor)])
    editor = _FunctionEditor(new) if isinstance(new, function_pb2.FunctionDef) else _Editor(new)
    nodes, first = editor.nodes, editor.first
    owners, base, node_types, node_type_of = (
        view.vertex_nodes,
        view.base,
        view.node_types,
        view.node_type_of,
    )
    retyped: list[int] = []
    for vertex in plan.low:
        number = owners[vertex]
        slot = node_types[node_type_of[number]].layout.slots[vertex - base[number]]
        attr = nodes[number - first].attr[slot.attr]
        if slot.index == SINGLE:
            attr.type = target
        else:
            attr.list.type[slot.index] = target
        if not retyped or retyped[-1] != number:
            retyped.append(number)
    convert_tensors(
        ((old, nodes[number - first].attr["value"].tensor) for number, old in stored.items()),
        target,
    )
    casts: dict[tuple[str, int], str] = {}
    made: dict[str, int] = {}
    rewired: list[tuple[int, int, str]] = []
    cut = np.array(plan.cut, np.int32)
    readers = np.searchsorted(np.asarray(view.edge_starts), cut, side="right") - 1
    ports = cut - np.asarray(view.edge_starts)[readers]
    sources = view.sources[cut]
    for reader, port, source in np.stack((readers, ports, sources), axis=1).tolist():
        name = view.nodes[reader].input[port]
        key = view.split(name)
        cast = casts.get(key)
        if cast is None:
            src, dst = (target, FLOAT) if is_low[source] else (FLOAT, target)
            cast = casts[key] = _free_name(view, key, _SHORT[dst])
            made[cast] = source
            device = view.nodes[view.index[key[0]]].device
            _add_cast(nodes, cast, name, src, dst, device)
        editor.rewire(reader, port, cast)
        rewired.append((reader, port, cast))
    return Applied(new, tuple(retyped), tuple(rewired), made)


def _free_name(view: GraphView, tensor: tuple[str, int], short: str) -> str:
    producer, port = tensor
    for count in range(len(view.nodes) + 1):
        name = f"{producer}-{port}-CastTo{short}-{count}-AutoMixedPrecision"
        if name not in view.index:
            return name
    raise AssertionError("more names than nodes are taken")


def _add_cast(nodes: Any, name: str, tensor: str, src: int, dst: int, device: str) -> None:
    cast = nodes.add()
    cast.CopyFrom(_blank_cast(src, dst))
    cast.name = name
    cast.device = device
    cast.input.append(tensor)


@functools.cache
def _blank_cast(src: int, dst: int) -> node_def_pb2.NodeDef:
    """A Cast to be copied: to set its attrs anew takes twice as long."""
    cast = node_def_pb2.NodeDef(op="Cast")
    cast.attr["SrcT"].type = src
    cast.attr["DstT"].type = dst
    cast.attr["Truncate"].b = False
    return cast


class _Editor:
    """Edits a GraphDef.

    Attributes:
        nodes: its nodes.
        first: the number that the first of them has in its view.
    """

    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        self.nodes = graph_def.node
        self.first = 0

    def rewire(self, reader: int, port: int, cast: str) -> None:
        """Lets a node, given by its number in the view, read a Cast."""
        self.nodes[reader].input[port] = cast


class _FunctionEditor:
    """The same for a function's body, whose results are nodes of its view."""

    def __init__(self, function_def: function_pb2.FunctionDef) -> None:
        self.nodes = function_def.node_def
        self.first = len(function_def.signature.input_arg)
        self._results = [arg.name for arg in function_def.signature.output_arg]
        self._ret = function_def.ret
        self._end = self.first + len(self.nodes)

    def rewire(self, reader: int, port: int, cast: str) -> None:
        tensor = f"{cast}:y:0"
        if reader >= self._end:
            self._ret[self._results[reader - self._end]] = tensor
        else:
            self.nodes[reader - self.first].input[port] = tensor
