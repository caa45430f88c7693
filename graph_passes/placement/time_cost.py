"""Float32 for what the target dtype makes slower on this device, Casts included.

After painting, the kernel times and Cast times of a measured table decide which of the painted
vertices are worth it.
"""

from __future__ import annotations

import numpy as np

from graph_passes.coloring.state import ALLOW, Coloring
from graph_passes.ops.reasons import Reason
from graph_passes.placement.cut_problem import keep_cheap_ones
from graph_passes.placement.op_variants import OpVariants
from graph_passes.placement.work_sizes import UNKNOWN_ELEMENTS, WorkSizes
from graph_passes.policy.cost_table import CostTable, OpCost, is_channels_first

UNKNOWN_FLOPS = 1 << 26
"""What counts for the work of a matrix product or convolution whose shapes are not known."""
_CACHED_ELEMENTS = 1 << 18
"""Tensors of fewer, 1 MB in float32, stay in a core's cache. What smaller tensors save the ops
beside an op they save on the way to memory: in a cache, there is no doubt about a loss."""
COMPILED_MARGIN = 1.1
"""How many times faster the target dtype must be in what XLA compiles before that counts. What it
costs the fused element-wise ops around a product is in no table, and it is no saving on a CPU."""

_PER_SECOND = 1e9


def keep_fast_ones(coloring: Coloring) -> None:
    """Takes the colour from vertices that are faster in float32."""
    table = coloring.config.cost_table
    if table is not None:
        reason = Reason.SLOWER_UNDER_XLA if table.compiled else Reason.SLOWER_HERE
        keep_cheap_ones(coloring, _Times(coloring, table), reason)


class _Times:
    """Prices in nanoseconds, from a measured table."""

    def __init__(self, coloring: Coloring, table: CostTable) -> None:
        self._view = coloring.view
        self._fused = coloring.config.fused
        self._table = table
        self._sizes = WorkSizes(coloring.view, coloring.config.unknown_dimension)
        self._variants = OpVariants(self._sizes, table)
        self._saved: dict[tuple[str, str, int | None], int | None] = {}

    def gains(self, numbers: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The times that nodes save by being low; what is allowed and not judged stays low."""
        gains = [self._gain(number) for number in numbers.tolist()]
        is_judged = np.array([gain is not None for gain in gains], bool)
        return np.array([gain or 0 for gain in gains], np.int64), ~is_judged & (codes == ALLOW)

    def _gain(self, number: int) -> int | None:
        """The time that a node saves by being low; None if that cannot be told."""
        cost, variant = self._variants.cost_of(number)
        if cost is None:
            return None
        if cost.measure == "elements" and self._fused:
            return 0
        key = self._view.node_type(number).op, variant, self._sizes.size(number, cost)
        if key not in self._saved:
            # Smaller tensors save the ops beside it little of what a convolution loses that has
            # to change the layout of what it reads and makes.
            doubt = 1.0 if is_channels_first(variant) else self._table.doubt
            self._saved[key] = self._save(cost, key[-1], doubt)
        return self._saved[key]

    def _save(self, cost: OpCost, size: int | None, doubt: float) -> int | None:
        """The time that work of a size, None for one not known, saves by being low."""
        assumed = UNKNOWN_FLOPS if cost.measure == "flops" else UNKNOWN_ELEMENTS
        if self._table.compiled:
            gain = cost.gain_beyond(assumed if size is None else size, COMPILED_MARGIN)
        elif size is not None:
            is_cached = cost.measure == "elements" and size < _CACHED_ELEMENTS
            gain = cost.gain(size, 1.0 if is_cached else doubt)
        else:
            gain = cost.clear_gain(assumed, doubt)
            if not gain:
                return None
        return round(gain * _PER_SECOND)

    def casts(self, tensors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The times of Casts to the target dtype, and of those to float32."""
        sizes, places = np.unique(self._sizes.counted(tensors), return_inverse=True)
        to_low, to_float32 = (
            np.array([round(curve.at(size) * _PER_SECOND) for size in sizes.tolist()], np.int64)
            for curve in (self._table.to_low, self._table.to_float32)
        )
        return to_low[places], to_float32[places]
