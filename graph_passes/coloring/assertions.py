"""Assertions: what one compares is computed in float32, from the last product on.

    p = Softmax(x @ w);  Assert(All(Abs(Sum(p) - 1) <= 1e-6));  Assert(All(p < 1))

A program that asserts what holds in float32 would end where rounding breaks it: in bfloat16 the
probabilities of ten classes add up to 1.002, and a sigmoid of 6 is 1. A product that is compared
itself is rounded.
"""

from __future__ import annotations

from itertools import islice

from tensorflow.core.framework import types_pb2

from graph_passes.coloring.comparisons import EXACT
from graph_passes.coloring.state import ALLOW, INFER, Coloring
from graph_passes.coloring.ways import MOST_NEAR
from graph_passes.ir.adjacency import walk
from graph_passes.ops.node_types import NodeType
from graph_passes.ops.reasons import Reason


def keep_asserted(coloring: Coloring) -> None:
    """Keeps what assertions compare in float32."""
    view, codes = coloring.view, coloring.list_codes
    compared = {*view.of_op(*EXACT)}

    def made_of(vertex: int) -> list[int]:
        return [
            maker for maker in coloring.edges.producers(vertex) if codes[maker] not in (0, ALLOW)
        ]

    for number in view.is_of_node_type(_asserts).nonzero()[0].tolist():
        # On its way a condition is reduced: all must hold.
        conditions = walk(view.makers(number)[:1], view.makers, lambda n: n not in compared)
        for found in compared.intersection(islice(conditions, MOST_NEAR)):
            way = list(islice(walk([view.base[found]], made_of), MOST_NEAR))
            if len(way) < MOST_NEAR:  # else it is a residual stream
                coloring.block([v for v in way if codes[v] == INFER], Reason.ASSERTION)


def _asserts(node_type: NodeType) -> bool:
    """Whether it is an assertion, or the branch around one: it has an effect and gives a bool."""
    if node_type.op_type is None or node_type.op_type.name != "If":
        return node_type.op == "Assert"
    return {node_type.dtypes[slot] for slot in node_type.layout.out_slots} == {types_pb2.DT_BOOL}
