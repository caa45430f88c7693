"""Prints the tables of one or more results of `run.py`.

python -m gpu.report results/gpu.json [MORE.json ...]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PEERS = ("keras_policy", "upstream")


def over_better_peer(variants: Mapping[str, Any], dtype: str) -> float | None:
    """How many times as fast as the faster peer of the same dtype tf_amp is; None without both."""
    medians = {name: entry.get("median_s") for name, entry in variants.items()}
    peers = [medians[name] for peer in PEERS if medians.get(name := f"{peer}_{dtype}")]
    ours = medians.get(f"tf_amp_{dtype}")
    return min(peers) / ours if peers and ours else None


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    """The geometric mean of those that are there, None of none."""
    known = [math.log(ratio) for ratio in ratios if ratio]
    return math.exp(sum(known) / len(known)) if known else None


def markdown(results: Mapping[str, Any]) -> str:
    """The tables of a result as Markdown.

    Args:
        results: `facts`, and `cases`: "workload mode" -> `variants`; see `run.measure`.
    """
    facts = results["facts"]
    smi = facts.get("nvidia_smi") or {}
    head = (
        f"Device {facts['device']}, {facts['platform'].strip()}, jaxlib {facts['jaxlib']}, driver "
        f"{smi.get('driver_version', 'none')}, clock {smi.get('clocks.sm', 'unknown')} of "
        f"{smi.get('clocks.max.sm', 'unknown')}; float32 products in {facts['float32_products']}; "
        f"XLA_FLAGS {facts['XLA_FLAGS']!r}; medians of {results['rounds']} rounds."
    )
    lines = [
        head,
        "",
        "| network | variant | ms | min | max | x float32 | peak MB | x float32 | check |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, entry in results["cases"].items():
        variants = entry["variants"]
        base = variants.get("float32", {})
        for name, each in variants.items():
            if "median_s" not in each:
                lines.append(f"| {case} | {name} | - | - | - | - | - | - | {each['check']} |")
                continue
            times = (f"{each[key] * 1e3:.3f}" for key in ("median_s", "min_s", "max_s"))
            faster = _ratio(base.get("median_s"), each["median_s"])
            peak = each["memory"]["peak"]
            less = _ratio(peak, base.get("memory", {}).get("peak"))
            cells = (case, name, *times, faster, f"{peak / 1e6:.1f}", less, each["check"])
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| geometric means | float16 | bfloat16 |", "|---|---|---|"]
    for mode in ("training", "inference"):
        chosen = [e["variants"] for case, e in results["cases"].items() if case.endswith(mode)]
        if not chosen:
            continue
        means = {"over the better peer": [_mean_over_peer(chosen, d) for d in _DTYPES]}
        for kind in ("tf_amp", *PEERS):
            means[f"{kind} over float32"] = [_mean_over_float32(chosen, kind, d) for d in _DTYPES]
        for title, row in means.items():
            shown = (f"{mean:.3f}" if mean else "-" for mean in row)
            lines.append(f"| {mode}: {title} | {' | '.join(shown)} |")
    return "\n".join(lines)


_DTYPES = ("float16", "bfloat16")


def _ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f}" if above and below else "-"


def _mean_over_peer(chosen: Iterable[Mapping[str, Any]], dtype: str) -> float | None:
    return geometric_mean(over_better_peer(variants, dtype) for variants in chosen)


def _mean_over_float32(chosen: Iterable[Mapping[str, Any]], kind: str, dtype: str) -> float | None:
    ratios = []
    for variants in chosen:
        base = variants.get("float32", {}).get("median_s")
        low = variants.get(f"{kind}_{dtype}", {}).get("median_s")
        ratios.append(base / low if base and low else None)
    return geometric_mean(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path)
    for path in parser.parse_args().results:
        print(f"{markdown(json.loads(path.read_text()))}\n")


if __name__ == "__main__":
    main()
