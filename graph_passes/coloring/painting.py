"""The colouring: which vertices go to the target dtype.

The stages and their order are those of `AutoMixedPrecisionImpl::Optimize` in TensorFlow's
`core/grappler/optimizers/auto_mixed_precision.cc`, restated over a graph of (node, type
attribute) vertices. Only float32 vertices are painted: an edge joins two vertices of one dtype,
so no colour ever reaches a vertex of another dtype.
"""

from __future__ import annotations

import itertools

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.coloring.state import ALLOW, CLEAR, DENY, INFER, Coloring
from graph_passes.coloring.v1_loops import ref_variable_readers
from graph_passes.ops.reasons import Reason
from graph_passes.policy.op_lists import KEPT_BY_FORCE

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


def paint_allow_list(coloring: Coloring) -> None:
    """Ops of the allow list go low: they are safe and worth the most."""
    starts = (coloring.list_codes == ALLOW) & coloring.eligible & ~coloring.is_denied
    coloring.paint(coloring.where(starts), Reason.ALLOW_LIST)
    if coloring.lists.force_all:
        candidates = coloring.where(coloring.view.is_float & coloring.eligible)
        coloring.paint((v for v in candidates if _may_force(coloring, v)), Reason.FORCED)


def _may_force(coloring: Coloring, vertex: int) -> bool:
    op_type = coloring.view.op_type(coloring.view.vertex_nodes[vertex])
    return op_type is not None and op_type.name not in KEPT_BY_FORCE and op_type.is_pure


def propagate_deny(coloring: Coloring) -> None:
    """What a deny op computes stays float32 on its way to the next deny or infer op."""
    if coloring.lists.force_all:
        return
    codes = coloring.list_codes
    sinks = coloring.where((codes == DENY) | (codes == INFER))
    leads_to_sink = coloring.edges.reach(sinks, codes == CLEAR, backward=True)
    passable = leads_to_sink & ~coloring.is_denied
    roots = coloring.where(codes == DENY)
    coloring.deny(roots, Reason.DENY_LIST)
    starts = [*roots, *coloring.out_of_range]
    reached = coloring.edges.reach(starts, passable, forward=True, parents=coloring.parents)
    coloring.deny(coloring.where(reached), Reason.BEHIND_DENY)


def paint_between_allow(coloring: Coloring) -> None:
    """Infer and clear ops both behind and before an allow op go low: no casts in between."""
    codes, denied = coloring.list_codes, coloring.is_denied
    # TensorFlow's pass denies no op of the allow list, so parity makes no exception.
    roots = (codes == ALLOW) & coloring.eligible & ~(denied & (not coloring.config.parity))
    follows = ((codes == INFER) | (codes == CLEAR)) & coloring.eligible & ~denied
    starts = coloring.where(roots)
    downstream = coloring.edges.reach(starts, follows & coloring.has_kernel, forward=True)
    between = coloring.edges.reach(starts, downstream, backward=True)
    coloring.paint(coloring.where(between & ~roots), Reason.BETWEEN_ALLOW)


def paint_infer_after_allow(coloring: Coloring) -> None:
    """Infer ops that read a converted tensor, and no denied one, go low.

    TensorFlow's pass makes one sweep in node order. What converted ops reach is the same in a graph
    sorted by topology, and the same for every order of the nodes otherwise.
    """
    low, edges, is_low = coloring.low, coloring.edges, coloring.is_low
    enter = (coloring.list_codes == INFER) & coloring.eligible & ~is_low & coloring.permitted
    may_enter, passed = bytearray(enter & ~coloring.is_denied), set[int]()
    for vertex in coloring.where(coloring.is_denied):
        for reader in edges.readers(vertex, passed):
            may_enter[reader] = 0
    enter = np.frombuffer(may_enter, bool)
    if coloring.config.parity:
        for vertex in coloring.where(enter):
            if any(low[v] for v in edges.producers(vertex)):
                coloring.paint((vertex,), Reason.AFTER_ALLOW)
        return
    reached = edges.reach(coloring.where(is_low), enter, forward=True)
    coloring.paint(coloring.where(reached), Reason.AFTER_ALLOW)


