"""The variants of ops that a cost table tells apart: those whose kernels take another time."""

from __future__ import annotations

from graph_passes.ir.graph_view import Shape
from graph_passes.ops.op_types import stands_for
from graph_passes.placement.work_sizes import CONVOLUTIONS, LANES, TO_INPUT, WorkSizes
from graph_passes.policy.cost_table import (
    BROADCAST,
    CHANNELS_FIRST,
    CHANNELS_FIRST_DEEP,
    CHANNELS_FIRST_POINTWISE,
    GROUPED,
    GROUPED_WIDE,
    POINTWISE,
    RAGGED,
    STRIDED,
    TRANSPOSED,
    WIDE,
    WIDE_STRIDED,
    CostTable,
    OpCost,
)

_WIDEST = 3
"""Pixels a side of the filter of one channel for which oneDNN has a fast gradient."""
_NORMS = frozenset(("FusedBatchNormV3", "FusedBatchNormGradV3"))
_MANY_CHANNELS, _SMALL_SIDE = 128, 7
"""Channels first, oneDNN's kernels for bfloat16 gain where they make so many channels, of images
larger than that: 64 to 128 channels take 0.8 times as long as in float32, 128 to 64 1.2 times."""


class OpVariants:
    """Tells variants from attributes and static shapes."""

    def __init__(self, sizes: WorkSizes, table: CostTable) -> None:
        """Takes the sizes of a graph's tensors, and the table that tells variants apart."""
        self._view, self._sizes, self._table = sizes.view, sizes, table

    def cost_of(self, number: int) -> tuple[OpCost | None, str]:
        """What a node costs by the table, None where that does not tell, and its variant."""
        variant = self.of(number)
        return self._table.cost_of(stands_for(self._view.node_type(number).op), variant), variant

    def of(self, number: int) -> str:
        """The variant of its op that a node is, "" for the plain one."""
        op = self._view.node_type(number).op
        if op == "MatMul":
            return TRANSPOSED if self._view.attr(number, "transpose_b").b else ""
        if op in CONVOLUTIONS:
            return self._of_convolution(number, op)
        made = self._sizes.shape(number)
        if made is None:
            return ""
        if op in _NORMS:
            channels = self._channels(number, made)
            # 1.2 million elements take 2.4 ms, 0.5 in float32, with 72 channels, 0.26 with 64.
            return RAGGED if channels is not None and channels % LANES else ""
        read = map(self._sizes.shape, self._sizes.read_by(number))
        return BROADCAST if any(shape not in (None, made) for shape in read) else ""

    def _of_convolution(self, number: int, op: str) -> str:
        is_depthwise = op.startswith("Depthwise")
        weights = self._sizes.filter(number)
        image = self._sizes.shape(
            number if op.endswith(TO_INPUT) else self._sizes.read_by(number)[0]
        )
        if self._table.by_layout and self._is_channels_first(number):
            return CHANNELS_FIRST if is_depthwise else _channels_first(weights, image)
        is_strided = max(self._view.attr(number, "strides").list.i, default=1) > 1
        if weights is None:
            return STRIDED if is_strided else ""
        is_wide = max(weights[:2]) > _WIDEST
        if is_depthwise and is_wide:
            return WIDE_STRIDED if is_strided else WIDE
        few_channels = not is_depthwise and weights[-2] < LANES
        if few_channels and (self._channels(number, image) or 0) > weights[-2]:
            return GROUPED_WIDE if is_wide else GROUPED
        if is_strided:
            return STRIDED
        return POINTWISE if set(weights[:-2]) == {1} else ""

    def _is_channels_first(self, number: int) -> bool:
        return self._view.attr(number, "data_format").s[:2] == b"NC"

    def _channels(self, number: int, image: Shape | None) -> int | None:
        """The channels of an image that a node reads or makes."""
        return image[1 if self._is_channels_first(number) else -1] if image else None


def _channels_first(weights: tuple[int, ...] | None, image: Shape | None) -> str:
    """The variant of a convolution channels first, by its filter and by what it reads."""
    if weights is None or len(weights) != 4:
        return CHANNELS_FIRST
    if max(weights[:2]) == 1:
        return CHANNELS_FIRST_POINTWISE
    is_large = image is not None and min(side or 0 for side in image[2:]) > _SMALL_SIDE
    is_deep = weights[-1] >= _MANY_CHANNELS and max(weights[:2]) <= _WIDEST
    return CHANNELS_FIRST_DEEP if is_deep and is_large else CHANNELS_FIRST
