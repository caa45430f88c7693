"""What kernels and Casts cost on one class of device: measured tables.

A table holds, for op types and a few sizes each, the time in float32 and in the target dtype.
Between measured sizes the logarithm of the time is a straight line over the logarithm of the
size. Below the smallest size the time is that of the smallest, since starting a kernel has a
price of its own, and what the target dtype saves shrinks with the size; above the largest the time
grows with the size.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Literal

from graph_passes.policy.config import Device, TargetDtype

Measure = Literal["elements", "flops"]
"""What the size of an op is: elements of its largest tensor, or floating-point operations."""

BROADCAST = "broadcast"
"""Variant of an op that reads a tensor smaller than the one it makes."""
STRIDED = "strided"
"""Variant of a convolution that moves by more than one pixel."""

POINTWISE = "pointwise"
"""Variant of a convolution with a filter of one pixel, which does little work for its bytes."""
WIDE, WIDE_STRIDED = "wide", "wide-strided"
"""Variants of a depthwise convolution with a filter of more than three pixels a side."""
GROUPED, GROUPED_WIDE = "grouped", "grouped-wide"
"""Variants of a convolution of groups with few channels each, the second with such a filter."""
CHANNELS_FIRST = "channels-first"
"""Variant of a convolution of images whose channels come first, NCHW or NCDHW."""
CHANNELS_FIRST_DEEP = "channels-first-deep"
"""Variant of such a convolution that makes many channels, by a filter of up to three pixels."""
CHANNELS_FIRST_POINTWISE = "channels-first-pointwise"
"""Variant of such a convolution with a filter of one pixel."""
RAGGED = "ragged"
"""Variant of a batch normalization of channels that do not fill the registers of a CPU."""
TRANSPOSED = "transposed"
"""Variant of a matrix product that reads its second matrix by columns, as gradients do."""

_NEAREST = {
    WIDE_STRIDED: STRIDED,
    GROUPED_WIDE: GROUPED,
    CHANNELS_FIRST_DEEP: CHANNELS_FIRST,
    CHANNELS_FIRST_POINTWISE: CHANNELS_FIRST,
}
_NOT_MEASURED = 2.0
"""How many times slower the target dtype counts as in what was most often slower elsewhere."""

DOUBT = 1.5
"""How many times slower the target dtype must be before that counts, where a table says nothing."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """Times measured at a few sizes.

    Attributes:
        sizes: ascending, each at least 1.
        seconds: the time at each size, each greater than 0.

    Raises:
        ValueError: there is no size, sizes are not ascending, or the lengths differ.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in itertools.pairwise((0, *self.sizes)))
        if not self.sizes or not ascending:
            raise ValueError(
                f"sizes must be one or more ascending numbers of at least 1; received {self.sizes}"
            )
        if len(self.sizes) != len(self.seconds) or not all(
            math.isfinite(time) and time > 0 for time in self.seconds
        ):
            raise ValueError(
                f"there must be one time greater than 0 for each of the {len(self.sizes)} sizes; "
                f"received {self.seconds}"
            )

    def at(self, size: int) -> float:
        """The time at any size, in seconds."""
        sizes, seconds = self.sizes, self.seconds
        above = bisect.bisect_left(sizes, size)
        if above == 0:
            return seconds[0]
        if above == len(sizes):
            return seconds[-1] * size / sizes[-1]
        low, high = sizes[above - 1], sizes[above]
        share = math.log(size / low) / math.log(high / low)
        return math.exp(
            (1 - share) * math.log(seconds[above - 1]) + share * math.log(seconds[above])
        )


@dataclasses.dataclass(frozen=True)
class OpCost:
    """What one op type (or one variant of it) costs.

    Attributes:
        measure: what the sizes count.
        float32: times in float32.
        low: times in the target dtype, at the same sizes.
    """

    measure: Measure
    float32: Curve
    low: Curve

    def gain(self, size: int, doubt: float = 1.0) -> float:
        """How much time the target dtype saves at a size, in seconds; negative for a loss.

        Args:
            size: of the op's work, in what `measure` counts.
            doubt: a loss counts only as far as the target dtype takes longer than this many times
                the time in float32.
        """
        full, low = self.float32.at(size), self.low.at(size)
        if low > doubt * full:
            return doubt * full - low
        return max(0.0, full - low) * min(1.0, size / self.float32.sizes[0])

    def gain_beyond(self, size: int, margin: float) -> float:
        """The gain at a size when the target dtype must be ahead by the margin, in seconds.

        Args:
            size: of the op's work, in what `measure` counts.
            margin: how many times faster the target dtype must be, at the size and at half of the
                measured sizes or more, for a gain of more than 0.
        """
        gain = self.float32.at(size) - margin * self.low.at(size)
        times = zip(self.float32.seconds, self.low.seconds, strict=True)
        ahead = sum(full > margin * low for full, low in times)
        return gain if 2 * ahead >= len(self.low.sizes) else min(gain, 0.0)

    def clear_gain(self, size: int, margin: float) -> float:
        """The gain at a size if one dtype is ahead by the margin at every measured size, else 0.

        Args:
            size: what to take for a size that is not known.
            margin: how many times faster the dtype must be.
        """
        ratios = [f / t for f, t in zip(self.float32.seconds, self.low.seconds, strict=True)]
        clear = min(ratios) >= margin or max(ratios) <= 1 / margin
        return self.gain(size, margin) if clear else 0.0


