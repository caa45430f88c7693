"""Measures what the rules assume of a device: casts, products, norms, sums, attention, reductions.

    cd benchmarks
    python -m gpu.micro --output results/gpu_micro.json
    XLA_FLAGS=--xla_gpu_enable_command_buffer= python -m gpu.micro --groups casts --output ...

Needs jax and jaxlib alone. The ways of a case take turns; each program computes a case several
times, one after the other, on inputs of its own, and the figure is the median of the rounds by
their number. `gpu.cost_table` makes a cost table of the results.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gpu import device as devices
from gpu.micro_cases import GROUPS, LOW, Case, Way, cases
from gpu.turns import take_turns
from gpu.values import dtype_named

_COPIES = 8
_MOST_BYTES = 1 << 30
_PAIRS = (4, 36)
CASTS = "casts"
_DISPATCH_BOUND = 1.5


def cast_chain(x: jax.Array, low: str, pairs: int) -> jax.Array:
    """Casts to a dtype and back, each a kernel of its own: barriers keep XLA from fusing them."""
    for _ in range(pairs):
        there = lax.optimization_barrier(x.astype(low))
        x = lax.optimization_barrier(there.astype(x.dtype))
    return x


def measure_casts(device: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The time of a Cast outside fusions, by elements: the slope over chains of two lengths."""
    rows = []
    for exponent in (10, 12, 14, 16, 18, 20, 22, 24, 26)[: 3 if options.small else None]:
        size = 1 << exponent
        x = jax.device_put(np.ones((size,), np.float32), device)
        starts, kernels = {}, {}
        for low in LOW:
            for pairs in _PAIRS:
                chain = functools.partial(cast_chain, low=low, pairs=pairs)
                compiled = jax.jit(chain).lower(x).compile()
                starts[f"{low} {pairs}"] = functools.partial(compiled, x)
                kernels[f"{low} {pairs}"] = devices.entry_kernels(compiled.as_text())
        times = take_turns(starts, options.rounds, options.turn_s)
        few, many = _PAIRS
        for low in LOW:
            spent = times[f"{low} {many}"]["median_s"] - times[f"{low} {few}"]["median_s"]
            rows.append(
                {
                    "dtype": low,
                    "size": size,
                    "cast_s": spent / (2 * (many - few)),
                    "chains": {pairs: times[f"{low} {pairs}"] for pairs in _PAIRS},
                    "kernels": kernels[f"{low} {many}"],
                }
            )
        print(f"cast 2^{exponent}: {rows[-1]['cast_s'] * 1e6:.2f} us", file=sys.stderr, flush=True)
    return rows


def _repeated(function: Callable[..., Any], copies: int) -> Callable[..., Any]:
    """Calls a function with one set of arguments after the other."""

    def run(*arrays: jax.Array) -> list[Any]:
        each = len(arrays) // copies
        results: list[Any] = []
        for number in range(copies):
            given: Any = arrays[number * each : (number + 1) * each]
            if results:  # independent calls could be fused, or products merged
                given, results[-1] = lax.optimization_barrier((given, results[-1]))
            results.append(function(*given))
        return results

    return run


def _program(device: Any, way: Way, copies: int) -> tuple[Callable[[], Any], dict[str, Any]]:
    """What starts the copies of a way, and what is known of the compiled program."""
    random = np.random.default_rng(0)
    arrays = [
        jax.device_put(
            random.uniform(0.5, 1.5, shape).astype(np.float32).astype(dtype_named(dtype)), device
        )
        for _ in range(copies)
        for shape, dtype in way.arguments()
    ]
    compiled = jax.jit(_repeated(way.function, copies)).lower(*arrays).compile()
    known = {
        "kernels": devices.entry_kernels(compiled.as_text()),
        "memory": devices.memory_of(compiled.memory_analysis()),
    }
    return functools.partial(compiled, *arrays), known


