"""Makes cost tables for what XLA compiles on a GPU from results of `micro.py`.

    cd benchmarks
    python -m gpu.cost_table results/gpu_micro.json --output results/

Writes one table for float16 and one for bfloat16, named by the GPU's compute capability, in the
form of those in graph_passes/cost_tables, and prints what starting a Cast costs: in time, and in
the bytes that the device moves meanwhile, which is what `CAST_START` of the byte rule counts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graph_passes.placement.byte_cost import CAST_BYTES, CAST_START
from graph_passes.policy.config import TargetDtype
from graph_passes.policy.cost_table import CostTable, Curve, OpCost, compiled_class
from graph_passes.policy.cost_table_files import format_table, table_name

DTYPES: tuple[TargetDtype, ...] = ("float16", "bfloat16")
_ALIASES = {"BatchMatMulV2": ("BatchMatMul",)}
"""Op type -> others that XLA makes the same of."""


class CastPrice(NamedTuple):
    """What a Cast costs: ``start_s + bytes / bytes_per_s``."""

    start_s: float
    bytes_per_s: float

    @property
    def start_bytes(self) -> float:
        """What the device moves in the time that a Cast takes to start."""
        return self.start_s * self.bytes_per_s


def make_table(results: Sequence[Mapping[str, Any]], dtype: TargetDtype) -> CostTable:
    """Makes the table of a dtype.

    Args:
        results: of `micro.py`, all of one device; what a later one measured again counts.
        dtype: the target dtype.

    Raises:
        ValueError: the results are not of one GPU, have no casts, or a time is not positive.
    """
    facts = [result["facts"] for result in results]
    devices = {(fact["device"], fact.get("compute_capability")) for fact in facts}
    capability = facts[0].get("compute_capability")
    if len(devices) != 1 or not capability:
        raise ValueError(
            "the results must be of one GPU with a known compute capability; received "
            f"{sorted(map(str, devices))}. Measure them on one, with --platform cuda"
        )
    driver = (facts[0].get("nvidia_smi") or {}).get("driver_version", "unknown")
    casts = _curve(_cast_times(results, dtype), "casts")
    return CostTable(
        device_class=compiled_class(f"gpu-{capability}", ""),
        device="GPU",
        target_dtype=dtype,
        measured_on=f"{facts[0]['device']}, driver {driver}, jaxlib {facts[0]['jaxlib']}, float32 "
        f"products in {facts[0]['float32_products'].partition(' ')[0]}",
        to_low=casts,
        to_float32=casts,  # one chain has both, of as many bytes
        rows=tuple(sorted(_rows(results, dtype).items())),
        compiled=True,
    )


def _rows(results: Sequence[Mapping[str, Any]], dtype: str) -> dict[str, OpCost]:
    """Products and convolutions: XLA fuses everything else, so that it has no costs of its own."""
    times: dict[str, dict[int, tuple[float, float]]] = {}
    for result in results:
        for case in result["cases"]:
            ways = case["ways"]
            pair = [ways.get(name, {}).get("seconds") for name in ("float32", dtype)]
            if not case["key"] or None in pair:
                continue
            for key in (case["key"], *_ALIASES.get(case["key"], ())):
                times.setdefault(key, {})[case["size"]] = (pair[0], pair[1])
    return {
        key: OpCost(
            measure="flops",
            float32=_curve({size: pair[0] for size, pair in by_size.items()}, key),
            low=_curve({size: pair[1] for size, pair in by_size.items()}, key),
        )
        for key, by_size in times.items()
    }


def _cast_times(results: Sequence[Mapping[str, Any]], dtype: str) -> dict[int, float]:
    found = {
        row["size"]: row["cast_s"]
        for result in results
        for row in result["casts"]
        if row["dtype"] == dtype
    }
    if not found:
        raise ValueError(f"no cast to {dtype} was measured; run `gpu.micro --groups casts`")
    return found


def _curve(times: Mapping[int, float], what: str) -> Curve:
    sizes = sorted(times)
    try:
        return Curve(tuple(sizes), tuple(times[size] for size in sizes))
    except ValueError as error:
        raise ValueError(f"of {what}, {error}. Measure that group anew, with more rounds") from (
            error
        )


def cast_price(casts: Curve) -> CastPrice:
    """Fits start and speed to the times of Casts, least squares of the relative errors.

    Args:
        casts: seconds of a Cast by elements, of at least two sizes.

    Raises:
        ValueError: the times do not grow with the size.
    """
    seconds = np.array(casts.seconds)
    moved = CAST_BYTES * np.array(casts.sizes, float)
    columns = np.stack([np.ones_like(moved), moved], 1) / seconds[:, None]
    (start, per_byte), *_ = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)
    if len(casts.sizes) < 2 or per_byte <= 0 or start <= 0:
        raise ValueError(
            f"no price can be fitted to {dict(zip(casts.sizes, casts.seconds, strict=True))}: "
            "times must grow with the size. Measure casts anew, with more rounds"
        )
    return CastPrice(float(start), float(1 / per_byte))


def describe(table: CostTable) -> str:
    """What people want to know of a table, in a few lines."""
    price = cast_price(table.to_low)
    power = round(math.log2(price.start_bytes))
    now = CAST_START["GPU"]
    speed = f"{price.bytes_per_s / 1e9:.0f} GB/s"
    start = f"{price.start_s * 1e6:.2f} us"
    lines = [
        f"{table.target_dtype}: a Cast takes {start} to start and moves {speed}.",
        f'CAST_START["GPU"] would be {price.start_bytes:.0f}, about 1 << {power}; it is {now} now.',
    ]
    for key, cost in table.rows:
        ratios = [f / t for f, t in zip(cost.float32.seconds, cost.low.seconds, strict=True)]
        lines.append(
            f"  {key}: {' '.join(f'{r:.2f}' for r in ratios)} times as fast, small to large"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="of `python -m gpu.micro`")
    parser.add_argument("--output", type=Path, required=True, help="the folder for the tables")
    options = parser.parse_args()
    results = [json.loads(path.read_text()) for path in options.results]
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        for dtype in DTYPES:
            table = make_table(results, dtype)
            path = options.output / table_name(table.device_class, dtype)
            path.write_text(format_table(table))
            print(f"{describe(table)}\nwritten: {path}\n")
    except ValueError as error:
        sys.exit(f"No table was made: {error}.")


if __name__ == "__main__":
    main()
