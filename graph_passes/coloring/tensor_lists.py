"""Tensor lists: ops that pass tensors to each other through a variant handle.

A list has one element dtype, so all ops that share a list get one colour. Writers and readers of
a list are joined by implicit edges, since the tensor that is read is the one that was written. They
run through a relay for each handle on the way, of which there are fewer than pairs.
The rules are those of `FindFloat32TensorListOpClustersAndDenylistUnsafe` and its neighbours in
TensorFlow's `auto_mixed_precision.cc`.
"""

from __future__ import annotations

from tensorflow.core.framework import types_pb2

from graph_passes.coloring.state import Coloring
from graph_passes.ir.adjacency import Adjacency, walk
from graph_passes.ir.graph_view import FLOAT, GraphView
from graph_passes.ops.reasons import Reason
from graph_passes.policy.op_classes import ops_of

HANDLE = types_pb2.DT_VARIANT
READERS, WRITERS = ops_of("list_readers"), ops_of("list_writers")
_BOUNDARIES = ops_of("list_boundaries")
_CONTAINERS = ("EmptyTensorList", "EmptyTensorMap", "TensorList", "TensorMap")
# Ops that run functions: TensorFlow's pass meets them lowered and does not name them.
_FUNCTIONAL = ops_of("control_flow")


def find_clusters(coloring: Coloring) -> None:
    """Groups float32 tensor-list ops by the lists they share, and makes the edge tables.

    Implicit edges run from writers to readers. Of each cluster that must stay float32, because its
    list leaves the graph or belongs to an ineligible node, one vertex is denied.
    """
    view = coloring.view
    elements = _element_vertices(view)
    if not elements:
        coloring.connect([])
        return
    handles = view.adjacency(HANDLE, [] if coloring.config.parity else nested(view))
    handle_of = {number: view.vertices_of(number, HANDLE) for number in elements}
    unsafe: list[int] = []
    seen: set[int] = set()
    relays: dict[int, int] = {}
    for number, element in elements.items():
        if number in seen or not coloring.eligible[element]:
            continue
        shared = connected(handles, handle_of[number])
        for handle in shared:
            relays.setdefault(handle, len(view.dtypes) + len(relays))
        members = {view.vertex_nodes[handle] for handle in shared}
        own = elements.keys() & members
        cluster = [elements[member] for member in sorted(own)]
        seen |= own
        leaves = any(_is_boundary(coloring, member) for member in members - own)
        if leaves or not all(coloring.eligible[vertex] for vertex in cluster):
            unsafe.append(element)
        coloring.clusters.append(cluster)
    # No path runs out of a node that is not eligible, as none does in TensorFlow's pass.
    edges = [
        (relays[handle], relays[reader])
        for handle in relays
        if coloring.eligible[handle]
        for reader in handles.successors[handle]
    ]
    for number in sorted(seen):
        op = view.nodes[number].op
        pairs = [(elements[number], relays[h]) for h in handle_of[number] if h in relays]
        if op in WRITERS:
            edges += pairs
        elif op in READERS:
            edges += [(relay, element) for element, relay in pairs]
    coloring.connect(edges)
    coloring.deny(unsafe, Reason.UNSAFE_CLUSTER)


def match_cluster_colours(coloring: Coloring) -> None:
    """Gives every cluster one colour: DENY where a member has it, else ALLOW where one has."""
    for cluster in coloring.clusters:
        if any(coloring.denied[vertex] for vertex in cluster):
            coloring.deny(cluster, Reason.UNSAFE_CLUSTER)
        elif any(coloring.low[vertex] for vertex in cluster):
            coloring.paint(cluster, Reason.LIST_CLUSTER)


def _element_vertices(view: GraphView) -> dict[int, int]:
    """Tensor-list node -> the vertex of its element dtype, where that is float32."""
    lists = view.of_node_type(lambda t: t.op_type is not None and "TensorList" in t.op_type.name)
    floats = {number: view.vertices_of(number, FLOAT) for number in lists}
    return {number: vertices[0] for number, vertices in floats.items() if vertices}


def nested(view: GraphView) -> list[tuple[int, int]]:
    """Joins a list of lists to its elements: a list that is put in comes out again elsewhere."""
    pairs: list[tuple[int, int]] = []
    for number in view.of_node_type(lambda node_type: node_type.op.startswith(_CONTAINERS)):
        handle, *elements = view.vertices_of(number, HANDLE) or [0]
        pairs.extend((handle, element) for element in elements)
    return pairs


def connected(handles: Adjacency, roots: list[int]) -> list[int]:
    """The handles that edges join to some, either way."""
    ways = handles.successors, handles.predecessors
    return sorted(walk(roots, lambda handle: (*ways[0][handle], *ways[1][handle])))


def _is_boundary(coloring: Coloring, number: int) -> bool:
    op = coloring.view.nodes[number].op
    if op in _BOUNDARIES or coloring.view.node_type(number).is_call:
        return True
    return op in _FUNCTIONAL and not coloring.config.parity
