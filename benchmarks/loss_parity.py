"""Loss parity: 300 real training steps in float32, in float16 and in bfloat16.

    python benchmarks/loss_parity.py

Two tasks with real data that is on every machine: a CNN on scikit-learn's 1,797 digits, and a
character language model on the Python sources of the standard library. Each runs with three seeds
in every dtype; float16 and bfloat16 by environment variables, the cost rule off, float16 with the
loss scaling that comes with it. Writes the curves as JSON and one figure. A dtype is within the
spread if the mean over its seeds lies between the smallest and the largest of the three float32
results, for the final loss (mean of the last 20 steps) and for the accuracy on data not trained on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from line_chart import Line, Panel, write_figure
from parity_tasks import TASK_NAMES
from results import RESULTS, print_table, write_json
from variants import environment
from worker_channel import Worker

_WORKER = str(Path(__file__).with_name("parity_worker.py"))
_FINAL_STEPS = 20
_SMOOTHING = 10
_COLOURS = {"float32": "#444444", "bfloat16": "#1f77b4", "float16": "#d62728"}
_HIGHER_IS_BETTER = {"final_loss": False, "accuracy": True}


def train(task: str, dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains a task with every seed, in one process; returns one entry a seed."""
    amp = dtype != "float32"
    variant, target = ("tf_amp", dtype) if amp else ("float32", "bfloat16")
    settings = environment(variant, target)
    if amp:
        # These networks are so small that the cost rule would leave nearly all in float32.
        settings["TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_COST_TABLE"] = "off"
    worker = Worker([_WORKER, "--variant", variant, "--dtype", target], settings)
    runs = []
    try:
        for seed in range(options.seeds):
            print(f"\r\033[K{task}: {dtype}, seed {seed}", end="", file=sys.stderr, flush=True)
            run = worker.ask(task=task, seed=seed, steps=options.steps)
            run["final_loss"] = statistics.fmean(run["losses"][-_FINAL_STEPS:])
            runs.append(run)
    finally:
        worker.close()
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return runs


def compare(
    reference: list[dict[str, Any]], runs: list[dict[str, Any]], key: str
) -> dict[str, Any]:
    """Compares one figure of some runs with that of the float32 runs of the same seeds.

    Args:
        reference: the float32 runs.
        runs: the runs of another dtype, in the same order of seeds.
        key: "final_loss" or "accuracy".

    Returns:
        Means, the float32 interval, the largest difference between runs of one seed, `within` (the
        mean lies in the interval) and `within_or_better` (it may also lie on its better side).
    """
    before, after = [run[key] for run in reference], [run[key] for run in runs]
    low, high, mean = min(before), max(before), statistics.fmean(after)
    better = mean >= low if _HIGHER_IS_BETTER[key] else mean <= high
    return {
        "mean": mean,
        "float32_mean": statistics.fmean(before),
        "float32_min": low,
        "float32_max": high,
        "largest_difference_same_seed": max(abs(a - b) for a, b in zip(before, after, strict=True)),
        "within": low <= mean <= high,
        "within_or_better": better,
    }


def _panel(task: str, curves: dict[str, list[dict[str, Any]]]) -> Panel:
    lines = [
        Line(
            label=dtype if seed == 0 else "",
            colour=_COLOURS[dtype],
            values=_smooth(run["losses"]),
            dashed=dtype != "float32",
        )
        for dtype, runs in curves.items()
        for seed, run in enumerate(runs)
    ]
    return Panel(title=task, x_label="step", y_label="training loss", lines=lines)


def _smooth(values: list[float]) -> list[float]:
    """Means over the last few steps: single batches differ more than the dtypes do."""
    return [
        statistics.fmean(values[max(0, at + 1 - _SMOOTHING) : at + 1]) for at in range(len(values))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASK_NAMES, default=TASK_NAMES)
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float16", "bfloat16"), default=("float16", "bfloat16")
    )
    parser.add_argument("--steps", type=int, default=300, help="training steps (300)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each dtype (3)")
    parser.add_argument("--json", type=Path, default=RESULTS / "loss_parity.json")
    options = parser.parse_args()
    if options.steps < 1 or options.seeds < 1:
        parser.error("--steps and --seeds must be at least 1")

    curves = {
        task: {dtype: train(task, dtype, options) for dtype in ("float32", *options.dtypes)}
        for task in options.tasks
    }
    rows: list[list[object]] = []
    verdicts: dict[str, Any] = {}
    for task in options.tasks:
        reference = curves[task]["float32"]
        for dtype in options.dtypes:
            runs = curves[task][dtype]
            for key in ("final_loss", "accuracy"):
                verdict = compare(reference, runs, key)
                verdicts.setdefault(task, {}).setdefault(dtype, {})[key] = verdict
                interval = f"{verdict['float32_min']:.4f} .. {verdict['float32_max']:.4f}"
                difference = f"{verdict['largest_difference_same_seed']:.4f}"
                better = "better" if verdict["within_or_better"] else "NO"
                within = "yes" if verdict["within"] else better
                rows.append(
                    [task, dtype, key, interval, f"{verdict['mean']:.4f}", difference, within]
                )
    headers = ["task", "dtype", "figure", "float32 seeds", "mean", "largest difference, "]
    headers[-1] += "same seed"
    print_table([*headers, "within"], rows)
    for task in options.tasks:
        for dtype in options.dtypes:
            run = curves[task][dtype][-1]
            print(f"{task} {dtype}: math ops by FunctionDef {run['math_ops']}")
            if run["amp"]["loss_scaling"]:
                print(f"{task} {dtype}: loss scale {run['amp']['loss_scale']}")
    figure = write_figure(
        options.json.with_suffix(""),
        [_panel(task, curves[task]) for task in options.tasks],
    )
    print(f"\nfigure: {figure}")
    write_json(options.json, {"steps": options.steps, "verdicts": verdicts, "curves": curves})


if __name__ == "__main__":
    main()
