"""Steps of linear algebra: products, sums, scalings, and what hands values on."""

from __future__ import annotations

import numpy as np

from graph_passes.coloring.state import CLEAR, Coloring
from graph_passes.ir.graph_view import GraphView

MATRIX_PRODUCTS = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
ADDITIONS = frozenset(("Add", "AddN", "AddV2", "Sub"))
SCALINGS = frozenset(("Mul", "RealDiv"))

_ACTIVATIONS = ("Abs", "Clip", "Max", "Min", "Relu")
"""What the names of ops begin with that the lists call clear too."""


def moves(coloring: Coloring) -> np.ndarray:
    """The vertices that hand values on and are no activations; bool [vertices]."""
    activates = coloring.view.is_vertex_of(lambda node_type: node_type.op.startswith(_ACTIVATIONS))
    return (coloring.list_codes == CLEAR) & ~activates


def is_by_a_tensor(view: GraphView, vertex: int) -> bool:
    """Whether a vertex multiplies or divides by more than a single number."""
    node = view.node_of(vertex)
    scales = view.node_type(view.vertex_nodes[vertex]).op in SCALINGS
    return scales and () not in [view.shape(name) for name in node.input if name[0] != "^"]
