"""Tensor lists: ops that pass tensors to each other through a variant handle.

A list has one element dtype, so all ops that share a list get one colour. Writers and readers of
a list are joined by implicit edges, since the tensor that is read is the one that was written.
The rules are those of `FindFloat32TensorListOpClustersAndDenylistUnsafe` and its neighbours in
TensorFlow's `auto_mixed_precision.cc`.
"""

from __future__ import annotations

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.adjacency import Adjacency
from graph_passes.canvas import Canvas
from graph_passes.kinds import Kind
from graph_passes.op_registry import SINGLE
from graph_passes.reasons import Reason
from graph_passes.view import GraphView

_READERS = frozenset(
    (
        "TensorListConcat",
        "TensorListConcatV2",
        "TensorListGather",
        "TensorListGetItem",
        "TensorListPopBack",
        "TensorListStack",
    )
)
_WRITERS = frozenset(
    (
        "TensorListFromTensor",
        "TensorListPushBack",
        "TensorListPushBackBatch",
        "TensorListScatter",
        "TensorListScatterIntoExistingList",
        "TensorListScatterV2",
        "TensorListSetItem",
        "TensorListSplit",
    )
)
_BOUNDARIES = frozenset(
    (
        "_Arg",
        "_Retval",
        "OptionalFromValue",
        "OptionalGetValue",
        "PartitionedCall",
        "Placeholder",
        "StatefulPartitionedCall",
    )
)
_CONTAINERS = ("EmptyTensorList", "EmptyTensorMap", "TensorList", "TensorMap")
# Ops that run functions: TensorFlow's pass meets them lowered and does not name them.
_FUNCTIONAL = frozenset(("Case", "If", "StatelessCase", "StatelessIf", "StatelessWhile", "While"))

Cluster = list[int]
"""The element-dtype vertices of the ops that share a list."""


def find_clusters(canvas: Canvas) -> tuple[list[Cluster], list[tuple[int, int]], list[int]]:
    """Groups float32 tensor-list ops by the lists they share.

    Args:
        canvas: the painting; eligibility is read, nothing is written.

    Returns:
        The clusters; the implicit (writer, reader) edges between their vertices; and one vertex
        of each cluster that must stay float32, because its list leaves the graph or belongs to
        an ineligible node.
    """
    view = canvas.view
    elements = _element_vertices(view)
    if not elements:
        return [], [], []
    handles = view.adjacency(types_pb2.DT_VARIANT, [] if canvas.config.parity else _nested(view))
    handle_of = {number: _handle_vertices(view, number) for number in elements}
    clusters: list[Cluster] = []
    unsafe: list[int] = []
    seen: set[int] = set()
    for number, element in elements.items():
        if number in seen or not canvas.eligible[element] or not handle_of[number]:
            continue
        members = _members(view, handles, handle_of[number])
        cluster = [elements[member] for member in members if member in elements]
        seen.update(member for member in members if member in elements)
        if any(_is_boundary(canvas, member) for member in members if member not in elements) or (
            not all(canvas.eligible[vertex] for vertex in cluster)
        ):
            unsafe.append(element)
        clusters.append(cluster)
    edges = [
        (elements[writer], elements[reader])
        for reader in elements
        if reader in seen and view.nodes[reader].op in _READERS
        for writer in _writers_of(canvas, handles, handle_of[reader])
        if writer in elements
    ]
    return clusters, edges, unsafe


def match_cluster_colours(canvas: Canvas, clusters: list[Cluster]) -> None:
    """Gives every cluster one colour: DENY where a member has it, else ALLOW where one has."""
    for cluster in clusters:
        if any(canvas.denied[vertex] for vertex in cluster):
            canvas.deny(cluster, Reason.UNSAFE_CLUSTER)
        elif any(canvas.low[vertex] for vertex in cluster):
            canvas.paint(cluster, Reason.LIST_CLUSTER)


def _element_vertices(view: GraphView) -> dict[int, int]:
    """Tensor-list node -> the vertex of its element dtype, where that is float32."""
    found: dict[int, int] = {}
    for number in view.of_kind(lambda k: k.op_type is not None and "TensorList" in k.op_type.name):
        first = view.base[number]
        for position, slot in enumerate(view.layout(number).slots):
            if slot.attr and slot.index == SINGLE and view.is_float[first + position]:
                found[number] = first + position
                break
    return found


def _handle_vertices(view: GraphView, number: int) -> list[int]:
    first = view.base[number]
    return [
        first + position
        for position in range(len(view.layout(number).slots))
        if view.dtypes[first + position] == types_pb2.DT_VARIANT
    ]


def _is_container(kind: Kind) -> bool:
    return kind.op_type is not None and kind.op_type.name.startswith(_CONTAINERS)


def _nested(view: GraphView) -> list[tuple[int, int]]:
    """Joins a list of lists to its elements: a list that is put in comes out again elsewhere."""
    pairs: list[tuple[int, int]] = []
    for number in view.of_kind(_is_container):
        handle, *elements = _handle_vertices(view, number) or [0]
        pairs.extend((handle, element) for element in elements)
    return pairs


def _members(view: GraphView, handles: Adjacency, roots: list[int]) -> list[int]:
    everywhere = b"\1" * len(view.dtypes)
    reached = handles.reach(roots, everywhere, forward=True, backward=True)
    owners = np.asarray(view.vertex_nodes)[np.frombuffer(reached, bool)]
    return np.unique(owners).tolist()  # type: ignore[no-any-return]


def _is_boundary(canvas: Canvas, number: int) -> bool:
    op = canvas.view.nodes[number].op
    if op in _BOUNDARIES or canvas.view.calls_function(number):
        return True
    return op in _FUNCTIONAL and not canvas.config.parity


def _writers_of(canvas: Canvas, handles: Adjacency, roots: list[int]) -> list[int]:
    """The nodes that wrote what a reader may read: the writers upstream of its handle.

    The search stops at nodes that are not eligible, as TensorFlow's does.
    """
    view = canvas.view
    writers: set[int] = set()
    seen = set(roots)
    stack = list(roots)
    while stack:
        vertex = stack.pop()
        number = view.vertex_nodes[vertex]
        if view.nodes[number].op in _WRITERS:
            writers.add(number)
        for producer in handles.predecessors[vertex]:
            if producer not in seen and canvas.eligible[producer]:
                seen.add(producer)
                stack.append(producer)
    return sorted(writers)
