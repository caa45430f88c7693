"""Tries tf_amp on programs of other people's packages, unchanged, with and without the variable.

    pip install -e '.[field]' && pip install --no-deps tf-agents gym==0.23.0 gym-notices
    python benchmarks/field_trials.py
    python benchmarks/field_trials.py --only 'keras_hub/.*CausalLM' --rounds 0
    python benchmarks/field_trials.py --set TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_COST_TABLE=off
    python benchmarks/field_trials.py --dtype float32     as on a CPU without fast units

Every program of `field_programs` runs in two processes, float32 and tf_amp, with the same seeds.
A program whose packages no interpreter of `--python` has is reported as not installed. What counts
as a fault:

- a process that ends, or gives no answer in time;
- losses or outputs further from float32's than the bound, of another shape or dtype, or not finite;
- a graph that could not be rewritten (`graphs_failed`);
- a warning of tf_amp's that the program does not expect, or a traceback with tf_amp in it;
- a matrix product or convolution that runs in float32 without a word about it.

The bound: the error of all numbers of an output together (2-norm, relative to float32's) may be
2^-5, the rounding of bfloat16 (2^-9) of 256 layers added up at random. A network can be sensitive
by itself: with a batch of two, a batch normalization tells little more than which is larger. So
what lies beyond is run with the pass that TensorFlow has itself, and may be 4 times as far from
float32 as with that; and once more in float32, which must repeat itself, or nothing can be told.
Where nothing is converted the bound is 2^-10, and TensorFlow's other kernels, with or without
oneDNN, take the place of its pass.

Times are CPU times. The processes take turns; the ratios of a turn's steps are in the table as
their median, the first step (tracing and rewriting included) happens once and is a single figure.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from field_programs import PROGRAMS
from field_programs.program import Program
from results import RESULTS, geometric_mean, print_table, write_json
from variants import DTYPES, FLOAT32, environment
from worker_channel import Worker, WorkerError

WORKER = str(Path(__file__).with_name("field_worker.py"))
_BOUND = {"bfloat16": 2**-5, "float16": 2**-7, FLOAT32: 2**-10}
_OF_OTHER = 4.0
_KERNELS = [{"TF_ENABLE_ONEDNN_OPTS": each} for each in "01"]
"""One of them is what TensorFlow does on this CPU by itself."""
_TURN_S = 0.3
_WARNING = 30
# Right wherever it is said: in float16, nothing scales the loss of a loop that is not changed; and
# Keras itself has XLA compile convolutions of groups on a CPU.
_RIGHT = (
    "^(A custom training loop|The model's own train_step) applies gradients|"
    "Keras itself has it compiled"
)
_IN_FLOAT32 = "AMP was asked for, but every graph stays in float32"
_PRODUCTS = re.compile(r"\w+ (\d+) of (\d+)")
_STAY = re.compile(r"; (\d+) \w+ stays? float32")


def trial(program: Program, python: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one program.

    Args:
        program: which.
        python: the interpreter that has its packages.
        options: those of the command line.

    Returns:
        What to write as JSON. "faults" is a list of sentences, empty if there is none.
    """
    found: dict[str, Any] = {"program": program.name, "faults": []}
    answers: dict[str, dict[str, Any]] = {}
    workers: dict[str, Worker] = {}
    logs: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:

        def start(variant: str, name: str = "", more: Mapping[str, str] | None = None) -> bool:
            name = name or variant
            path = str(Path(folder) / f"{name}.npz")
            workers[name] = _worker(program, variant, python, options, more)
            try:
                answers[name] = workers[name].ask(
                    do="start", outputs=path, timeout_s=options.timeout
                )
            except WorkerError as error:
                found["faults"].append(f"{name}: {error}")
                return False
            with np.load(path) as file:
                answers[name]["outputs"] = dict(file)
            return True

        try:
            if start("float32") and start("tf_amp"):
                error = distance(answers["float32"], answers["tf_amp"])
                found |= _judged(program, answers["float32"], answers["tf_amp"])
                found["error"] = error
                if error["worst"] > _BOUND[options.dtype]:
                    found["other_error"], faults = _beyond(error, start, answers, options.dtype)
                    found["faults"] += faults
                if options.rounds:
                    found["step_ratio"] = _step_ratio(workers, options)
        except WorkerError as error:
            found["faults"].append(str(error))
        finally:
            for variant, worker in workers.items():
                logs[variant] = worker.log()
                worker.close()
    log = logs.get("tf_amp", "")
    if "Traceback" in log and re.search(r"/(tf_amp|graph_passes)/", log):
        found["faults"].append("a traceback with tf_amp in it")
    if found["faults"]:
        found["log"] = log[-4000:]
    return found


