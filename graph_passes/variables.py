"""What is assigned to a variable is computed in float32.

TensorFlow's bfloat16 pass retypes the arithmetic that updates variables. A moving average then
takes steps of bfloat16 and stalls: after 1,500 steps a BatchNormalization's moving variance was
wrong by 119 %. Here the arithmetic that leads to an assignment stays float32, back to where a
value of the network enters it: an op of the allow list, or one that reduces or scatters.
"""

from __future__ import annotations

import numpy as np

from graph_passes.canvas import ALLOW, CLEAR, INFER, Canvas
from graph_passes.kinds import Kind
from graph_passes.reasons import Reason

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


def _is_assignment(kind: Kind) -> list[bool]:
    return [kind.op_type is not None and is_assignment(kind.op_type.name)] * len(kind.dtypes)


def _is_reduction(kind: Kind) -> list[bool]:
    return [kind.op in _REDUCTIONS] * len(kind.dtypes)


def find_variable_updates(canvas: Canvas) -> list[int]:
    """The infer and clear vertices that compute what is assigned to a variable.

    Returns:
        The vertices, to be kept float32. Empty in a graph that assigns nothing.
    """
    view = canvas.view
    assigned = view.sources[view.per_slot(_is_assignment, bool)[view.targets]]
    arithmetic = (canvas.listed == INFER) | (canvas.listed == CLEAR)
    enter = arithmetic & ~view.per_slot(_is_reduction, bool)
    roots = assigned[(enter & view.is_float)[assigned]].tolist()
    if not roots:
        return []
    reached = canvas.edges.reach(roots, enter.tobytes(), backward=True)
    return canvas.where(np.frombuffer(reached, bool) & (canvas.listed != ALLOW))


def protect_variable_updates(canvas: Canvas) -> None:
    """Keeps the arithmetic that computes assigned values in float32."""
    canvas.block(find_variable_updates(canvas), Reason.VARIABLE_UPDATE)
