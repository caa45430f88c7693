"""Step time and peak memory of float32, tf_amp, TensorFlow's own pass and the Keras policy.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --workloads resnet50 mlp --variants float32 tf_amp --jit on
    python benchmarks/step_time.py --unknown-batch --rows 64
    python benchmarks/step_time.py --small --modes training --unknown-batch

Each variant of a workload runs in a process of its own. All of them are alive at once and run a
few steps in turn, so that whatever else slows the machine down slows all of them. A round is one
turn of every variant, in an order that changes from round to round; a process's figure of a round
is its time divided by its steps. The table has the median, min and max over the rounds. Memory is
the peak of the process, that of its steps once all is traced, and what tensors took of the latter,
variables among them, as TensorFlow's allocator counts it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from results import RESULTS, geometric_mean, print_table, spread, write_json
from step_worker import MODES
from variants import DTYPES, FLOAT32, VARIANTS, environment, variants_for
from worker_channel import Worker, WorkerError

# `workloads.py` imports TensorFlow, which only the workers may do.
WORKLOAD_NAMES = (
    *("resnet50", "mobilenetv2", "unet", "encoder", "lstm", "mlp"),
    *("bert_base", "gpt2_small", "vit_base", "ddim", "recommender"),
    *("plain_unet", "efficientnet", "mobilenetv3", "convnext"),
)
SMALL_NAMES = (
    *("tabular", "normalized_mlp", "tanh_mlp", "text_convolutions", "text_attention"),
    *("series", "wavenet", "point_cloud", "pictures", "tagger"),
)
WORKER = str(Path(__file__).with_name("step_worker.py"))
_EVIDENCE_OPS = ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter", "MatMul")
_TURN_S = 1.0


def measure(workload: str, mode: str, jit: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Measures all variants of one workload.

    Args:
        workload: one of `WORKLOAD_NAMES` or `SMALL_NAMES`.
        mode: "training" or "inference".
        jit: whether the model is compiled by XLA.
        options: `variants`, `dtype`, `rounds`, `steps`, `unknown_batch` and `rows` of the command
            line.

    Returns:
        What to write as JSON: a description, and one entry for each variant. A variant whose
        process failed has an entry that says how.
    """
    workers: dict[str, Worker] = {}
    entries: dict[str, dict[str, Any]] = {}
    try:
        for variant in options.variants:
            _progress(f"{workload} {mode}: starting {variant}")
            arguments = [WORKER, "--workload", workload, "--variant", variant, "--mode", mode]
            arguments += ["--dtype", options.dtype, *(["--jit-compile"] if jit else [])]
            arguments += ["--unknown-batch"] if options.unknown_batch else []
            arguments += ["--rows", str(options.rows)] if options.rows else []
            worker = Worker(arguments, environment(variant, options.dtype))
            workers[variant] = worker
            entries[variant] = _ask(workers, variant, do="start")
        steps = options.steps or _steps_of_a_turn(workers)
        _take_turns(workers, entries, steps, options.rounds)
        for variant in list(workers):
            entries[variant] |= _ask(workers, variant, do="finish")
    finally:
        for worker in workers.values():
            worker.close()
    for entry in entries.values():
        if "error" not in entry:
            peaks = (entry["peak_mb_until_warm"], entry["peak_mb_steps"])
            entry["peak_mb"] = max(peaks)
    return {
        "workload": workload,
        "mode": mode,
        "jit_compile": jit,
        "unknown_batch": options.unknown_batch,
        "rows": options.rows,
        "steps_per_turn": steps,
        "variants": entries,
    }


def _ask(workers: dict[str, Worker], variant: str, **request: Any) -> dict[str, Any]:
    """Asks a worker; one that fails is taken out, and the failure is the answer."""
    try:
        return workers[variant].ask(**request)
    except WorkerError as error:
        _progress(str(error), end="\n")
        workers.pop(variant).close()
        return {"error": str(error)}


def _steps_of_a_turn(workers: dict[str, Worker]) -> int:
    """Chooses the same number of steps for all, so that the fastest works for about a second."""
    fastest = min(
        (min(worker.ask(do="run", steps=2)["seconds"]) for worker in workers.values()), default=1.0
    )
    return max(1, min(200, round(_TURN_S / fastest)))


def _take_turns(
    workers: dict[str, Worker], entries: dict[str, dict[str, Any]], steps: int, rounds: int
) -> None:
    seconds: dict[str, list[float]] = {variant: [] for variant in workers}
    for number in range(rounds):
        _progress(f"round {number + 1}/{rounds}")
        order = list(workers)
        # Who comes first finds the machine as the last round left it: take that in turns too.
        shift = number % max(1, len(order))
        order = order[shift:] + order[:shift]
        for variant in order if number % 2 else reversed(order):
            answer = _ask(workers, variant, do="run", steps=steps)
            if "error" in answer:
                entries[variant] = answer
                continue
            seconds[variant].append(sum(answer["seconds"]) / steps)
            entries[variant]["last_loss"] = answer["loss"]
    for variant in workers:
        entries[variant]["step_s"] = spread(seconds[variant])


