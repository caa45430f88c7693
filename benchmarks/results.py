"""How benchmarks give their results: a table for people, JSON for programs."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
"""Where JSON goes if no path is given."""

_PACKAGES = ("tensorflow", "keras", "tf_keras", "numpy", "protobuf")


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a Markdown table with aligned columns.

    Args:
        headers: column titles.
        rows: cells; None is shown as "-".
    """
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    rule = ["-" * width for width in widths]
    for line in (list(headers), rule, *cells):
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("| " + " | ".join(padded) + " |", flush=True)


def write_json(path: Path, payload: dict[str, Any]) -> None:
    """Writes results with a description of the machine, and says where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **payload}, indent=1) + "\n")
    print(f"\nwritten: {path}", flush=True)


def machine() -> dict[str, Any]:
    """Describes where a measurement was made."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Returns median, min, max and the values themselves."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "values": list(values),
    }


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """Returns the geometric mean of positive ratios, None of none."""
    if not ratios:
        return None
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