def paint_infer_after_clear(coloring: Coloring) -> None:
    """Infer ops behind clear ops that went low follow.

    The other search comes before clear ops go low, so an op behind one, such as a Sigmoid behind a
    Split or the sum of gradients that were reshaped, has stayed float32. It follows if at least as
    many of its operands are low as are in float32, constants and weights not counted. Clear ops
    around it come along.

    Where bytes are weighed, the result of a unit counts as low if what is low reads it, itself or
    behind clear ops: a unit gives the target dtype, so its result is fit for it.
    """
    behind_units = coloring.config.weighs_bytes
    view, edges, low = coloring.view, coloring.edges, coloring.low
    is_low, may_follow = coloring.is_low, coloring.eligible & ~coloring.is_denied
    infer, clear = (may_follow & (coloring.list_codes == code) for code in (INFER, CLEAR))
    infer &= coloring.permitted
    follows = _may_follow(coloring).tobytes()
    inside = np.frombuffer(bytes(coloring.why), np.uint8) == Reason.INSIDE_UNIT
    results = (inside & (coloring.list_codes == 0) & behind_units).tobytes()
    passes = (clear & behind_units).tobytes()
    counted = bytearray(low)  # what counts as low
    missing: dict[int, int] = {}
    followers: list[int] = []
    pending: list[int] = []
    # Relays behind which all that counts as low, and is or is not, and all before what is was seen.
    behind: tuple[set[int], set[int]] = set(), set()
    before: set[int] = set()

    def count(vertex: int) -> None:
        pending.append(vertex)
        if not counted[vertex]:
            counted[vertex] = 1
            for reader in edges.successors[vertex] if view.op_of(vertex) not in _STORED else ():
                if reader in missing:
                    missing[reader] -= 1

    def paint(vertex: int, reason: Reason) -> None:
        coloring.paint((vertex,), reason)
        followers.append(vertex)
        count(vertex)

    def reads_mostly_low(vertex: int) -> bool:
        if vertex not in missing:
            makers = [v for v in edges.producers(vertex) if view.op_of(v) not in _STORED]
            missing[vertex] = (len(makers) + 1) // 2 - sum(counted[v] for v in makers)
        return missing[vertex] <= 0

    pending += np.unique(view.sources[is_low[view.sources] & infer[view.targets]]).tolist()
    for vertex in np.unique(view.sources[is_low[view.targets]]).tolist():
        if results[vertex]:
            count(vertex)
    while pending:
        vertex = pending.pop()
        for reader in edges.readers(vertex, behind[low[vertex]]):
            if low[reader]:
                continue
            if low[vertex] and follows[reader]:
                paint(reader, Reason.CLEAR_FLOOD)
            elif infer[reader] and reads_mostly_low(reader):
                paint(reader, Reason.AFTER_ALLOW)
            elif passes[reader] and not counted[reader]:
                count(reader)
        for maker in edges.producers(vertex, before) if low[vertex] else ():
            if follows[maker] and not low[maker]:
                paint(maker, Reason.CLEAR_FLOOD)
            elif results[maker] and not counted[maker]:
                count(maker)
    coloring.followers = sorted(followers)


def erase_useless(coloring: Coloring) -> None:
    """Takes the colour from those followers that save no Cast."""
    low, edges, new = coloring.low, coloring.edges, frozenset(coloring.followers)
    readers = _ReaderCounts(coloring)
    pending = list(coloring.followers)
    while pending:
        vertex = pending.pop()
        if low[vertex] and _saved_casts(coloring, readers, vertex) <= 0:
            makers = set(edges.producers(vertex))
            beside = [edges.readers(maker) for maker in makers if readers.lose(maker)]
            coloring.erase((vertex,), Reason.NO_ALLOW_NEAR)
            affected = itertools.chain(makers, edges.readers(vertex), *beside)
            pending.extend(v for v in affected if v in new)


