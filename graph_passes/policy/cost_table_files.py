"""Cost tables as TOML files: those that come with the package, and those of the user."""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from graph_passes.policy.config import Device, TargetDtype
from graph_passes.policy.cost_table import DOUBT, CostTable, Curve, Measure, OpCost
from graph_passes.policy.toml import tomllib

_REMEDY = "Correct the file, or measure it anew with `tf-amp tune`."


class CostTableError(ValueError):
    """A cost table cannot be used: it is not readable, or not of the form described here."""


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
            device_class=_value(data, "device_class", "a text", _is_text),
            device=_choice(data, "device", get_args(Device)),
            target_dtype=_choice(data, "target_dtype", get_args(TargetDtype)),
            measured_on=_value(data, "measured_on", "a text", _is_text),
            to_low=_curve(data, "casts", "to_low_us"),
            to_float32=_curve(data, "casts", "to_float32_us"),
            rows=tuple((key, _op_cost(data["ops"], key)) for key in sorted(_section(data, "ops"))),
            compiled=_value(data, "compiled", "true or false", _is_flag, False),
            doubt=float(_value(data, "doubt", "a number of at least 1", _is_factor, DOUBT)),
            fused_tails=_value(data, "fused_tails", "true or false", _is_flag, True),
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
        *([] if table.fused_tails else ["fused_tails = false"]),
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


def _value(
    data: Mapping[str, Any], key: str, wanted: str, fits: Callable[[Any], bool], default: Any = None
) -> Any:
    value = data.get(key, default)
    if not fits(value):
        raise ValueError(f"{key!r} must be {wanted}; received {value!r}")
    return value


def _choice(data: Mapping[str, Any], key: str, legal: tuple[str, ...]) -> Any:
    return _value(data, key, f"one of {', '.join(legal)}", lambda value: value in legal)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and not _is_flag(value) and 1 <= value < math.inf


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
