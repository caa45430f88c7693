"""Converted models beside the float32 ones: size, time to load, inference step, output error.

    python benchmarks/conversions.py
    python benchmarks/conversions.py --workloads resnet50 v1 --steps 20

Each network is trained for a few steps on one batch, so that its outputs are not all alike,
exported, and converted twice by `tf-amp convert`, without and with --weights. Loading and calling
are timed in turns, medians over the rounds. The error is the largest difference by the largest
magnitude of the output.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from results import RESULTS, print_table, write_json

NAMES = ("resnet50", "mobilenetv2", "unet", "encoder", "lstm", "v1")


def export(name: str, path: Path, steps: int) -> dict[str, np.ndarray]:
    """Writes a SavedModel; returns a batch of inputs by name."""
    import tensorflow as tf

    if name == "v1":
        return _export_v1(path)
    from workloads import WORKLOADS

    model, (inputs, labels) = WORKLOADS[name].compiled(jit_compile=False)
    for _ in range(steps):
        model.train_on_batch(inputs, labels)
    model.export(str(path), verbose=False)
    key = next(
        iter(
            tf.saved_model.load(str(path))
            .signatures["serving_default"]
            .structured_input_signature[1]
        )
    )
    return {key: inputs}


def _export_v1(path: Path) -> dict[str, np.ndarray]:
    """A perceptron of TensorFlow 1 with reference-free variables, as TF Hub modules have."""
    import tensorflow as tf

    v1 = tf.compat.v1
    rng = np.random.default_rng(0)
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 1024], name="x")
        y = x
        for number, width in enumerate((2048, 2048, 2048, 100)):
            shape = [int(y.shape[-1]), width]
            w = v1.get_variable(f"w{number}", shape, use_resource=True)
            b = v1.get_variable(f"b{number}", [width], use_resource=True)
            y = tf.nn.bias_add(tf.matmul(y, w), b)
            y = tf.nn.relu(y) if number < 3 else y
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(path), {"x": x}, {"y": tf.identity(y)})
    return {"x": rng.standard_normal((128, 1024)).astype(np.float32)}


def convert(source: Path, target: Path, options: list[str]) -> dict[str, Any]:
    """Converts in a process of its own; returns what it printed, its time and its memory."""
    command = [sys.executable, "-m", "tf_amp", "convert", str(source), str(target)]
    start = time.perf_counter()
    child = subprocess.Popen(
        [*command, "--device", "CPU", "--dtype", "bfloat16", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    printed = child.stdout.read()  # type: ignore[union-attr]
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{source.name} was not converted")
    return {
        "said": printed,
        "seconds": time.perf_counter() - start,
        "peak_mb": usage.ru_maxrss / 1024,
    }


def load_times(paths: list[Path], rounds: int) -> list[float]:
    """The median time to load each, in turns."""
    import tensorflow as tf

    taken: list[list[float]] = [[] for _ in paths]
    for number in range(rounds):
        order = range(len(paths)) if number % 2 else reversed(range(len(paths)))
        for which in order:
            start = time.perf_counter()
            tf.saved_model.load(str(paths[which]))
            taken[which].append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def measure(name: str, room: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one network."""
    from tf_amp.comparison.compare import compare
    from tf_amp.conversion.convert import size_on_disk

    plain, kept, small = (room / f"{name}-{kind}" for kind in ("float32", "kept", "small"))
    sample = export(name, plain, options.steps)
    made = {
        "kept": convert(plain, kept, []),
        "small": convert(plain, small, ["--weights"]),
    }
    loads = load_times([plain, kept, small], options.load_rounds)
    entry: dict[str, Any] = {
        "mb": [size_on_disk(path) / 1e6 for path in (plain, kept, small)],
        "load_s": loads,
        "conversion": made,
    }
    for kind, path in (("kept", kept), ("small", small)):
        found = compare(plain, path, [sample], rounds=options.rounds)
        outputs = [o for o in found.outputs if o.signature == "serving_default"]
        entry[kind] = {
            "seconds": found.seconds["serving_default"],
            "error": max(o.max_relative for o in outputs),
            "cosine": min(o.cosine for o in outputs),
            "top_1": outputs[0].top_1,
            "last_axis_top_1": _agreement(plain, path, sample),
        }
    entry["signatures_equal"] = _signatures(plain) == _signatures(kept) == _signatures(small)
    return entry


def _agreement(plain: Path, path: Path, sample: dict[str, np.ndarray]) -> float:
    """The share of positions at which the largest value of the last axis is the same."""
    from tf_amp.comparison.callables import load_signatures

    best = []
    for model in (plain, path):
        signature = load_signatures(model)["serving_default"]
        (value, *_) = signature.call(signature.feed(sample)).values()
        best.append(np.argmax(value.numpy().astype(np.float32), -1))
    return float(np.mean(best[0] == best[1]))


def _signatures(path: Path) -> dict[str, str]:
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    saved = SavedModel.FromString((path / "saved_model.pb").read_bytes())
    return {key: str(s) for meta in saved.meta_graphs for key, s in meta.signature_def.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--steps", type=int, default=10, help="training steps before the export")
    parser.add_argument("--rounds", type=int, default=9, help="timed calls of each, in turns")
    parser.add_argument("--load-rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS / "conversions.json")
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    results = {}
    with tempfile.TemporaryDirectory() as room:
        for name in options.workloads:
            print(f"{name} ...", file=sys.stderr, flush=True)
            results[name] = measure(name, Path(room), options)
    head = ("network", "MB", "load s", "step ms (ratio)", "step ms, --weights (ratio)")
    print_table(
        (*head, "error", "top 1", "signatures"),
        (_row(name, entry) for name, entry in results.items()),
    )
    write_json(options.json, {"results": results, "peak_mb_here": _peak()})
    return 0


def _row(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    def times(kind: str) -> str:
        before, after = entry[kind]["seconds"]
        return f"{before * 1e3:.1f} / {after * 1e3:.1f} ({before / after:.2f}x)"

    return (
        name,
        " / ".join(f"{size:.1f}" for size in entry["mb"]),
        " / ".join(f"{seconds:.2f}" for seconds in entry["load_s"]),
        times("kept"),
        times("small"),
        f"{entry['kept']['error']:.2g} / {entry['small']['error']:.2g}",
        " / ".join(f"{entry[kind]['last_axis_top_1']:.2%}" for kind in ("kept", "small")),
        "equal" if entry["signatures_equal"] else "DIFFERENT",
    )


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
