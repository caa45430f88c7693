"""Positions: what picks elements or pixels by its value is computed in float32.

A pixel's place plus a predicted offset, its floor, and that as an integer:

    rows, columns = Cast(Floor(grid + flow));  GatherNd(image, [rows + 1, columns + 1])

In bfloat16 254.9 is 255, so that the row 256 is asked for, and from 64 on all is in quarters.
What a Cast to integers reads stays float32 back to the last product, if the integers are indices,
and so do boxes and transforms of which an op makes the indices itself.
"""

from __future__ import annotations

from itertools import islice

from graph_passes.coloring.state import CLEAR, INFER, Coloring
from graph_passes.coloring.ways import MOST_NEAR, what_is_before
from graph_passes.ir.adjacency import walk
from graph_passes.ops.reasons import Reason
from graph_passes.policy.op_classes import ops_of

_ENDS = ("ArgMax", "ArgMin", "Cast", "Equal", "Shape", "Size", "Where")
_INDICES = ops_of("indexed_by_input_0"), ops_of("indexed_by_input_1")
_PLACES = ops_of("placed_by_input_0"), ops_of("placed_by_input_1")


def keep_positions(coloring: Coloring) -> None:
    """Keeps what indices, boxes and transforms are made of in float32."""
    view, codes = coloring.view, coloring.list_codes
    casts, first = {*view.of_op("Cast")}, {-1, *view.of_op(*_ENDS)}
    ends: list[int] = []
    for port, (by_index, by_place) in enumerate(zip(_INDICES, _PLACES, strict=True)):
        for number in view.of_op(*by_index):
            # Integers are moved, added and bounded on the way, but not converted.
            way = walk([view.makers(number)[port]], view.makers, lambda n: n not in first)
            made = casts.intersection(islice(way, MOST_NEAR))
            ends += [vertex for cast in made for vertex in view.producers(cast)]
        ends += [view.producers(number)[port] for number in view.of_op(*by_place)]
    for vertex in ends:
        if codes[vertex] in (INFER, CLEAR):
            coloring.block([vertex, *what_is_before(coloring, vertex)], Reason.POSITION)