@dataclasses.dataclass(frozen=True)
class CostTable:
    """The measured costs of one class of device for one target dtype.

    Attributes:
        device_class: the name of the class, such as "cpu-avx512_bf16".
        device: "GPU" or "CPU".
        target_dtype: the low-precision dtype.
        measured_on: on what the table was measured, for people.
        to_low: the time of a Cast from float32, by elements.
        to_float32: the time of a Cast to float32, by elements.
        rows: (op type or "op type/variant", its costs), sorted.
        compiled: whether it was measured in functions that XLA compiles.
        doubt: how many times slower the target dtype must be in an op on tensors too large for a
            cache before that counts. An op measured alone does not show what smaller tensors save
            the ops beside it; what networks gain by leaving such ops in float32 does, and it
            differs between classes.
        fused_tails: whether a bias and a simple activation cost less in the kernel of a matrix
            product than behind it, in the target dtype. With AMX oneDNN's kernel then takes up to
            twice as long: 1280 x 256 x 4000 14.5 ms, the product alone 5.7, a BiasAdd besides 7.5.
    """

    device_class: str
    device: Device
    target_dtype: TargetDtype
    measured_on: str
    to_low: Curve
    to_float32: Curve
    # Equal tables have equal names in practice, and hashing thousands of numbers takes time.
    rows: tuple[tuple[str, OpCost], ...] = dataclasses.field(hash=False)
    compiled: bool = False
    doubt: float = DOUBT
    fused_tails: bool = True

    @functools.cached_property
    def _by_op(self) -> Mapping[str, Mapping[str, OpCost]]:
        found: dict[str, dict[str, OpCost]] = {}
        for key, cost in self.rows:
            op, _, variant = key.partition("/")
            found.setdefault(op, {})[variant] = cost
        return found

    def variants_of(self, op: str) -> Mapping[str, OpCost]:
        """The variants of an op type that were measured and their costs; "" is the op itself."""
        return self._by_op.get(op, {})

    @property
    def by_layout(self) -> bool:
        """Whether convolutions cost other times channels first: oneDNN's do, on a CPU."""
        return self.device == "CPU" and not self.compiled

    def cost_of(self, op: str, variant: str = "") -> OpCost | None:
        """The costs of an op type, of the variant where that was measured; None for neither.

        Convolutions channels first that were not measured count as slower in the target dtype, and
        stay float32: most of oneDNN's were 1.2 to 7 times as slow where they were, and what they
        take channels last says nothing of it.
        """
        variants = self.variants_of(op)
        cost = variants.get(variant) or variants.get(_NEAREST.get(variant, variant))
        plain = variants.get("")
        if cost is not None or plain is None or not is_channels_first(variant):
            return cost or plain
        slower = (_NOT_MEASURED * seconds for seconds in plain.float32.seconds)
        return dataclasses.replace(plain, low=Curve(plain.float32.sizes, tuple(slower)))


def is_channels_first(variant: str) -> bool:
    """Whether a variant is one of those of convolutions channels first."""
    return variant.startswith(CHANNELS_FIRST)


def compiled_class(device_class: str, release: str) -> str:
    """The class of what XLA makes of a function for a class of device.

    Args:
        device_class: the name of the class, such as "cpu-avx512_bf16" or "gpu-9.0".
        release: the release of TensorFlow, such as "2.21": XLA is a part of it, and what it makes
            of the same op on a CPU changes from one to the next. On a GPU it calls NVIDIA's
            libraries for products, and the release does not count.

    Returns:
        Such as "cpu-avx512_bf16-xla2.21", or "gpu-sm90-xla" as compilers name the capability.
    """
    kind, _, capability = device_class.partition("-")
    if kind == "gpu" and capability.replace(".", "").isdigit():
        return f"gpu-sm{capability.replace('.', '')}-xla"
    return f"{device_class}-xla{release}"
