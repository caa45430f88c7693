"""The colouring: which vertices go to the target dtype.

The stages and their order are those of `AutoMixedPrecisionImpl::Optimize` in TensorFlow's
`core/grappler/optimizers/auto_mixed_precision.cc`, restated over a graph of (node, type
attribute) vertices. Only float32 vertices are painted: an edge joins two vertices of one dtype,
so no colour ever reaches a vertex of another dtype.
"""

from __future__ import annotations

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.canvas import ALLOW, CLEAR, DENY, INFER, Canvas
from graph_passes.op_lists import may_be_forced
from graph_passes.reasons import Reason
from graph_passes.recurrences import reads_ref_variable

_QUANTIZED = frozenset(
    (
        types_pb2.DT_QINT8,
        types_pb2.DT_QUINT8,
        types_pb2.DT_QINT16,
        types_pb2.DT_QUINT16,
        types_pb2.DT_QINT32,
    )
)


def paint_allow_list(canvas: Canvas) -> None:
    """Ops of the allow list go low: they are safe and worth the most."""
    canvas.paint(canvas.where((canvas.listed == ALLOW) & canvas.eligible), Reason.ALLOW_LIST)
    if canvas.lists.force_all:
        candidates = canvas.where(canvas.view.is_float & canvas.eligible)
        canvas.paint((v for v in candidates if _may_force(canvas, v)), Reason.FORCED)


def _may_force(canvas: Canvas, vertex: int) -> bool:
    op_type = canvas.view.op_types[canvas.view.vertex_nodes[vertex]]
    if op_type is None:
        return False
    op_def = op_type.op_def
    refs = any(arg.is_ref for arg in (*op_def.input_arg, *op_def.output_arg))
    return may_be_forced(op_type.name, is_stateful=op_def.is_stateful, has_refs=refs)


def propagate_deny(canvas: Canvas, extra_roots: list[int]) -> None:
    """What a deny op computes stays float32 on its way to the next deny or infer op.

    Args:
        canvas: the painting.
        extra_roots: vertices that count as deny ops for another reason, coloured already.
    """
    if canvas.lists.force_all:
        return
    listed = canvas.listed
    sinks = canvas.where((listed == DENY) | (listed == INFER))
    leads_to_sink = canvas.edges.reach(sinks, (listed == CLEAR).tobytes(), backward=True)
    denied = np.frombuffer(bytes(canvas.denied), np.uint8)
    passable = (np.frombuffer(leads_to_sink, np.uint8) & (denied ^ 1)).tobytes()
    roots = canvas.where(listed == DENY)
    canvas.deny(roots, Reason.DENY_LIST)
    reached = canvas.edges.reach(
        [*roots, *extra_roots], passable, forward=True, parents=canvas.parents
    )
    canvas.deny(canvas.where(np.frombuffer(reached, np.uint8)), Reason.BEHIND_DENY)


def paint_between_allow(canvas: Canvas) -> None:
    """Infer and clear ops both behind and before an allow op go low: no casts in between."""
    listed = canvas.listed
    denied = np.frombuffer(bytes(canvas.denied), bool)
    roots = canvas.where((listed == ALLOW) & canvas.eligible & ~_own_deny(canvas, denied))
    follows = ((listed == INFER) | (listed == CLEAR)) & canvas.eligible & ~denied
    supported = bytearray(len(listed))
    for vertex in canvas.where(follows):
        supported[vertex] = canvas.has_kernel(vertex)
    downstream = canvas.edges.reach(roots, supported, forward=True)
    between = canvas.edges.reach(roots, downstream, backward=True)
    for root in roots:
        between[root] = 0
    canvas.paint(canvas.where(np.frombuffer(between, np.uint8)), Reason.BETWEEN_ALLOW)


def _own_deny(canvas: Canvas, denied: np.ndarray) -> np.ndarray:
    """Denied allow ops: in TensorFlow's pass there are none, so parity needs no exception."""
    return denied if not canvas.config.parity else np.zeros_like(denied)


def paint_infer_after_allow(canvas: Canvas) -> None:
    """Infer ops that read a converted tensor, and no denied one, go low.

    TensorFlow's pass makes one sweep in node order. Sweeping until nothing changes gives the same
    in a graph sorted by topology, and the same for every order of the nodes otherwise.
    """
    low, denied = canvas.low, canvas.denied
    producers = canvas.edges.predecessors
    candidates = [
        vertex
        for vertex in canvas.where((canvas.listed == INFER) & canvas.eligible)
        if not denied[vertex] and not low[vertex] and canvas.is_permitted(vertex)
    ]
    while True:
        joined = []
        for vertex in candidates:
            inputs = producers[vertex]
            if any(low[v] for v in inputs) and not any(denied[v] for v in inputs):
                low[vertex] = 1
                canvas.why[vertex] = Reason.AFTER_ALLOW
                joined.append(vertex)
        if not joined or canvas.config.parity:
            return
        candidates = [vertex for vertex in candidates if not low[vertex]]


def flood_clear(canvas: Canvas) -> None:
    """Clear ops joined to a converted op, either way, go low."""
    view = canvas.view
    denied = np.frombuffer(bytes(canvas.denied), bool)
    low = np.frombuffer(bytes(canvas.low), bool)
    roots = canvas.where(low & canvas.eligible)
    enter = bytearray(len(view.dtypes))
    for vertex in canvas.where((canvas.listed == CLEAR) & canvas.eligible & ~denied & ~low):
        if canvas.has_kernel(vertex):
            if reads_ref_variable(view, view.vertex_nodes[vertex]):
                canvas.why[vertex] = Reason.READS_VARIABLE
            else:
                enter[vertex] = 1
    flooded = canvas.edges.reach(roots, enter, forward=True, backward=True)
    canvas.paint(canvas.where(np.frombuffer(flooded, np.uint8)), Reason.CLEAR_FLOOD)


def erase_unsupported(canvas: Canvas) -> None:
    """Takes the colour from what cannot hold the target dtype.

    TensorFlow's pass asks the op definition alone here and may leave an op without a kernel;
    this one asks for the kernel too, for every converted vertex.
    """
    view = canvas.view
    for vertex in canvas.where(np.frombuffer(bytes(canvas.low), np.uint8)):
        if not canvas.has_kernel(vertex):
            canvas.erase((vertex,), Reason.NO_KERNEL)
        elif canvas.listed[vertex] == ALLOW and _is_quantized(canvas, view.vertex_nodes[vertex]):
            canvas.erase((vertex,), Reason.QUANTIZED)


def _is_quantized(canvas: Canvas, number: int) -> bool:
    first = canvas.view.base[number]
    dtypes = canvas.view.dtypes[first : first + len(canvas.view.layouts[number].slots)]
    return not _QUANTIZED.isdisjoint(dtypes)


def match_existing_casts(canvas: Canvas) -> None:
    """A Cast to float32 that converted ops alone read makes the target dtype itself."""
    view = canvas.view
    for number, op_type in enumerate(view.op_types):
        if op_type is None or op_type.name != "Cast":
            continue
        first = view.base[number]
        made = first + view.layouts[number].out_slots[0]
        if not view.is_float[made] or not canvas.eligible[made]:
            continue
        readers = view.readers(made)
        if readers and all(canvas.low[reader] for reader in readers):
            canvas.paint((made,), Reason.EXISTING_CAST)
