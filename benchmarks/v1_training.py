"""Version 1 training in sessions: float32, tf_amp, and TensorFlow's own option.

    python benchmarks/v1_training.py
    python benchmarks/v1_training.py --workloads lstm --rounds 15
    python benchmarks/v1_training.py --dtype float32    # as a CPU without fast units does it

Each variant of a workload trains in a process of its own, on equal batches from equal weights.
All of them are alive at once and take turns of a few steps, in an order that changes from round
to round, so that whatever else slows the machine down slows all of them. The figure of a turn is
the median of its steps; the table has the median over the turns, the ratio to float32, the mean
training loss of the last ten steps, and the loss on a held-out batch in inference mode, which
also shows the moving averages of batch normalization.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from results import RESULTS, print_table, spread, write_json
from variants import FLOAT32, environment, variants_for
from worker_channel import Worker

WORKLOAD_NAMES = ("lstm", "resnet")
_WORKER = str(Path(__file__).with_name("v1_worker.py"))
_LAST_LOSSES = 10


def measure(workload: str, dtype: str, rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """Trains one workload in every variant, in turns.

    Args:
        workload: One of `WORKLOAD_NAMES`.
        dtype: What tf_amp and TensorFlow's own option train in: "bfloat16", or `FLOAT32`.
        rounds: Turns of each variant.
        steps: Training steps of a turn.

    Returns:
        Variant -> what it measured.
    """
    workers: dict[str, Worker] = {}
    entries: dict[str, dict[str, Any]] = {}
    # A policy of Keras does nothing in a graph of version 1.
    compared = [variant for variant in variants_for(dtype) if variant != "keras_policy"]
    try:
        for variant in compared:
            arguments = ["--workload", workload, "--variant", variant, "--dtype", dtype]
            workers[variant] = Worker([_WORKER, *arguments], environment(variant, dtype))
            entries[variant] = {**workers[variant].ask(do="start"), "losses": [], "turns": []}
        for number in range(rounds):
            shift = number % len(compared)
            for variant in compared[shift:] + compared[:shift]:
                answer = workers[variant].ask(do="run", steps=steps)
                entries[variant]["turns"].append(statistics.median(answer["seconds"]))
                entries[variant]["losses"] += answer["losses"]
        for variant, worker in workers.items():
            entries[variant] |= worker.ask(do="finish")
    finally:
        for worker in workers.values():
            worker.close()
    base = entries["float32"]
    for entry in entries.values():
        entry["step_s"] = spread(entry.pop("turns"))
        entry["last_loss"] = statistics.mean(entry["losses"][-_LAST_LOSSES:])
        ratios = [
            b / e for b, e in zip(base["step_s"]["values"], entry["step_s"]["values"], strict=True)
        ]
        # Turns of one round are neighbours in time: their ratios see the same load.
        entry["speed_up"] = statistics.median(ratios)
    return entries


def rows_of(workload: str, entries: dict[str, dict[str, Any]]) -> list[list[object]]:
    """Returns the table rows of one workload."""
    rows: list[list[object]] = []
    for variant, entry in entries.items():
        low, total = entry["math"].get("bfloat16", 0), sum(entry["math"].values())
        rows.append(
            [
                *(workload, variant),
                f"{entry['step_s']['median'] * 1000:.1f}",
                f"{entry['speed_up']:.2f}x",
                *(f"{low}/{total}", entry["casts"]),
                *(f"{entry['losses'][0]:.4f}", f"{entry['last_loss']:.4f}"),
                f"{entry['held_out_loss']:.4f}",
            ]
        )
    return rows


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOAD_NAMES, default=WORKLOAD_NAMES)
    parser.add_argument("--dtype", choices=("bfloat16", FLOAT32), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each variant (9)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn (10)")
    parser.add_argument("--json", type=Path, default=RESULTS / "v1_training.json")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < 1:
        parser.error(
            "--rounds and --steps must be at least 1; received "
            f"{options.rounds} and {options.steps}"
        )
    results, rows = {}, []
    for workload in options.workloads:
        print(f"measuring {workload} ...", file=sys.stderr, flush=True)
        results[workload] = measure(workload, options.dtype, options.rounds, options.steps)
        rows += rows_of(workload, results[workload])
    headers = ["workload", "variant", "step ms", "speed-up", "low/math nodes", "casts"]
    print_table([*headers, "first loss", f"loss, last {_LAST_LOSSES}", "held-out loss"], rows)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.json, {"rounds": options.rounds, "steps": options.steps, **results})


if __name__ == "__main__":
    main()
