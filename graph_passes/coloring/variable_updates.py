"""What is assigned to a variable is computed in float32.

TensorFlow's bfloat16 pass retypes the arithmetic that updates variables. A moving average then
takes steps of bfloat16 and stalls: after 1,500 steps a BatchNormalization's moving variance was
wrong by 119 %. Here the arithmetic that leads to an assignment stays float32, back to where a
value of the network enters it: an op of the allow list, or one that reduces or scatters. A product
of a tensor with itself is no such value: what gathers covariances is made to be decomposed.
The same holds for what replicas add up, which is what they assign: gradients that are divided by a
loss scale before. What joins them into one tensor may go low, where nothing is computed before.
"""

from __future__ import annotations

from graph_passes.coloring.state import CLEAR, INFER, Coloring
from graph_passes.coloring.ways import ADDITIONS, MATRIX_PRODUCTS, SCALINGS, Ways, moves
from graph_passes.ops.reasons import Reason
from graph_passes.policy.op_classes import ops_of

_PREFIXES = (
    *("Assign", "ResourceApply", "ResourceSparseApply", "Apply", "SparseApply"),
    *("ResourceScatter", "Scatter"),
)
_NOT_ASSIGNMENTS = frozenset(("ApproximateEqual", "ScatterNd"))
_REDUCTIONS = ops_of("reductions")
_REPLICA_SUMS = ops_of("replica_sums")


def is_assignment(op: str) -> bool:
    """Whether an op writes to a variable."""
    return op.startswith(_PREFIXES) and op not in _NOT_ASSIGNMENTS


def protect_variable_updates(coloring: Coloring) -> None:
    """Keeps infer and clear vertices that compute what is assigned to a variable in float32."""
    view = coloring.view
    assigned = view.sources[
        view.is_vertex_of(lambda node_type: is_assignment(node_type.op))[view.targets]
    ]
    arithmetic = (coloring.list_codes == INFER) | (coloring.list_codes == CLEAR)
    enter = arithmetic & ~coloring.has_op(_REDUCTIONS)
    roots = assigned[enter[assigned]].tolist()
    reached = coloring.edges.reach(roots, enter, backward=True)
    coloring.block(coloring.where(reached), Reason.VARIABLE_UPDATE)
    summed = view.sources[coloring.has_op(_REPLICA_SUMS)[view.targets]]
    joined = coloring.edges.reach(summed[enter[summed]].tolist(), enter, backward=True)
    computed = coloring.where(joined & (coloring.list_codes == INFER))
    coloring.block(computed, Reason.VARIABLE_UPDATE)
    linear = (coloring.has_op(ADDITIONS | SCALINGS) | moves(coloring)) & enter
    steps = coloring.edges.reach([v for v in roots if linear[v]], linear, backward=True)
    entering = {v for u in coloring.where(steps) for v in coloring.edges.producers(u)}
    meets, ways = entering.union(assigned.tolist()), Ways(coloring)
    products = filter(coloring.has_op(MATRIX_PRODUCTS).__getitem__, meets)
    coloring.block(filter(ways.multiplies_itself, products), Reason.VARIABLE_UPDATE)
