"""Converted models beside the float32 ones: size, time to load, inference step, output error.

    python benchmarks/conversions.py
    python benchmarks/conversions.py --workloads resnet50 v1 --steps 20
    python benchmarks/conversions.py --workloads hf_bert --transformers-python other/bin/python

Each SavedModel (see `served_models.py`) is converted twice by `tf-amp convert`, without and with
--weights. Beside these two the float32 one is served as it is, with TensorFlow's own
`auto_mixed_precision_onednn_bfloat16`, and with the environment variable of tf_amp, which rewrites
it when it is loaded. Each has a process of its own; all are called in turns, medians over the
rounds. The error is the largest difference by the largest magnitude of the output. It ends with an
error if a network failed, or if a signature is not that of the original.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from results import RESULTS, print_table, spread, write_json
from served_models import NAMES, TRANSFORMERS
from variants import environment
from worker_channel import Worker, WorkerError

SERVED = str(Path(__file__).with_name("served_models.py"))
WORKER = str(Path(__file__).with_name("serving_worker.py"))
VARIANTS = {
    "float32": ("float32", "float32"),
    "kept": ("kept", "float32"),
    "small": ("small", "float32"),
    "upstream": ("float32", "upstream"),
    "variable": ("float32", "tf_amp"),
}
"""Variant -> the model that its process loads, and what is switched on there."""


def export(name: str, path: Path, options: argparse.Namespace) -> Path:
    """Writes a SavedModel and a batch of inputs beside it; returns the file of the inputs."""
    inputs = path.with_suffix(".npz")
    with_transformers = name in TRANSFORMERS and options.transformers_python
    python = options.transformers_python if with_transformers else sys.executable
    _run([python, SERVED, name, str(path), "--inputs", str(inputs), "--steps", str(options.steps)])
    return inputs


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, env=environment("float32"), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.splitlines()[-12:]))
    return done.stdout


def convert(source: Path, target: Path, options: list[str]) -> dict[str, Any]:
    """Converts in a process of its own; returns what it printed and its time."""
    command = [sys.executable, "-m", "tf_amp", "convert", str(source), str(target)]
    start = time.perf_counter()
    said = _run([*command, "--device", "CPU", "--dtype", "bfloat16", *options])
    return {"said": said, "seconds": time.perf_counter() - start}


def measure(name: str, room: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one network."""
    from tf_amp.conversion.convert import size_on_disk

    paths = {kind: room / f"{name}-{kind}" for kind in ("float32", "kept", "small")}
    inputs = export(name, paths["float32"], options)
    with np.load(inputs) as stored:
        rows = ["--rows", str(len(stored[stored.files[0]]))]
    made = {
        "kept": convert(paths["float32"], paths["kept"], rows),
        "small": convert(paths["float32"], paths["small"], [*rows, "--weights"]),
    }
    signatures = [_signatures(path) for path in paths.values()]
    return {
        "mb": {kind: size_on_disk(path) / 1e6 for kind, path in paths.items()},
        "conversion": made,
        "variants": served(paths, inputs, room, options),
        "signatures_equal": signatures[0] == signatures[1] == signatures[2],
    }


def served(
    paths: dict[str, Path], inputs: Path, room: Path, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Serves all variants at once, and calls them in turns."""
    workers: dict[str, Worker] = {}
    entries: dict[str, dict[str, Any]] = {}
    right: dict[str, np.ndarray] = {}
    try:
        for kind, (model, variant) in VARIANTS.items():
            arguments = [WORKER, str(paths[model]), "--inputs", str(inputs), "--variant", variant]
            workers[kind] = Worker(arguments, environment(variant))
            file = room / "outputs.npz"
            entries[kind] = workers[kind].ask(do="outputs", file=str(file))
            with np.load(file) as stored:
                right = right or dict(stored)
                entries[kind] |= _apart(right, stored)
        turns: dict[str, list[float]] = {kind: [] for kind in workers}
        names = list(workers)
        for number in range(-1, options.rounds):
            for kind in names[number % len(names) :] + names[: number % len(names)]:
                answer = workers[kind].ask(do="steps", steps=options.calls)
                if number >= 0:
                    turns[kind].append(answer["seconds"])
        for kind, taken in turns.items():
            entries[kind]["step"] = spread(taken)
    finally:
        for worker in workers.values():
            worker.close()
    return entries


def _apart(right: dict[str, np.ndarray], found: Any) -> dict[str, float]:
    """The largest difference by the largest value, and the share of equal argmax."""
    errors, agreements = [], []
    for name, value in right.items():
        largest = float(np.max(np.abs(value), initial=0)) or 1.0
        errors.append(float(np.max(np.abs(value - found[name]), initial=0)) / largest)
        agreements.append(float(np.mean(np.argmax(value, -1) == np.argmax(found[name], -1))))
    return {"error": max(errors), "top_1": min(agreements)}


def _signatures(path: Path) -> dict[str, str]:
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    saved = SavedModel.FromString((path / "saved_model.pb").read_bytes())
    return {key: str(s) for meta in saved.meta_graphs for key, s in meta.signature_def.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--steps", type=int, default=10, help="training steps before the export")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each variant")
    parser.add_argument("--calls", type=int, default=2, help="calls of a turn")
    parser.add_argument(
        "--transformers-python", help="a Python with transformers<5, tf_keras and TensorFlow"
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "conversions.json")
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    results = {}
    for name in options.workloads:
        print(f"{name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as room:
            try:
                results[name] = measure(name, Path(room), options)
            except (RuntimeError, WorkerError) as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
        print(" | ".join(_row(name, results[name])), file=sys.stderr, flush=True)
    head = ("network", "MB", "load s", "float32 ms", "converted", "--weights", "upstream")
    print_table(
        (*head, "variable", "error", "top 1", "signatures"),
        (_row(name, entry) for name, entry in results.items()),
    )
    write_json(options.json, {"results": results})
    failed = [name for name in options.workloads if name not in results]
    differing = [name for name, entry in results.items() if not entry["signatures_equal"]]
    if failed or differing:
        print(f"failed: {failed}; signatures differ: {differing}", file=sys.stderr)
    return bool(failed or differing)


def _row(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    of = entry["variants"]
    before = of["float32"]["step"]["median"]

    def figures(key: str, form: str) -> str:
        return " / ".join(format(of[kind][key], form) for kind in VARIANTS if kind != "float32")

    def times(kind: str) -> str:
        median = of[kind]["step"]["median"]
        return f"{median * 1e3:.1f} ({before / median:.2f}x)"

    return (
        name,
        " / ".join(f"{size:.1f}" for size in entry["mb"].values()),
        " / ".join(f"{of[kind]['load_s']:.2f}" for kind in ("float32", "kept", "small")),
        f"{before * 1e3:.1f}",
        *(times(kind) for kind in VARIANTS if kind != "float32"),
        figures("error", ".2g"),
        figures("top_1", ".1%"),
        "equal" if entry["signatures_equal"] else "DIFFERENT",
    )


if __name__ == "__main__":
    sys.exit(main())
