"""The colouring: which vertices go to the target dtype.

The stages and their order are those of `AutoMixedPrecisionImpl::Optimize` in TensorFlow's
`core/grappler/optimizers/auto_mixed_precision.cc`, restated over a graph of (node, type
attribute) vertices. Only float32 vertices are painted: an edge joins two vertices of one dtype,
so no colour ever reaches a vertex of another dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.canvas import ALLOW, CLEAR, DENY, INFER, Canvas
from graph_passes.kinds import Kind
from graph_passes.op_lists import may_be_forced
from graph_passes.reasons import Reason
from graph_passes.recurrences import ref_variable_readers

_QUANTIZED = frozenset(
    (
        types_pb2.DT_QINT8,
        types_pb2.DT_QUINT8,
        types_pb2.DT_QINT16,
        types_pb2.DT_QUINT16,
        types_pb2.DT_QINT32,
    )
)

_STORED = frozenset(("Const", "ReadVariableOp"))


def paint_allow_list(canvas: Canvas) -> None:
    """Ops of the allow list go low: they are safe and worth the most."""
    canvas.paint(canvas.where((canvas.listed == ALLOW) & canvas.eligible), Reason.ALLOW_LIST)
    if canvas.lists.force_all:
        candidates = canvas.where(canvas.view.is_float & canvas.eligible)
        canvas.paint((v for v in candidates if _may_force(canvas, v)), Reason.FORCED)


def _may_force(canvas: Canvas, vertex: int) -> bool:
    op_type = canvas.view.op_type(canvas.view.vertex_nodes[vertex])
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
    downstream = canvas.edges.reach(roots, canvas.with_kernel(follows).tobytes(), forward=True)
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
    settled = np.frombuffer(bytes(low), bool) | np.frombuffer(bytes(denied), bool)
    infer = (canvas.listed == INFER) & canvas.eligible & ~settled
    candidates = [vertex for vertex in canvas.where(infer) if canvas.is_permitted(vertex)]
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


def paint_infer_after_clear(canvas: Canvas, *, behind_units: bool) -> list[int]:
    """Infer ops behind clear ops that went low follow.

    The other sweep comes before clear ops go low, so an op behind one, such as a Sigmoid behind a
    Split or the sum of gradients that were reshaped, has stayed float32. It joins if at least as
    many of its operands are low as are in float32, constants and weights not counted, and none is
    denied. Clear ops around it come along.

    Args:
        canvas: the painting.
        behind_units: whether the result of a unit counts as low if what is low reads it, itself
            or behind clear ops. A unit gives the target dtype, so its result is fit for it.

    Returns:
        The vertices that have joined, in order.
    """
    view, edges, low = canvas.view, canvas.edges, canvas.low
    is_low = np.frombuffer(bytes(low), bool)
    denied = np.frombuffer(bytes(canvas.denied), bool)
    infer = (canvas.listed == INFER) & canvas.eligible & ~denied
    clear = (canvas.listed == CLEAR) & canvas.eligible & ~denied
    follows = _may_follow(canvas).tobytes()
    inside = np.frombuffer(bytes(canvas.why), np.uint8) == Reason.INSIDE_UNIT
    results = (inside & (canvas.listed == 0) & behind_units).tobytes()
    passes = (clear & behind_units).tobytes()
    given = bytearray(low)
    joined: list[int] = []
    pending: list[int] = []

    def give(vertex: int) -> None:
        given[vertex] = 1
        pending.append(vertex)

    def join(vertex: int, reason: Reason) -> None:
        canvas.paint((vertex,), reason)
        joined.append(vertex)
        give(vertex)

    pending += np.unique(view.sources[is_low[view.sources] & infer[view.targets]]).tolist()
    for vertex in np.unique(view.sources[is_low[view.targets]]).tolist():
        if results[vertex]:
            give(vertex)
    while pending:
        vertex = pending.pop()
        for reader in edges.successors[vertex]:
            if low[reader]:
                continue
            if low[vertex] and follows[reader]:
                join(reader, Reason.CLEAR_FLOOD)
            elif infer[reader] and _reads_mostly(canvas, given, reader):
                join(reader, Reason.AFTER_ALLOW)
            elif passes[reader] and not given[reader]:
                give(reader)
        for maker in edges.predecessors[vertex] if low[vertex] else ():
            if follows[maker] and not low[maker]:
                join(maker, Reason.CLEAR_FLOOD)
            elif results[maker] and not given[maker]:
                give(maker)
    return sorted(joined)


def _reads_mostly(canvas: Canvas, given: bytearray, vertex: int) -> bool:
    """Whether an infer vertex joins, by which of its operands are given in the target dtype."""
    op_of, inputs = canvas.view.op_of, canvas.edges.predecessors[vertex]
    makers = [v for v in inputs if op_of(v) not in _STORED]
    low = sum(given[v] for v in makers)
    return (
        0 < len(makers) <= 2 * low
        and not any(canvas.denied[v] for v in makers)
        and canvas.is_permitted(vertex)
    )


def erase_useless(canvas: Canvas, joined: Sequence[int]) -> None:
    """Takes the colour from those of some vertices that save no Cast.

    Args:
        canvas: the painting.
        joined: the vertices.
    """
    low, producers, new = canvas.low, canvas.edges.predecessors, frozenset(joined)
    pending = list(joined)
    while pending:
        vertex = pending.pop()
        if low[vertex] and _saved_casts(canvas, vertex) <= 0:
            canvas.erase((vertex,), Reason.NO_ALLOW_NEAR)
            neighbours = (*producers[vertex], *canvas.edges.successors[vertex])
            pending.extend(v for v in neighbours if v in new)


def _saved_casts(canvas: Canvas, vertex: int) -> int:
    """How many Casts there are fewer for a vertex being low, with the others as they are."""
    low, edges = canvas.low, canvas.edges
    readers = {low[v] for v in edges.successors[vertex]}
    saved = (1 in readers) - (0 in readers)
    for maker in edges.predecessors[vertex]:
        if canvas.view.op_of(maker) in _STORED:
            continue
        others = {low[v] for v in edges.successors[maker] if v != vertex}
        if 1 - low[maker] not in others:  # else the Cast is there in any case
            saved += 1 if low[maker] else -1
    return saved


def flood_clear(canvas: Canvas) -> None:
    """Clear ops joined to a converted op, either way, go low."""
    low = np.frombuffer(bytes(canvas.low), bool)
    roots = canvas.where(low & canvas.eligible)
    enter = _may_follow(canvas)
    flooded = canvas.edges.reach(roots, enter.tobytes(), forward=True, backward=True)
    canvas.paint(canvas.where(np.frombuffer(flooded, np.uint8)), Reason.CLEAR_FLOOD)


def _may_follow(canvas: Canvas) -> np.ndarray:
    """The clear vertices that go low where a neighbour does; bool [vertices]."""
    view = canvas.view
    denied = np.frombuffer(bytes(canvas.denied), bool)
    low = np.frombuffer(bytes(canvas.low), bool)
    found = canvas.with_kernel((canvas.listed == CLEAR) & canvas.eligible & ~denied & ~low)
    for number in ref_variable_readers(view):
        first = view.base[number]
        for vertex in range(first, first + len(view.layout(number).slots)):
            if found[vertex]:
                found[vertex] = False
                canvas.why[vertex] = Reason.READS_VARIABLE
    return found


def erase_unsupported(canvas: Canvas) -> None:
    """Takes the colour from what cannot hold the target dtype.

    TensorFlow's pass asks the op definition alone here and may leave an op without a kernel;
    this one asks for the kernel too, for every converted vertex.
    """
    low = np.frombuffer(bytes(canvas.low), bool)
    supported = canvas.with_kernel(low)
    canvas.erase(canvas.where(low & ~supported), Reason.NO_KERNEL)
    quantized = canvas.view.per_slot(_is_quantized, bool)
    canvas.erase(canvas.where(supported & (canvas.listed == ALLOW) & quantized), Reason.QUANTIZED)


def _is_quantized(kind: Kind) -> list[bool]:
    """For each slot of a kind whether any of its slots is quantized."""
    return [not _QUANTIZED.isdisjoint(kind.dtypes)] * len(kind.dtypes)


def match_existing_casts(canvas: Canvas) -> None:
    """A Cast to float32 that converted ops alone read makes the target dtype itself."""
    view = canvas.view
    for number in view.of_op("Cast"):
        made = view.base[number] + view.layout(number).out_slots[0]
        if not view.is_float[made] or not canvas.eligible[made]:
            continue
        readers = view.readers(made)
        if readers and all(canvas.low[reader] for reader in readers):
            canvas.paint((made,), Reason.EXISTING_CAST)