class _ReaderCounts:
    """How many readers of a vertex are float32, and how many low, counted once."""

    def __init__(self, coloring: Coloring) -> None:
        self._coloring = coloring
        self._counts: dict[int, list[int]] = {}

    def of(self, vertex: int) -> list[int]:
        """The numbers of readers that are float32 and low."""
        if vertex not in self._counts:
            readers = set(self._coloring.edges.readers(vertex))
            low = sum(map(self._coloring.low.__getitem__, readers))
            self._counts[vertex] = [len(readers) - low, low]
        return self._counts[vertex]

    def lose(self, vertex: int) -> bool:
        """Notes that a reader is no longer low; whether another may save fewer Casts now.

        A low vertex needs its Cast from the first float32 reader on; a float32 one needs its Cast
        for the last low reader alone.
        """
        counts = self.of(vertex)
        counts[0] += 1
        counts[1] -= 1
        return counts[self._coloring.low[vertex] == 0] == 1


def _saved_casts(coloring: Coloring, readers: _ReaderCounts, vertex: int) -> int:
    """How many Casts there are fewer for a low vertex being so, with the others as they are."""
    float32, low = readers.of(vertex)
    saved = (low > 0) - (float32 > 0)
    for maker in set(coloring.edges.producers(vertex)):
        if coloring.view.op_of(maker) not in _STORED:
            float32, low = readers.of(maker)
            # Where others make the Cast of the maker necessary, it is there in any case.
            saved += not float32 if coloring.low[maker] else -(low == 1)
    return saved


def flood_clear(coloring: Coloring) -> None:
    """Clear ops joined to a converted op, either way, go low."""
    roots = coloring.where(coloring.is_low & coloring.eligible)
    flooded = coloring.edges.reach(roots, _may_follow(coloring), forward=True, backward=True)
    coloring.paint(coloring.where(flooded), Reason.CLEAR_FLOOD)


def _may_follow(coloring: Coloring) -> np.ndarray:
    """The clear vertices that go low where a neighbour does; bool [vertices]."""
    view = coloring.view
    clear = (coloring.list_codes == CLEAR) & coloring.eligible
    found = clear & ~coloring.is_denied & ~coloring.is_low & coloring.has_kernel
    for number in ref_variable_readers(view, parity=coloring.config.parity):
        for vertex in coloring.float_vertices(number):
            if found[vertex]:
                found[vertex] = False
                coloring.why[vertex] = Reason.READS_VARIABLE
    return found


def erase_unsupported(coloring: Coloring) -> None:
    """Takes the colour from what cannot hold the target dtype.

    TensorFlow's pass asks the op definition alone here and may leave an op without a kernel;
    this one asks for the kernel too, for every converted vertex.
    """
    low = coloring.is_low
    supported = low & coloring.has_kernel
    coloring.erase(coloring.where(low & ~supported), Reason.NO_KERNEL)
    quantized = coloring.view.is_vertex_of(lambda t: not _QUANTIZED.isdisjoint(t.dtypes))
    coloring.erase(
        coloring.where(supported & (coloring.list_codes == ALLOW) & quantized), Reason.QUANTIZED
    )


def match_existing_casts(coloring: Coloring) -> None:
    """A Cast to float32 that converted ops alone read makes the target dtype itself.

    Outside parity not one from the target dtype that waits for another node: TensorFlow's
    arithmetic optimizer takes a Cast between equal dtypes away with its control inputs, and what
    it waited for is lost.
    """
    view, parity = coloring.view, coloring.config.parity
    for number in view.of_op("Cast"):
        made = view.base[number] + view.layout(number).out_slots[0]
        if not view.is_float[made] or not coloring.eligible[made]:
            continue
        read = view.node_type(number).dtypes[view.layout(number).in_slots[0]]
        if not parity and read == coloring.target and number in view.waits:
            continue
        readers = view.readers(made)
        if readers and all(coloring.low[reader] for reader in readers):
            coloring.paint((made,), Reason.EXISTING_CAST)