def _beyond(
    error: dict[str, Any],
    start: Callable[..., bool],
    answers: Mapping[str, dict[str, Any]],
    dtype: str,
) -> tuple[float, list[str]]:
    """Looks at a program whose error is beyond the bound; returns that of the other, and faults."""
    faults = []

    def distance_of(name: str, started: bool) -> float:
        return distance(answers["float32"], answers[name])["worst"] if started else math.inf

    again = distance_of("again", start("float32", "again"))
    if again > _BOUND[dtype]:
        faults.append(f"float32 does not repeat itself: {again:.3g}")
    if dtype == FLOAT32:
        what = "TensorFlow's other kernels"
        others = [start("float32", f"other{n}", more) for n, more in enumerate(_KERNELS)]
    else:
        what, others = "TensorFlow's own pass", [start("upstream", "other0", None)]
    other = max(distance_of(f"other{n}", each) for n, each in enumerate(others))
    if error["worst"] > _OF_OTHER * other or math.isinf(other):
        faults.append(f"error {error['worst']:.3g} of {error['of']}, with {what} {other:.3g}")
    return other, faults


def distance(exact: dict[str, Any], low: dict[str, Any]) -> dict[str, Any]:
    """Tells how far losses and outputs of a process are from float32's.

    Args:
        exact: the answer of the float32 process, with "losses" and "outputs".
        low: that of the other.

    Returns:
        "errors", of "loss" (all steps together) and of each output by name; the "worst" of them
        and "of" what it is. Where shape, dtype or names differ, or numbers are not finite, it is
        infinite, as is a loss that float32 does not keep finite. Integers must have the same shape
        alone: which token is largest may be a tie.
    """
    losses = np.asarray(exact["losses"])
    errors = {"loss": _relative(losses, np.asarray(low["losses"]))}
    if not np.isfinite(losses).all():
        errors["loss"] = math.inf  # it could not tell a fault
    for name in exact["outputs"].keys() | low["outputs"].keys():
        errors[name] = math.inf
        if name in exact["outputs"] and name in low["outputs"]:
            errors[name] = _relative(exact["outputs"][name], low["outputs"][name])
    worst = max(errors, key=lambda name: errors[name])
    return {"errors": errors, "worst": errors[worst], "of": worst}


def _relative(exact: np.ndarray, low: np.ndarray) -> float:
    if exact.shape != low.shape or exact.dtype != low.dtype:
        return math.inf
    if not np.issubdtype(exact.dtype, np.floating):
        return 0.0
    known = np.isfinite(exact)
    if not np.isfinite(low[known]).all():
        return math.inf
    exact, low = exact[known].astype("float64"), low[known].astype("float64")
    norm = float(np.linalg.norm(exact))
    return float(np.linalg.norm(exact - low)) / norm if norm else float(np.linalg.norm(low))


def _judged(program: Program, exact: dict[str, Any], amp: dict[str, Any]) -> dict[str, Any]:
    """Reads what tf_amp says of a program."""
    faults = []
    lines = [message["text"] for message in amp["said"]]
    products = [pair for line in lines for pair in _PRODUCTS.findall(line.partition(" in ")[0])]
    announced = sum(int(count) for line in lines for count in _STAY.findall(line))
    silent = sum(amp["math_ops"].get("float32", {}).values()) - announced
    status = amp["amp"]
    if status["graphs_failed"]:
        faults.append(f"{status['graphs_failed']} graphs failed")
    for message in amp["said"]:
        right = program.may_warn or _RIGHT
        right = right if status["graph_rewrite"] else f"{right}|{_IN_FLOAT32}"
        expected = re.search(right, message["text"])
        if message["level"] >= _WARNING and not expected:
            faults.append(f"said: {message['text']}")
    if silent > 0 and status["graph_rewrite"] and not program.may_warn:
        faults.append(f"{silent} products float32 without a word: {amp['math_ops']['float32']}")
    wanted = "nodes_total nodes_converted casts graphs_seen graphs_rewritten graphs_failed"
    return {
        "faults": faults,
        "losses": {"float32": exact["losses"], "tf_amp": amp["losses"]},
        "products_low": sum(int(low) for low, _ in products),
        "products": sum(int(count) for _, count in products),
        "amp": {key: status[key] for key in wanted.split()},
        "said": lines,
        "packages": amp["packages"],
        "first_step_ratio": amp["first_step_s"] / exact["first_step_s"],
    }


def _worker(
    program: Program,
    variant: str,
    python: str,
    options: argparse.Namespace,
    more: Mapping[str, str] | None,
) -> Worker:
    env = environment(variant, options.dtype) | program.environment | (more or {})
    if variant == "tf_amp":
        env |= dict(options.set)
    arguments = [WORKER, "--program", program.name, "--variant", variant, "--dtype", options.dtype]
    return Worker(arguments, env, python)


