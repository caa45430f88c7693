"""How long the first training step takes: tracing, rewriting, and making it ready to run.

    python benchmarks/first_step.py
    python benchmarks/first_step.py --workloads mlp lstm --rounds 9 --unknown-batch

A process has one first step, so each figure is of a process of its own. The variants take turns,
in an order that changes from round to round; the table has the median, min and max over the
rounds, and the median as a multiple of float32's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from results import RESULTS, geometric_mean, print_table, spread, write_json
from step_time import WORKER, WORKLOAD_NAMES
from variants import DTYPES, VARIANTS, environment
from worker_channel import Worker


def measure(workload: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures all variants of one workload.

    Args:
        workload: one of `WORKLOAD_NAMES`.
        options: `variants`, `dtype`, `rounds` and `unknown_batch` of the command line.

    Returns:
        For each variant seconds of the first step, and their ratio to float32's where it is one.

    Raises:
        WorkerError: a process failed.
    """
    seconds: dict[str, list[float]] = {variant: [] for variant in options.variants}
    for number in range(options.rounds):
        shift = number % len(options.variants)
        for variant in (*options.variants[shift:], *options.variants[:shift]):
            print(
                f"\r\033[K{workload}: round {number + 1}/{options.rounds}, {variant}",
                end="",
                file=sys.stderr,
                flush=True,
            )
            arguments = ["--workload", workload, "--variant", variant, "--mode", "training"]
            arguments += ["--unknown-batch"] if options.unknown_batch else []
            worker = Worker(
                [WORKER, *arguments, "--dtype", options.dtype],
                environment(variant, options.dtype),
            )
            try:
                seconds[variant].append(worker.ask(do="start")["first_step_s"])
            finally:
                worker.close()
    print("\r\033[K", end="", file=sys.stderr, flush=True)
    spreads = {variant: spread(values) for variant, values in seconds.items()}
    base = spreads.get("float32", {}).get("median")
    return {
        variant: {"first_step_s": found, "of_float32": found["median"] / base if base else None}
        for variant, found in spreads.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOAD_NAMES, default=WORKLOAD_NAMES)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="the target dtype")
    parser.add_argument("--rounds", type=int, default=7, help="processes of every variant (7)")
    parser.add_argument(
        "--unknown-batch", action="store_true", help="step on a data set whose last batch may vary"
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "first_step.json")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1; received {options.rounds}")
    workloads = {}
    for workload in options.workloads:
        found = workloads[workload] = measure(workload, options)
        rows = []
        for variant, entry in found.items():
            times = (f"{entry['first_step_s'][key]:.2f}" for key in ("median", "min", "max"))
            ratio = entry["of_float32"]
            rows.append([workload, variant, *times, f"{ratio:.2f}x" if ratio else None])
        print_table(["workload", "variant", "median s", "min", "max", "of float32"], rows)
        print(flush=True)
    means = {
        variant: geometric_mean(
            [found[variant]["of_float32"] for found in workloads.values() if "float32" in found]
        )
        for variant in options.variants
    }
    known = ", ".join(f"{name} {mean:.2f}x" for name, mean in means.items() if mean)
    print(f"geometric mean of float32's first step: {known}")
    write_json(
        options.json,
        {
            "dtype": options.dtype,
            "unknown_batch": options.unknown_batch,
            "workloads": workloads,
            "geometric_means": means,
        },
    )


if __name__ == "__main__":
    main()
