"""Positions: what integers that pick elements are made of is computed in float32.

A pixel's place plus a predicted offset, its floor, and that as an integer:

    rows, columns = Cast(Floor(grid + flow));  GatherNd(image, [rows + 1, columns + 1])

In bfloat16 254.9 is 255, so that the row 256 is asked for, and from 64 on all is in quarters.
What a Cast to integers reads stays float32 back to the last product, if the integers are indices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import islice

from tensorflow.core.framework import types_pb2

from graph_passes.coloring.state import CLEAR, INFER, Coloring
from graph_passes.coloring.ways import MOST_NEAR, what_is_before
from graph_passes.ir.adjacency import walk
from graph_passes.ir.graph_view import FLOAT, GraphView
from graph_passes.ops.reasons import Reason
from graph_passes.policy.op_classes import ops_of

_TO_INTEGERS = ((FLOAT, types_pb2.DT_INT32), (FLOAT, types_pb2.DT_INT64))
_ENDS = ("ArgMax", "ArgMin", "Cast", "Equal", "Shape", "Size", "Where")
_INDICES = ops_of("indexed_by_input_0"), ops_of("indexed_by_input_1")


def keep_positions(coloring: Coloring) -> None:
    """Keeps what indices are made of in float32."""
    view, codes = coloring.view, coloring.list_codes
    to_integers = view.is_of_node_type(lambda t: t.op == "Cast" and t.dtypes in _TO_INTEGERS)
    for port, ops in enumerate(_INDICES):
        for number in view.of_op(*ops):
            way = walk([view.makers(number)[port]], functools.partial(_made_of, view))
            casts = [made for made in islice(way, MOST_NEAR) if made >= 0 and to_integers[made]]
            for vertex in [vertex for cast in casts for vertex in view.producers(cast)]:
                if codes[vertex] in (INFER, CLEAR):
                    coloring.block([vertex, *what_is_before(coloring, vertex)], Reason.POSITION)


def _made_of(view: GraphView, number: int) -> Sequence[int]:
    """What integers are made of: moved, added and bounded, but not converted."""
    op_type = view.op_type(number) if number >= 0 else None
    is_end = op_type is None or not op_type.is_pure or op_type.name in _ENDS
    return () if is_end else view.makers(number)