def _copies(case: Case) -> int:
    bytes_each = max(
        sum(int(np.prod(shape)) * dtype_named(dtype).itemsize for shape, dtype in way.arguments())
        for way in case.ways.values()
    )
    return max(2, min(_COPIES, _MOST_BYTES // (bytes_each * len(case.ways))))


def measure_case(device: Any, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Times the ways of a case; one that this device cannot run has its error instead."""
    copies = _copies(case)
    ways: dict[str, dict[str, Any]] = {}
    starts = {}
    for name, way in case.ways.items():
        try:
            starts[name], ways[name] = _program(device, way, copies)
        except Exception as error:  # noqa: PERF203  cuDNN's attention exists on some devices alone
            ways[name] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    for name, times in take_turns(starts, options.rounds, options.turn_s).items():
        seconds = times["median_s"] / copies
        ways[name] |= {"seconds": seconds, "min_s": times["min_s"] / copies}
        ways[name]["rounds"] = len(times["values_s"])
    return {
        "group": case.group,
        "name": case.name,
        "key": case.key,
        "size": case.size,
        "copies": copies,
        "ways": ways,
    }


def _dispatch(device: Any, options: argparse.Namespace) -> float:
    """Seconds from the start of a program that does next to nothing to that of the next."""
    arrays = [jax.device_put(np.zeros((8,), np.float32), device) for _ in range(2 * _COPIES)]
    compiled = jax.jit(lambda *given: [jnp.negative(given[0])]).lower(*arrays).compile()
    start = functools.partial(compiled, *arrays)
    return take_turns({"": start}, options.rounds, options.turn_s)[""]["median_s"]


def _table(results: dict[str, Any]) -> str:
    dispatch = results["dispatch_s"]
    lines = ["| case | way | us | x the first | kernels |", "|---|---|---|---|---|"]
    for row in results["cases"]:
        first = None
        for name, way in row["ways"].items():
            if "error" in way:
                lines.append(f"| {row['name']} | {name} | - | - | {way['error'][:60]} |")
                continue
            first = first or way["seconds"]
            bound = way["seconds"] * row["copies"] < _DISPATCH_BOUND * dispatch
            times = f"{way['seconds'] * 1e6:.2f}{' (dispatch)' if bound else ''}"
            kernels = ", ".join(f"{count} {op}" for op, count in way["kernels"].items())
            ratio = f"{first / way['seconds']:.2f}"
            lines.append(f"| {row['name']} | {name} | {times} | {ratio} | {kernels} |")
    lines += [
        f"| cast of {row['size']} | {row['dtype']} | {row['cast_s'] * 1e6:.2f} | | |"
        for row in results["casts"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="the results, as JSON")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--groups", nargs="+", choices=(CASTS, *GROUPS), default=(CASTS, *GROUPS))
    parser.add_argument("--rounds", type=int, default=21, help="turns of each way (21)")
    parser.add_argument("--turn-s", type=float, default=0.005, help="seconds of a turn (0.005)")
    parser.add_argument("--small", action="store_true", help="one or two small sizes of each case")
    options = parser.parse_args()
    device = devices.open_device(options.platform)
    results: dict[str, Any] = {"facts": devices.facts(device), "casts": [], "cases": []}
    results["dispatch_s"] = _dispatch(device, options)
    options.output.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        options.output.write_text(json.dumps(results, indent=1) + "\n")

    if CASTS in options.groups:
        results["casts"] = measure_casts(device, options)
        write()
    for case in cases(options.small):
        if case.group in options.groups:
            results["cases"].append(measure_case(device, case, options))
            print(f"{case.group}: {case.name}", file=sys.stderr, flush=True)
            write()
    print(_table(results))
    failed = [c["name"] for c in results["cases"] if all("error" in w for w in c["ways"].values())]
    if failed:
        sys.exit(f"No way could be run: {', '.join(failed)}")


if __name__ == "__main__":
    main()
