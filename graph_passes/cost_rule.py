"""Float32 for what the target dtype makes slower on this device, Casts included.

After painting, the kernel times and Cast times of a measured table decide which of the painted
vertices are worth it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from graph_passes.canvas import ALLOW, Canvas
from graph_passes.costs import CostTable
from graph_passes.cut_problem import keep_cheap_ones
from graph_passes.reasons import Reason
from graph_passes.work_sizes import UNKNOWN_ELEMENTS, WorkSizes

UNKNOWN_FLOPS = 1 << 26
"""What counts for the work of a matrix product or convolution whose shapes are not known."""
DOUBT = 1.5
"""How many times slower the target dtype must be before that counts. An op measured alone does not
show what smaller tensors save the ops beside it: at up to 1.5 times, networks do not gain from
taking it out."""
COMPILED_MARGIN = 1.1
"""How many times faster the target dtype must be in what XLA compiles before that counts. What it
costs the fused element-wise ops around a product is in no table, and it is no saving on a CPU."""

_PER_SECOND = 1e9


def keep_fast_ones(canvas: Canvas, clusters: Iterable[Sequence[int]] = ()) -> None:
    """Takes the colour from vertices that are faster in float32.

    Args:
        canvas: the painting.
        clusters: groups of vertices that share a tensor list, each of one colour.
    """
    table = canvas.config.cost_table
    if table is not None:
        keep_cheap_ones(canvas, _Times(canvas, table), clusters, Reason.SLOWER_HERE)


class _Times:
    """Prices in nanoseconds, from a measured table."""

    def __init__(self, canvas: Canvas, table: CostTable) -> None:
        self._view = canvas.view
        self._fused = canvas.config.fused
        self._table = table
        self._sizes = WorkSizes(canvas.view)

    def gain(self, number: int, listed: int) -> int | None:
        """The time that a node saves by being low; None if it is not to be judged."""
        cost = self._table.cost_of(self._view.kind(number).op, self._sizes.variant(number))
        if cost is None:
            return None if listed == ALLOW else 0
        if cost.measure == "elements" and self._fused:
            return 0
        size = self._sizes.size(number, cost)
        assumed = UNKNOWN_FLOPS if cost.measure == "flops" else UNKNOWN_ELEMENTS
        if self._table.compiled:
            beyond = cost.gain_beyond(assumed if size is None else size, COMPILED_MARGIN)
            return round(beyond * _PER_SECOND)
        if size is not None:
            return round(cost.gain(size, DOUBT) * _PER_SECOND)
        gain = round(cost.clear_gain(assumed, DOUBT) * _PER_SECOND)
        return None if not gain and listed == ALLOW else gain

    def casts(self, tensor: str) -> tuple[int, int]:
        """The times of a Cast of a tensor to the target dtype and to float32."""
        elements = self._sizes.elements(tensor)
        return self._casts_of(UNKNOWN_ELEMENTS if elements is None else elements)

    @functools.lru_cache(maxsize=1024)  # noqa: B019  lives as long as one rewrite
    def _casts_of(self, elements: int) -> tuple[int, int]:
        curves = (self._table.to_low, self._table.to_float32)
        to_low, to_float32 = (round(curve.at(elements) * _PER_SECOND) for curve in curves)
        return to_low, to_float32
