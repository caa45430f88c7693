"""What is added little by little is added in float32.

Explicit steps of a differential equation, `tf.scan`, weights that a loop trains and moving averages
add little to much, and bfloat16 loses what is less than a 256th of it: 100 steps of size 0.001
moved a state by a quarter of its way, and `x -= 0.001 * x` nowhere at all. TensorFlow's own pass
loses it as well. A loop shows what it adds up; elsewhere the constant factor of a step does, of
which a residual network has none, or how many are added at once. What comes to a sum stays as it
is, products above all. But one that a loop hands on with nothing but sums and single factors around
it, `h @ W + x`, is a sum of many rounds itself.

A loop that compares the values of two rounds, to end where they are alike, may never end: in
bfloat16 neighbouring values are a 256th apart. All that leads round such a loop stays float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tensorflow.core.framework import tensor_pb2

from graph_passes.coloring.linear_steps import (
    ADDITIONS,
    MATRIX_PRODUCTS,
    SCALINGS,
    is_by_a_tensor,
    moves,
)
from graph_passes.coloring.state import CLEAR, Coloring
from graph_passes.ir.adjacency import walk
from graph_passes.ir.constants import stored_floats
from graph_passes.ir.graph_view import GraphView
from graph_passes.ops.node_types import NodeType
from graph_passes.ops.reasons import Reason

SMALL_FACTOR = 1 / 32
"""A step by so small a factor loses three of the eight bits of bfloat16, in each round."""

_DIFFERENCES = frozenset(("SquaredDifference", "Sub"))
_SPREAD = frozenset(("BroadcastTo", "Tile"))


def keep_small_steps(coloring: Coloring) -> None:
    """Keeps sums that loops carry, small steps, and loops to a fixed point in float32."""
    coloring.block(_sums_of_loops(coloring), Reason.SMALL_STEP)
    coloring.block(_linear_recurrences(coloring), Reason.SMALL_STEP)
    coloring.block(_sums_of_small_parts(coloring), Reason.SMALL_STEP)
    coloring.block(_sums_of_many(coloring), Reason.SMALL_STEP)
    coloring.block(_loops_to_a_fixed_point(coloring), Reason.SMALL_STEP)


def _sums_of_loops(coloring: Coloring) -> Iterator[int]:
    """The vertices on circles through loop variables that additions are on.

    Besides additions a circle has products with a single number, and ops that hand values on. The
    gates of a recurrent layer, which are tensors, are none of these.
    """
    view = coloring.view
    carriers = coloring.carriers()
    if not carriers:
        return
    adds = view.is_vertex_of(_adds)
    scales = view.is_vertex_of(lambda node_type: node_type.op in SCALINGS)
    enter = (adds | scales | (coloring.list_codes == CLEAR)) & view.is_float
    ahead = coloring.edges.reach(carriers, enter, forward=True)
    behind = coloring.edges.reach(carriers, enter, backward=True)
    around = coloring.where(enter & ahead & behind)
    left = {vertex for vertex in around if not is_by_a_tensor(view, vertex)}

    def onward(vertex: int) -> list[int]:
        return [reader for reader in coloring.edges.readers(vertex) if reader in left]

    def back(vertex: int) -> list[int]:
        return [maker for maker in coloring.edges.producers(vertex) if maker in left]

    for carrier in carriers:
        if carrier in left:
            later, earlier = set(walk([carrier], onward)), set(walk([carrier], back))
            circle = later & earlier
            left -= circle
            if any(adds[vertex] for vertex in circle):
                yield from circle


def _linear_recurrences(coloring: Coloring) -> Iterator[int]:
    """What leads round a loop by one product, sums, single factors and moves alone."""
    view, edges = coloring.view, coloring.edges
    carriers = coloring.carriers()
    if not carriers:
        return
    multiplies = view.is_vertex_of(lambda node_type: node_type.op in MATRIX_PRODUCTS)
    scales = view.is_vertex_of(lambda node_type: node_type.op in SCALINGS)
    enter = (multiplies | view.is_vertex_of(_adds) | scales | moves(coloring)) & view.is_float
    for vertex in coloring.where(scales & view.is_float):
        enter[vertex] = not is_by_a_tensor(view, vertex)
    around = edges.reach(carriers, enter, forward=True) & edges.reach(
        carriers, enter, backward=True
    )
    products = frozenset(coloring.where(around & multiplies))
    inside = frozenset(coloring.where(around & enter)) if products else frozenset()

    def onward(vertex: int) -> list[int]:
        return [r for r in edges.readers(vertex) if r in inside and vertex not in products]

    def back(vertex: int) -> list[int]:
        return [m for m in edges.producers(vertex) if m in inside and vertex not in products]

    for carrier in inside.intersection(carriers):
        later, earlier = set(walk([carrier], onward)), set(walk([carrier], back))
        once = later & earlier & products
        behind = walk({r for product in once for r in edges.readers(product)}, onward)
        yield from once | earlier.intersection(behind) if once else ()


def _sums_of_small_parts(coloring: Coloring) -> Iterator[int]:
    """The additions of what was multiplied by a small constant, or divided by a large one."""
    view, edges = coloring.view, coloring.edges
    adds = view.is_vertex_of(_adds)
    products: list[int] = [
        reader
        for number, tensor in view.float_constants(view.is_float)
        if (factor := _factor(tensor))
        for reader in edges.readers(view.base[number])
        if _shrinks(view, reader, view.base[number], factor)
    ]

    def handed_on(vertex: int) -> list[int]:
        return [r for r in edges.readers(vertex) if coloring.list_codes[r] == CLEAR]

    for vertex in walk(products, handed_on):
        yield from (reader for reader in edges.readers(vertex) if adds[reader])


def _sums_of_many(coloring: Coloring) -> Iterator[int]:
    """The additions of so many that one is little, as of the gradients of a weight used often.

    TensorFlow adds up large gradients in several parts, of which the last reads the others.
    """
    view, edges = coloring.view, coloring.edges
    sums = (n for n in view.of_op("AddN") if view.is_float[view.base[n]])
    many = [view.base[n] for n in sums if len(view.makers(n)) > 1 / SMALL_FACTOR]
    return walk(many, lambda v: (r for r in edges.readers(v) if view.op_of(r) == "AddN"))


def _loops_to_a_fixed_point(coloring: Coloring) -> Iterator[int]:
    """What leads round the loops that compare the values of two rounds."""
    view, edges, codes = coloring.view, coloring.edges, coloring.list_codes
    carriers = frozenset(coloring.carriers())
    if not carriers:
        return

    def handed_on(vertex: int) -> list[int]:
        return [r for r in edges.readers(vertex) if r in carriers or codes[r] == CLEAR]

    differs = view.is_vertex_of(lambda node_type: node_type.op in _DIFFERENCES)
    for difference in coloring.where(differs & view.is_float):
        compared = set(map(coloring.origin, edges.producers(difference)))
        for old in compared & carriers:
            for new in compared - {old}:
                if old in walk([new], handed_on):
                    reach = functools.partial(edges.reach, [new], view.is_float)
                    circle = coloring.where(reach(forward=True) & reach(backward=True))
                    yield from circle if len(circle) > 1 else ()  # else what the loop starts with


def _shrinks(view: GraphView, vertex: int, constant: int, factor: float) -> bool:
    """Whether a vertex multiplies by a small constant, or divides by a large one.

    The gradient of a mean, which is divided behind the op that spreads it, is no step.
    """
    if factor < SMALL_FACTOR:
        return view.op_of(vertex) == "Mul"
    if factor <= 1 / SMALL_FACTOR or view.op_of(vertex) != "RealDiv":
        return False
    divided, by = view.producers(view.vertex_nodes[vertex])
    return by == constant and view.op_of(divided) not in _SPREAD


def _factor(tensor: tensor_pb2.TensorProto) -> float:
    """The size of the one number that a constant stores, 0 where it stores more."""
    stored = () if tensor.tensor_shape.dim else stored_floats(tensor)
    return abs(stored[0]) if len(stored) == 1 else 0.0


def _adds(node_type: NodeType) -> bool:
    return node_type.op in ADDITIONS