def _rows(result: dict[str, Any]) -> list[list[object]]:
    variants = result["variants"]
    base = variants.get("float32", {}).get("step_s", {}).get("median")
    rows: list[list[object]] = []
    for variant, entry in variants.items():
        name = f"{result['workload']} {result['mode']}{' jit' if result['jit_compile'] else ''}"
        if "error" in entry:
            rows.append([name, variant, "failed", *[None] * 7])
            continue
        step = entry["step_s"]
        entry["speed_up"] = base / step["median"] if base else None
        live, loss = entry.get("live_mb_steps"), entry["last_loss"]
        rows.append(
            [
                name,
                variant,
                *(f"{step[key] * 1e3:.1f}" for key in ("median", "min", "max")),
                f"{entry['speed_up']:.2f}x" if base else None,
                f"{entry['peak_mb']:.0f}",
                f"{entry['peak_mb_steps']:.0f}",
                None if live is None else f"{live:.0f}",
                None if loss is None else f"{loss:.4f}",
            ]
        )
    return rows


def evidence_line(entry: dict[str, Any], dtype: str) -> str:
    """Says what the function definitions of a ``tf_amp`` process show; in float32, its counts."""
    amp, math = entry["amp"], entry["math_ops"]
    if dtype == FLOAT32:
        return "tf_amp: " + ", ".join(f"{rule} {count}" for rule, count in amp["fused"].items())
    low, high = math.get(dtype, {}), math.get("float32", {})
    ops = ", ".join(
        f"{op} {low.get(op, 0)}/{low.get(op, 0) + high.get(op, 0)}" for op in _EVIDENCE_OPS
    )
    others = sum(low.values()) - sum(low.get(op, 0) for op in _EVIDENCE_OPS)
    failed = f"; {amp['graphs_failed']} GRAPHS FAILED" if amp["graphs_failed"] else ""
    return (
        f"tf_amp: {amp['nodes_converted']}/{amp['nodes_total']} nodes converted to "
        f"{amp['target_dtype']}, {amp['casts']} casts{failed}; in {dtype} by FunctionDef: {ops}, "
        f"other matrix and convolution ops {others}"
    )


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means of the speed-ups, and of tf_amp over the better of its two peers."""
    means: dict[str, Any] = {}
    for mode in dict.fromkeys(result["mode"] for result in results):
        for jit in (False, True):
            of_node_type = [r for r in results if r["mode"] == mode and r["jit_compile"] == jit]
            chosen = [result["variants"] for result in of_node_type]
            if not chosen:
                continue
            entry: dict[str, Any] = {
                variant: geometric_mean(
                    [v[variant]["speed_up"] for v in chosen if v.get(variant, {}).get("speed_up")]
                )
                for variant in VARIANTS
            }
            entry["tf_amp_over_best_peer"] = geometric_mean(
                [ratio for v in chosen if (ratio := _over_best_peer(v)) is not None]
            )
            means[f"{mode}{' jit' if jit else ''}"] = entry
    return means


def _over_best_peer(variants: dict[str, Any]) -> float | None:
    medians = {name: e["step_s"]["median"] for name, e in variants.items() if "step_s" in e}
    peers = [medians[name] for name in ("upstream", "keras_policy") if name in medians]
    return min(peers) / medians["tf_amp"] if peers and "tf_amp" in medians else None


def _progress(text: str, end: str = "") -> None:
    print(f"\r\033[K{text}", end=end, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = (*WORKLOAD_NAMES, *SMALL_NAMES)
    parser.add_argument("--workloads", nargs="+", choices=names, default=WORKLOAD_NAMES)
    parser.add_argument(
        "--small",
        dest="workloads",
        action="store_const",
        const=SMALL_NAMES,
        help="the small networks alone",
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="(all that fit the dtype)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--jit", choices=("off", "on", "both"), default="off", help="jit_compile")
    parser.add_argument(
        "--unknown-batch", action="store_true", help="step on a data set whose last batch may vary"
    )
    parser.add_argument("--rows", type=int, help="rows of a batch (default: the workload's)")
    parser.add_argument(
        "--dtype", choices=(*DTYPES, FLOAT32), default="bfloat16",
        help="the target dtype, or float32 for what is done on a CPU without fast units",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9, help="turns of every variant (9)")
    parser.add_argument("--steps", type=int, help="steps a turn (default: about one second's)")
    parser.add_argument("--json", type=Path, default=RESULTS / "step_time.json")
    options = parser.parse_args()
    options.variants = options.variants or variants_for(options.dtype)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1; received {options.rounds}")

    headers = ["workload", "variant", "median ms", "min", "max", "speed-up", "peak MB"]
    headers += ["peak MB of steps", "MB of tensors", "last loss"]
    results = []
    for workload in options.workloads:
        for mode in options.modes:
            for jit in {"off": (False,), "on": (True,), "both": (False, True)}[options.jit]:
                result = measure(workload, mode, jit, options)
                results.append(result)
                _progress("")
                print_table(headers, _rows(result))
                amp = result["variants"].get("tf_amp", {})
                if "amp" in amp:
                    print(evidence_line(amp, options.dtype))
                print(flush=True)
    summary = _summary(results)
    for name, means in summary.items():
        known = {key: value for key, value in means.items() if value is not None}
        if known:
            figures = ", ".join(f"{key} {value:.2f}x" for key, value in known.items())
            print(f"geometric mean, {name}: {figures}")
    write_json(
        options.json, {"dtype": options.dtype, "results": results, "geometric_means": summary}
    )


if __name__ == "__main__":
    main()
