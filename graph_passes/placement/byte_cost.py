"""Casts where they move the fewest bytes, for devices of which no measured table exists.

Painting gives colours first come, first served: what touches a converted op goes low, however large
the tensors are that must be cast behind it. Here the same vertices are weighed: a Cast moves what
it reads and writes, and an op that is bound by memory, as all element-wise ones are, moves half as
much in the target dtype. The cheapest colouring is a minimum cut (`min_cut`).

No vertex goes low that painting has not painted, so what is numerically safe is decided there.
Taking a colour away only makes values more accurate. Painting therefore offers all that is safe
(`painting.paint_infer_after_clear`): infer ops, which only a denied op upstream makes unsafe, where
most of what they read is given in the target dtype. What comes before the first converted op is not
offered, since nothing says that raw inputs are within the range of float16.
"""

from __future__ import annotations

import functools

import numpy as np

from graph_passes.coloring.state import ALLOW, Coloring
from graph_passes.ops.node_types import NodeType
from graph_passes.ops.reasons import Reason
from graph_passes.placement.cut_problem import keep_cheap_ones
from graph_passes.placement.work_sizes import WorkSizes
from graph_passes.rewriter.matcher import SHAPERS, SIZES

CAST_START = {"GPU": 1 << 22, "CPU": 1 << 19}
"""What a Cast costs before it moves a byte, in bytes: what the device moves in the few microseconds
that it takes to start a kernel."""

_SAVED = 2  # bytes an element, where four become two
CAST_BYTES = 6
"""What a Cast moves for each element: four bytes on one side, two on the other."""

_CONTROL_FLOW = ("Enter", "Exit", "Merge", "NextIteration", "Switch")
MOVES_NOTHING = frozenset((*SHAPERS, *SIZES, *_CONTROL_FLOW, "IdentityN", "PreventGradient"))
"""Ops that hand on what they read without a copy, or read no more than its shape."""
_READS_WHAT_IT_WRITES = frozenset(
    ("Gather", "GatherNd", "GatherV2", "ResourceGather", "Slice", "StridedSlice")
)


def place_casts(coloring: Coloring) -> None:
    """Takes the colour from vertices that move more bytes for having it, Casts included.

    A compiler that fuses element-wise ops makes Casts part of the kernels around them: they move
    nothing of their own, and no vertex loses its colour.
    """
    if not coloring.config.fused:
        keep_cheap_ones(coloring, _Bytes(coloring), Reason.MOVES_MORE)


class _Bytes:
    """Prices in bytes moved."""

    def __init__(self, coloring: Coloring) -> None:
        self._view = coloring.view
        self._sizes = WorkSizes(coloring.view, coloring.config.unknown_dimension)
        self._start = CAST_START[coloring.config.device]

    def gains(self, numbers: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The bytes that nodes move less for being low; what is on the allow list stays low."""
        is_bound = codes == ALLOW
        per_kind = np.array([_saved(node_type) for node_type in self._view.node_types])
        saved = per_kind[np.asarray(self._view.node_type_of)[numbers]].T * ~is_bound
        gains = np.zeros(len(numbers), np.int64)
        for weights, tensors_of in zip(saved, (self._sizes.read, self._sizes.written), strict=True):
            movers = np.flatnonzero(weights)
            tensors, of = tensors_of(numbers[movers])
            np.add.at(gains, movers[of], weights[movers[of]] * self._sizes.counted(tensors))
        return gains, is_bound

    def casts(self, tensors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The bytes that Casts move, the same in both directions."""
        prices = self._start + CAST_BYTES * self._sizes.counted(tensors)
        return prices, prices


@functools.lru_cache(maxsize=4096)
def _saved(node_type: NodeType) -> tuple[int, int]:
    """The bytes that a node of a type saves for each element that it reads, and writes."""
    if (
        node_type.op in MOVES_NOTHING
        or node_type.op_type is None
        or node_type.op_type.runs_functions
    ):
        return 0, 0
    return (0, 2 * _SAVED) if node_type.op in _READS_WHAT_IT_WRITES else (_SAVED, _SAVED)
