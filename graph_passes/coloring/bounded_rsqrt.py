"""Rsqrt of a sum with a constant: bounded, so what follows it needs no protection.

float16's list denies Rsqrt, because the inverse root of a tiny number is beyond float16 and times
0 becomes NaN (an all-zero vector that is normalized to length 1). Where an epsilon is added first,
as every norm layer does, the result is at most 1 / sqrt(epsilon): it may be rounded like any
other value. The Rsqrt itself stays float32.
"""

from __future__ import annotations

import math

from tensorflow.core.framework import node_def_pb2
from tensorflow.python.framework import tensor_util

from graph_passes.coloring.state import DENY, Coloring
from graph_passes.rewriter.matcher import ADDS

LARGEST_RESULT = 16384.0
"""A quarter of float16's range is left for what the result is multiplied by."""


def release_bounded_rsqrts(coloring: Coloring) -> None:
    """Takes each bounded Rsqrt off the deny list, for this graph."""
    view = coloring.view
    for vertex in coloring.where(coloring.list_codes == DENY):
        if view.op_of(vertex) == "Rsqrt" and _is_bounded(coloring, view.node_of(vertex)):
            coloring.list_codes[vertex] = 0


def _is_bounded(coloring: Coloring, rsqrt: node_def_pb2.NodeDef) -> bool:
    view = coloring.view
    total = view.nodes[view.index[view.split(rsqrt.input[0])[0]]]
    if total.op not in ADDS:
        return False
    for tensor in total.input[:2]:
        addend = view.nodes[view.index[view.split(tensor)[0]]]
        if addend.op == "Const":
            value = tensor_util.MakeNdarray(addend.attr["value"].tensor)
            return value.size > 0 and float(value.min()) >= math.pow(LARGEST_RESULT, -2)
    return False
