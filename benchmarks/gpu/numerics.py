"""Trains the exported tasks on a device: does float16 with loss scaling learn what float32 does?

    cd benchmarks
    python -m gpu.export results/gpu_numerics --numerics
    python -m gpu.numerics results/gpu_numerics --output results/gpu_numerics.json

Needs jax and jaxlib 0.11.2 and the folder, and no TensorFlow. Every variant trains from the same
weights on the same batches, with every seed. The result has the loss of every step, the accuracy
on data not trained on, and each change of the loss scale. Exits with 1 if the loss of a run ends as
no number, or worse than the worst of the float32 seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from loss_parity import compare
from results import print_table

from gpu import device as devices
from gpu.program import Program, read_programs
from gpu.training_data import read_run

_FINAL_STEPS = 20
_SCALES = ("loss_scale/scale", "/dynamic_scale")


def _values(program: Program, known: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return [
        known[parameter.name] if parameter.name in known else parameter.value()
        for parameter in program.parameters
    ]


def train(
    training: tuple[Program, devices.Loaded],
    inference: tuple[Program, devices.Loaded],
    data: Mapping[str, np.ndarray],
    initial: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """Trains from initial weights on all batches.

    Returns:
        `losses`, `final_loss` (mean of the last 20), `accuracy`, and `scales`: [step, loss scale
        behind it] for every change, the initial one first; empty without a loss scale.
    """
    program, loaded = training
    names = [parameter.name for parameter in program.parameters]
    loaded.give(_values(program, initial))
    scale = next(
        (at for at, name in enumerate(names) if name.partition(":")[0].endswith(_SCALES)), None
    )
    losses, scales = [], []
    for step, batch in enumerate(zip(data["inputs"], data["labels"], strict=True)):
        if scale is not None:
            now = float(loaded.read(scale))
            if not scales or scales[-1][1] != now:
                scales.append([step, now])
        for number, array in enumerate(batch):
            loaded.put(number, array)
        losses.append(float(np.asarray(loaded.step()[0])))
    trained = {name: loaded.read(at) for at, name in enumerate(names) if not _is_input(name)}
    program, loaded = inference
    loaded.give(_values(program, trained | {"input0": data["held_out_inputs"]}))
    predicted = np.asarray(loaded.step()[0]).argmax(-1)
    return {
        "losses": losses,
        "final_loss": statistics.fmean(losses[-_FINAL_STEPS:]),
        "accuracy": float((predicted == data["held_out_labels"]).mean()),
        "scales": scales,
    }


def _is_input(name: str) -> bool:
    return name.startswith("input")


def _judge(runs: Mapping[str, Sequence[dict[str, Any]]], task: str) -> list[list[object]]:
    """One row for each variant and figure; the last cell says whether it is as good as float32."""
    rows: list[list[object]] = []
    for variant, found in runs.items():
        for key in ("final_loss", "accuracy"):
            verdict = compare(list(runs["float32"]), list(found), key)
            interval = f"{verdict['float32_min']:.4f} .. {verdict['float32_max']:.4f}"
            changes = [len(run["scales"]) - 1 if run["scales"] else None for run in found]
            good = "yes" if verdict["within_or_better"] else "NO"
            rows.append([task, variant, key, interval, f"{verdict['mean']:.4f}", changes, good])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of `python -m gpu.export --numerics`")
    parser.add_argument("--output", type=Path, required=True, help="the results, as JSON")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    device = devices.open_device(options.platform)
    programs = {(p.workload, p.variant, p.mode): p for p in read_programs(options.folder)}
    results: dict[str, Any] = {"facts": devices.facts(device), "runs": {}}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    rows: list[list[object]] = []
    for task in dict.fromkeys(workload for workload, *_ in programs):
        runs = results["runs"][task] = {}
        files = sorted(options.folder.glob(f"{task}.seed*.npz"))
        for variant in dict.fromkeys(v for workload, v, _ in programs if workload == task):
            pair = []
            for mode in ("training", "inference"):
                program = programs[task, variant, mode]
                pair.append((program, devices.Loaded(device, program.hlo(options.folder))))
            runs[variant] = [train(*pair, *read_run(path)) for path in files]
            print(f"{task} {variant}: {len(files)} seeds", file=sys.stderr, flush=True)
            options.output.write_text(json.dumps(results) + "\n")
        rows += _judge(runs, task)
        for variant, found in runs.items():
            for seed, run in enumerate(found):
                if run["scales"]:
                    print(f"{task} {variant} seed {seed}: [step, loss scale] {run['scales']}")
    headers = ["task", "variant", "figure", "float32 seeds", "mean", "scale changes", "as good"]
    print_table(headers, rows)
    wrong = [f"{row[0]} {row[1]} {row[2]}" for row in rows if row[-1] != "yes"]
    if wrong:
        sys.exit(f"\nWRONG: worse than every seed of float32: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