def _step_ratio(workers: dict[str, Worker], options: argparse.Namespace) -> float:
    ratios = []
    for number in range(options.rounds):
        order = ("float32", "tf_amp") if number % 2 else ("tf_amp", "float32")
        seconds = {
            variant: workers[variant].ask(do="run", seconds=_TURN_S, timeout_s=options.timeout)
            for variant in order
        }
        ratios.append(seconds["tf_amp"]["step_s"] / seconds["float32"]["step_s"])
    return statistics.median(ratios)


def _installed(pythons: list[str]) -> dict[str, set[str]]:
    """Returns which of the modules that programs need each interpreter has."""
    needs = sorted({name for program in PROGRAMS.values() for name in program.needs})
    code = "import sys, importlib.util as u; print(*filter(u.find_spec, sys.argv[1:]))"
    return {
        python: set(
            subprocess.run(
                [python, "-c", code, *needs], check=True, capture_output=True, text=True, cwd="/"
            ).stdout.split()
        )
        for python in pythons
    }


def _row(found: dict[str, Any]) -> list[object]:
    if found.get("not_installed"):
        return [found["program"], f"not installed: {', '.join(found['not_installed'])}"]
    cells: list[object] = [found["program"], "FAULT" if found["faults"] else "passed"]
    if "losses" not in found:
        return cells
    loss = {variant: f"{losses[-1]:.5g}" for variant, losses in found["losses"].items()}
    beside = f" ({found['other_error']:.2g})" if "other_error" in found else ""
    return [
        *cells,
        f"{loss['float32']} / {loss['tf_amp']}",
        f"{found['error']['worst']:.2g}{beside}",
        f"{found['products_low']} of {found['products']}",
        f"{found['first_step_ratio']:.2f}",
        f"{found['step_ratio']:.2f}" if "step_ratio" in found else None,
    ]


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE; received {text!r}")
    return name, value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=re.compile, help="programs whose name has a match")
    parser.add_argument("--list", action="store_true", help="print the programs and end")
    parser.add_argument(
        "--dtype", choices=(*DTYPES, FLOAT32), default="bfloat16",
        help="the target dtype, or float32 for what is done on a CPU without fast units",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7, help="turns of timed steps (7); 0 is none")
    parser.add_argument(
        "--set", type=_assignment, action="append", default=[], metavar="NAME=VALUE",
        help="a variable for the process with tf_amp",
    )  # fmt: skip
    parser.add_argument(
        "--python", nargs="+", default=[sys.executable], metavar="PATH",
        help="interpreters; a program runs with the first one that has its packages",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=900, help="seconds after which a process hangs (900)"
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "field_trials.json")
    options = parser.parse_args()
    chosen = [p for name, p in PROGRAMS.items() if not options.only or options.only.search(name)]
    if not chosen:
        parser.error(f"--only must match a program; received {options.only.pattern!r}, try --list")
    if options.list:
        print(*(f"{program.name}: {', '.join(program.needs)}" for program in chosen), sep="\n")
        return
    installed = _installed(options.python)
    trials = []
    for number, program in enumerate(chosen):
        print(f"\r\033[K{number + 1}/{len(chosen)} {program.name}", end="", file=sys.stderr)
        python = next((p for p, has in installed.items() if has.issuperset(program.needs)), None)
        if python is None:
            missing = set(program.needs).difference(*installed.values())
            found: dict[str, Any] = {"program": program.name, "faults": []}
            found["not_installed"] = sorted(missing or program.needs)
        else:
            found = trial(program, python, options)
        trials.append(found)
        for fault in found["faults"]:
            print(f"\r\033[K{program.name}: {fault}", file=sys.stderr)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{options.json}l", "w" if number == 0 else "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + os.linesep)
    print("\r\033[K", end="", file=sys.stderr)
    headers = ["program", "result", "loss, float32 / tf_amp", "error (other)"]
    headers += ["products low", "first step", "step"]
    print_table(headers, [row + [None] * (len(headers) - len(row)) for row in map(_row, trials)])
    run = [found for found in trials if not found.get("not_installed")]
    faulty = [found for found in run if found["faults"]]
    print(
        f"\n{len(run) - len(faulty)} passed, {len(faulty)} with faults, "
        f"{len(trials) - len(run)} not installed"
    )
    means = {
        key: geometric_mean([found[key] for found in run if key in found])
        for key in ("first_step_ratio", "step_ratio")
    }
    print(*(f"{key}, geometric mean: {mean:.2f}" for key, mean in means.items() if mean), sep="\n")
    write_json(
        options.json,
        {
            "dtype": options.dtype,
            "set": dict(options.set),
            "geometric_means": means,
            "trials": trials,
        },
    )
    sys.exit(1 if faulty or not run else 0)


if __name__ == "__main__":
    main()
