"""What is added little by little is added in float32.

Explicit steps of a differential equation, `tf.scan`, weights that a loop trains and moving averages
add little to much, and bfloat16 loses what is less than a 256th of it: 100 steps of size 0.001
moved a state by a quarter of its way, and `x -= 0.001 * x` nowhere at all. TensorFlow's own pass
loses it as well. A loop shows what it adds up; elsewhere the constant factor of a step does, of
which a residual network has none, or how many are added at once, or that several lead on from a
variable, or a constant that is far above what a network gives (`500 * y + 20000`). What comes to a
sum stays as it is, products above all.

A loop that compares the values of two rounds, to end where they are alike, may never end: in
bfloat16 neighbouring values are a 256th apart. All that leads round such a loop stays float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.coloring.constant_range import LARGEST
from graph_passes.coloring.state import CLEAR, Coloring
from graph_passes.coloring.ways import ADDITIONS, SCALINGS, Ways, linear, stored_numbers
from graph_passes.ir.adjacency import walk
from graph_passes.ir.graph_view import GraphView, Shape
from graph_passes.ops.reasons import Reason

SMALL_FACTOR = 1 / 32
"""A step by so small a factor loses three of the eight bits of bfloat16, in each round."""

_MOST = 1e8
"""Larger numbers stand for infinity, as in masks."""
_MASKS = frozenset(("Select", "SelectV2", "Softmax"))
"""What reads a sum with a large number by which some scores are left out."""
_DIFFERENCES = frozenset(("SquaredDifference", "Sub"))
_SPREAD = frozenset(("BroadcastTo", "Tile"))


def keep_small_steps(coloring: Coloring) -> None:
    """Keeps sums that loops carry, small steps, and loops to a fixed point in float32."""
    coloring.block(_sums_of_small_parts(coloring), Reason.SMALL_STEP)
    coloring.block(_sums_of_many(coloring), Reason.SMALL_STEP)
    coloring.block(_steps_of_weights(coloring), Reason.SMALL_STEP)
    if carriers := frozenset(coloring.carriers()):
        for found in (_sums_of_loops, _loops_to_a_fixed_point):
            coloring.block(found(coloring, carriers), Reason.SMALL_STEP)


def _sums_of_loops(coloring: Coloring, carriers: frozenset[int]) -> Iterator[int]:
    """The vertices on circles through loop variables that additions are on.

    Besides additions a circle has products with a single number, and ops that hand values on. The
    gates of a recurrent layer, which are tensors, are none of these.
    """
    edges, adds = coloring.edges, coloring.has_op(ADDITIONS)
    enter = linear(coloring, coloring.list_codes == CLEAR)
    reach = functools.partial(edges.reach, sorted(carriers), enter)
    left = enter & reach(forward=True) & reach(backward=True)
    for carrier in carriers:
        if left[carrier]:
            ahead = set(walk([carrier], edges.readers, left.__getitem__))
            before = set(walk([carrier], edges.producers, left.__getitem__))
            circle = [vertex for vertex in ahead & before if left[vertex]]
            left[circle] = False
            if adds[circle].any():
                yield from circle


def _sums_of_small_parts(coloring: Coloring) -> Iterator[int]:
    """The additions of what was multiplied by a small constant or divided by a large one, or to it.

    What a large constant is added to is as small beside it, as is what a network tells of prices.
    """
    view, edges = coloring.view, coloring.edges
    adds = coloring.has_op(ADDITIONS)
    most = LARGEST if coloring.target == types_pb2.DT_HALF else _MOST  # beyond, it denies
    masks = coloring.has_op(_MASKS)
    products, clear = set[int](), coloring.list_codes == CLEAR
    for constant, least, is_one in _small_constants(coloring):
        for reader in edges.readers(constant):
            is_far = 1 / SMALL_FACTOR < least <= most
            if is_far and adds[reader] and not masks[edges.readers(reader)].any():
                yield reader
            if is_one and _shrinks(view, reader, constant, least):
                products.add(reader)
    yield from filter(adds.item, walk(products, edges.readers, lambda v: clear[v] or v in products))


def _sums_of_many(coloring: Coloring) -> Iterator[int]:
    """The additions of so many that one is little, as of the gradients of a weight used often.

    TensorFlow adds up large gradients in several parts, of which the last reads the others.
    """
    view, edges = coloring.view, coloring.edges
    many = [v for v in coloring.floats_of({"AddN"}) if len(edges.producers(v)) > 1 / SMALL_FACTOR]
    return walk(many, lambda v: (r for r in edges.readers(v) if view.op_of(r) == "AddN"))


def _steps_of_weights(coloring: Coloring) -> Iterator[int]:
    """The additions that lead on from a variable, where there are several: unrolled training.

    What is added has the shape of the variable, unlike what a bias is added to.
    """
    view, edges = coloring.view, coloring.edges
    adds = coloring.has_op(ADDITIONS) & _is_free(coloring)
    leads_on = adds | coloring.has_op({"Identity"})
    is_start = leads_on[view.targets] & coloring.has_op({"ReadVariableOp"})[view.sources]

    def shape(vertex: int) -> Shape | None:
        return view.shape(view.node_of(vertex).name)

    def steps(vertex: int) -> list[int]:
        read = [r for r in edges.readers(vertex) if leads_on[r]]
        read = [r for r in read if view.op_of(r) != "Sub" or edges.producers(r)[0] == vertex]
        return [r for r in read if shape(r) == shape(vertex) is not None]

    for variable in np.unique(view.sources[is_start]).tolist():
        found = [vertex for vertex in walk(steps(variable), steps) if adds[vertex]]
        yield from found if len(found) > 1 else ()


def _is_free(coloring: Coloring) -> np.ndarray:
    """The vertices that update no variable, which stay float32 for that; bool [vertices]."""
    return np.frombuffer(bytes(coloring.why), np.uint8) != Reason.VARIABLE_UPDATE


def _loops_to_a_fixed_point(coloring: Coloring, carriers: frozenset[int]) -> Iterator[int]:
    """What leads round the loops that compare the values of two rounds."""
    view, edges, ways = coloring.view, coloring.edges, Ways(coloring)
    hands_on = coloring.list_codes == CLEAR
    hands_on[list(carriers)] = True
    for difference in coloring.floats_of(_DIFFERENCES):
        compared = ways.origins(difference)
        for old in compared & carriers:
            for new in compared - {old}:
                if old in walk(edges.readers(new), edges.readers, hands_on.__getitem__):
                    reach = functools.partial(edges.reach, [new], view.is_float)
                    circle = coloring.where(reach(forward=True) & reach(backward=True))
                    yield from circle if len(circle) > 1 else ()  # else what the loop starts with


def _shrinks(view: GraphView, vertex: int, constant: int, factor: float) -> bool:
    """Whether a vertex multiplies by a small constant, or divides by a large one.

    The gradient of a mean, which is divided behind the op that spreads it, is no step.
    """
    if 0.0 < factor < SMALL_FACTOR:
        return view.op_of(vertex) == "Mul"
    if factor <= 1 / SMALL_FACTOR or view.op_of(vertex) != "RealDiv":
        return False
    divided, by = view.producers(view.vertex_nodes[vertex])
    return by == constant and view.op_of(divided) not in _SPREAD


def _small_constants(coloring: Coloring) -> Iterator[tuple[int, float, bool]]:
    """What sums, products and quotients read of few stored or captured numbers.

    With the size of the smallest, and whether it stands for all of them.
    """
    computes = coloring.has_op(ADDITIONS | SCALINGS) & _is_free(coloring)
    for vertex, values in stored_numbers(coloring, computes):
        if len(values):
            yield vertex, min(map(abs, values)), len(values) == 1
