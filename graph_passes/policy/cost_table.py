"""What kernels and Casts cost on one class of device: measured tables, read from TOML.

A table holds, for op types and a few sizes each, the time in float32 and in the target dtype.
Between measured sizes the logarithm of the time is a straight line over the logarithm of the
size. Below the smallest size the time is that of the smallest, since starting a kernel has a
price of its own; above the largest it grows with the size.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import importlib.resources
import itertools
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from graph_passes.policy.config import Device, TargetDtype

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Measure = Literal["elements", "flops"]
"""What the size of an op is: elements of its largest tensor, or floating-point operations."""

BROADCAST = "broadcast"
"""Variant of an op that reads a tensor smaller than the one it makes."""
STRIDED = "strided"
"""Variant of a convolution that moves by more than one pixel."""

POINTWISE = "pointwise"
"""Variant of a convolution with a filter of one pixel, which does little work for its bytes."""
TRANSPOSED = "transposed"
"""Variant of a matrix product that reads its second matrix by columns, as gradients do."""

DOUBT = 1.5
"""How many times slower the target dtype must be before that counts, where a table says nothing."""

_REMEDY = "Correct the file, or measure it anew with `tf-amp tune`."


class CostTableError(ValueError):
    """A cost table cannot be used: it is not readable, or not of the form described here."""


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
        return max(0.0, full - low) if low <= doubt * full else doubt * full - low

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
        doubt: how many times slower the target dtype must be in an op before that counts. An op
            measured alone does not show what smaller tensors save the ops beside it; what networks
            gain by leaving such ops in float32 does, and it differs between classes.
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

    def cost_of(self, op: str, variant: str = "") -> OpCost | None:
        """The costs of an op type, of the variant where that was measured; None for neither."""
        variants = self.variants_of(op)
        return variants.get(variant) or variants.get("")


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


def table_name(device_class: str, target_dtype: str) -> str:
    """The file name of the table for a class of device and a target dtype."""
    return f"{device_class}-{target_dtype}.toml"


def shipped_table(device_class: str, target_dtype: str) -> CostTable | None:
    """Reads the table that comes with the package for a class of device.

    Args:
        device_class: the name of the class, such as "cpu-avx512_bf16".
        target_dtype: "float16" or "bfloat16".

    Returns:
        The table; None where none was measured for that class.

    Raises:
        CostTableError: the file is not a cost table.
    """
    name = table_name(device_class, target_dtype)
    file = importlib.resources.files("graph_passes").joinpath("cost_tables", name)
    if not file.is_file():
        return None
    return parse_table(file.read_text(encoding="utf-8"), name)


def load_table(path: Path) -> CostTable:
    """Reads a table from a file.

    Raises:
        CostTableError: the file cannot be read or is not a cost table; the message names it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CostTableError(f"The cost table {str(path)!r} cannot be read: {error}.") from error
    return parse_table(text, str(path))


def parse_table(text: str, name: str) -> CostTable:
    """Reads a table from TOML; `format_table` writes it.

    Args:
        text: the TOML.
        name: what to call it in messages.

    Raises:
        CostTableError: the text is no TOML, or a part is missing or not legal.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CostTableError(f"The cost table {name!r} is no TOML: {error}. {_REMEDY}") from error
    try:
        return CostTable(
            device_class=_text(data, "device_class"),
            device=_choice(data, "device", get_args(Device)),
            target_dtype=_choice(data, "target_dtype", get_args(TargetDtype)),
            measured_on=_text(data, "measured_on"),
            to_low=_curve(data, "casts", "to_low_us"),
            to_float32=_curve(data, "casts", "to_float32_us"),
            rows=tuple((key, _op_cost(data["ops"], key)) for key in sorted(_section(data, "ops"))),
            compiled=_flag(data, "compiled"),
            doubt=_factor(data, "doubt", DOUBT),
        )
    except ValueError as error:
        raise CostTableError(f"The cost table {name!r} cannot be used: {error}. {_REMEDY}") from (
            error
        )


def format_table(table: CostTable) -> str:
    """Writes a table as TOML, times in microseconds with three digits."""
    lines = [
        f'device_class = "{table.device_class}"',
        f'device = "{table.device}"',
        f'target_dtype = "{table.target_dtype}"',
        f'measured_on = "{table.measured_on}"',
        *(["compiled = true"] if table.compiled else []),
        *([f"doubt = {table.doubt}"] if table.doubt != DOUBT else []),
        "",
        "[casts]",
        f"sizes = {list(table.to_low.sizes)}",
        f"to_low_us = {_microseconds(table.to_low)}",
        f"to_float32_us = {_microseconds(table.to_float32)}",
    ]
    for key, cost in table.rows:
        lines += [
            "",
            f'[ops."{key}"]' if "/" in key else f"[ops.{key}]",
            f'measure = "{cost.measure}"',
            f"sizes = {list(cost.float32.sizes)}",
            f"float32_us = {_microseconds(cost.float32)}",
            f"low_us = {_microseconds(cost.low)}",
        ]
    return "\n".join(lines) + "\n"


def _microseconds(curve: Curve) -> str:
    """Times as a TOML list: three digits, never in exponents, which few can read."""
    rounded = (float(f"{time * 1e6:.3g}") for time in curve.seconds)
    return f"[{', '.join(map(repr, rounded))}]"


def _section(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = data.get(key)
    if not isinstance(section, dict):
        raise ValueError(f"it has no section {key!r}")
    return section


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key!r} must be a text; received {value!r}")
    return value


def _choice(data: Mapping[str, Any], key: str, legal: tuple[str, ...]) -> Any:
    value = data.get(key)
    if value not in legal:
        raise ValueError(f"{key!r} must be one of {', '.join(legal)}; received {value!r}")
    return value


def _flag(data: Mapping[str, Any], key: str) -> bool:
    value = data.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{key!r} must be true or false; received {value!r}")
    return value


def _factor(data: Mapping[str, Any], key: str, default: float) -> float:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < math.inf:
        raise ValueError(f"{key!r} must be a number of at least 1; received {value!r}")
    return float(value)


def _curve(data: Mapping[str, Any], key: str, column: str) -> Curve:
    section = _section(data, key)
    sizes, times = section.get("sizes"), section.get(column)
    if not (
        isinstance(sizes, list)
        and isinstance(times, list)
        and all(isinstance(size, int) for size in sizes)
        and all(isinstance(time, int | float) for time in times)
    ):
        raise ValueError(
            f"the section {key!r} must have a list of whole numbers 'sizes' and a list of numbers "
            f"{column!r}; received {sizes!r} and {times!r}"
        )
    try:
        return Curve(tuple(sizes), tuple(time * 1e-6 for time in times))
    except ValueError as error:
        raise ValueError(f"in the section {key!r}, {column!r}: {error}") from error


def _op_cost(ops: Mapping[str, Any], key: str) -> OpCost:
    return OpCost(
        measure=_choice(_section(ops, key), "measure", get_args(Measure)),
        float32=_curve(ops, key, "float32_us"),
        low=_curve(ops, key, "low_us"),
    )
