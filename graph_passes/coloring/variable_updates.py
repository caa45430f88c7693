"""What is assigned to a variable is computed in float32.

TensorFlow's bfloat16 pass retypes the arithmetic that updates variables. A moving average then
takes steps of bfloat16 and stalls: after 1,500 steps a BatchNormalization's moving variance was
wrong by 119 %. Here the arithmetic that leads to an assignment stays float32, back to where a
value of the network enters it: an op of the allow list, or one that reduces or scatters.
"""

from __future__ import annotations

from graph_passes.coloring.state import ALLOW, CLEAR, INFER, Coloring
from graph_passes.ops.node_types import NodeType
from graph_passes.ops.reasons import Reason

_ASSIGN_PREFIXES = ("Assign", "ResourceApply", "ResourceSparseApply", "Apply", "SparseApply")
_SCATTER_PREFIXES = ("ResourceScatter", "Scatter")
_NOT_ASSIGNMENTS = frozenset(("ApproximateEqual", "ScatterNd"))
_REDUCTIONS = frozenset(
    (
        "BiasAddGrad",
        "EuclideanNorm",
        "FusedBatchNormGradV2",
        "FusedBatchNormGradV3",
        "L2Loss",
        "Max",
        "Mean",
        "Min",
        "Prod",
        "SegmentSum",
        "Sum",
        "UnsortedSegmentSum",
    )
)


def is_assignment(op: str) -> bool:
    """Whether an op writes to a variable."""
    return (
        op.startswith(_ASSIGN_PREFIXES) or op.startswith(_SCATTER_PREFIXES)
    ) and op not in _NOT_ASSIGNMENTS


def _is_assignment(node_type: NodeType) -> list[bool]:
    return [node_type.op_type is not None and is_assignment(node_type.op_type.name)] * len(
        node_type.dtypes
    )


def _is_reduction(node_type: NodeType) -> list[bool]:
    return [node_type.op in _REDUCTIONS] * len(node_type.dtypes)


def find_variable_updates(coloring: Coloring) -> list[int]:
    """The infer and clear vertices that compute what is assigned to a variable.

    Returns:
        The vertices, to be kept float32. Empty in a graph that assigns nothing.
    """
    view = coloring.view
    assigned = view.sources[view.per_slot(_is_assignment, bool)[view.targets]]
    arithmetic = (coloring.list_codes == INFER) | (coloring.list_codes == CLEAR)
    enter = arithmetic & ~view.per_slot(_is_reduction, bool)
    roots = assigned[(enter & view.is_float)[assigned]].tolist()
    if not roots:
        return []
    reached = coloring.edges.reach(roots, enter, backward=True)
    return coloring.where(reached & (coloring.list_codes != ALLOW))


def protect_variable_updates(coloring: Coloring) -> None:
    """Keeps the arithmetic that computes assigned values in float32."""
    coloring.block(find_variable_updates(coloring), Reason.VARIABLE_UPDATE)
