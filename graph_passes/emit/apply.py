"""Carries a plan out on a copy of the graph: retypes slots and inserts Casts."""

from __future__ import annotations

import dataclasses
from collections.abc import Container

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.coloring.constant_folding import convert_tensors, is_large
from graph_passes.coloring.plan import Plan
from graph_passes.emit.ref_reads import RefReads
from graph_passes.ir.copying import Graph, Proto, copy_graph
from graph_passes.ir.graph_view import FLOAT, GraphView
from graph_passes.ops.op_types import SINGLE
from graph_passes.rewriter.body_editor import BodyEditor
from graph_passes.rewriter.emitter import prototype_of

_SHORT = {types_pb2.DT_HALF: "Fp16", types_pb2.DT_BFLOAT16: "Bf16", types_pb2.DT_FLOAT: "Fp32"}


@dataclasses.dataclass(frozen=True)
class Applied:
    """A rewritten graph.

    Attributes:
        proto: the new graph; the original is untouched.
        touched: numbers of the nodes that are not as they were, in the view's numbering.
        casts: name of each inserted Cast -> the vertex whose tensor it casts.
    """

    proto: Graph
    touched: frozenset[int]
    casts: dict[str, int]


def apply_plan(plan: Plan, proto: Proto) -> Applied:
    """Builds the rewritten graph.

    Casts are named as TensorFlow's own pass names them, there is at most one for each output port
    and dtype, but for ref variables that are read at different times, and each has the device of
    the node that makes its input. The graph or function that the plan was made for is not changed.
    """
    view, target = plan.coloring.view, plan.coloring.target
    is_low = plan.coloring.low
    stored = dict(view.float_constants(plan.coloring.is_low))
    new = copy_graph(proto, view, [n for n, tensor in stored.items() if is_large(tensor)])
    editor = BodyEditor(new)
    nodes, first = editor.nodes, editor.first
    touched = set()
    for vertex in plan.low:
        number, slot = view.vertex_nodes[vertex], view.slot_of(vertex)
        attr = nodes[number - first].attr[slot.attr]
        if slot.index == SINGLE:
            attr.type = target
        else:
            attr.list.type[slot.index] = target
        touched.add(number)
    convert_tensors(
        ((old, nodes[number - first].attr["value"].tensor) for number, old in stored.items()),
        target,
    )
    cast_of: dict[tuple[int, tuple[str, ...]], str] = {}  # by tensor and what is waited for
    casts: dict[str, int] = {}
    # TensorFlow's pass, which is followed in parity, lets no Cast wait.
    ref_reads = None if plan.coloring.config.parity else RefReads(view)
    cut = np.array(plan.cut, np.int32)
    readers, tensors = view.edge_readers[cut], np.asarray(view.tensors)[cut]
    ports = cut - np.asarray(view.edge_starts)[readers]
    rows = np.stack((readers, ports, view.sources[cut], tensors), axis=1)
    for reader, port, source, tensor in rows.tolist():
        made, maker = divmod(tensor, len(view.nodes))
        awaited = tuple(ref_reads.awaited(maker, reader)) if ref_reads else ()
        if (tensor, awaited) not in cast_of:
            src, dst = (target, FLOAT) if is_low[source] else (FLOAT, target)
            name = _free_name(view, casts, view.names[maker], made, _SHORT[dst])
            prototype = prototype_of("Cast", (src,), (("DstT", dst),))
            read, device = view.nodes[reader].input[port], view.nodes[maker].device
            cast_of[tensor, awaited] = editor.add(prototype, name, read, device)
            nodes[-1].input.extend(f"^{name}" for name in awaited)
            casts[name] = source
        editor.rewire(reader, port, cast_of[tensor, awaited])
        touched.add(reader)
    return Applied(new, frozenset(touched), casts)


def _free_name(view: GraphView, taken: Container[str], producer: str, port: int, short: str) -> str:
    """The first free name as TensorFlow's own pass gives it, which counts within the name."""
    stem, count = f"{producer}-{port}-CastTo{short}", 0
    while (name := f"{stem}-{count}-AutoMixedPrecision") in view.index or name in taken:
        count += 1
    return name
