"""Runs exported programs on a device, interleaved, and checks what they compute.

    cd benchmarks
    python -m gpu.run results/gpu_small --output results/gpu_small.json
    python -m gpu.run results/gpu_full --modes training --budget-s 540 --output results/gpu.json

Needs jax and jaxlib 0.11.2 (numpy and ml_dtypes come with them) and the folder, and no TensorFlow.
All variants of a workload are compiled, checked and timed in one process, in turns. The results are
written behind every workload, and what the output has already is not run again, so that a command
that ran out of time goes on where it stopped. Exits with 1 if anything computed something else than
its reference, or could not be run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu import checks
from gpu.program import MODES, Program, read_programs

_GOOD = ("ok", "no reference")


def measure(
    device: Any, programs: Sequence[Program], folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Checks and times the variants of one workload and mode.

    Returns:
        `variants`: name -> `check` ("ok", "no reference" or what is wrong), `difference`,
        `compile_s`, `memory`, `kernels`, and the times of `turns.take_turns`; `clocks` before and
        after.
    """
    from gpu import device as devices
    from gpu.turns import take_turns

    entries: dict[str, dict[str, Any]] = {}
    loaded: dict[str, devices.Loaded] = {}
    weights: dict[Any, np.ndarray] = {}
    float32: dict[str, Any] | None = None
    exported = next((p.reference for p in programs if p.variant == "float32"), None)
    before = devices.nvidia_smi()
    for program in programs:
        entry = entries[program.variant] = {}
        if program.error:
            entry["check"] = f"not exported: {program.error}"
            continue
        started = time.perf_counter()
        try:
            one = devices.Loaded(device, program.hlo(folder))
            entry["compile_s"] = time.perf_counter() - started
            found = _first_step(one, program, weights)
        except Exception as error:  # one program that XLA refuses must not cost the others
            entry["check"] = f"failed: {type(error).__name__}: {str(error)[:200]}"
            continue
        entry |= {"memory": one.memory, "kernels": one.kernels}
        entry["difference"], entry["check"] = _judge(program, found, float32, exported, options)
        if program.variant == "float32":
            float32 = found
        loaded[program.variant] = one
        print(f"{program.name}: {entry['check']}", file=sys.stderr, flush=True)
    weights.clear()
    if options.rounds:
        starts = {name: one.step for name, one in loaded.items()}
        for name, times in take_turns(starts, options.rounds, options.turn_s).items():
            entries[name] |= times
            finite = all(
                np.isfinite(np.asarray(x, np.float64)).all() for x in _results(loaded[name])
            )
            if not finite and entries[name]["check"].startswith(_GOOD):
                entries[name]["check"] = "an output is not finite after the timed steps"
    return {"variants": entries, "clocks": [before, devices.nvidia_smi()]}


def _first_step(one: Any, program: Program, weights: dict[Any, np.ndarray]) -> dict[str, Any]:
    """Gives a program its parameters and runs one step; returns it as `checks.first_step` does."""
    given = []
    for parameter in program.parameters:
        key = (parameter.name, str(parameter.rule), str(parameter.shape), parameter.dtype)
        if key not in weights:
            weights[key] = parameter.value()
        given.append(weights[key])
    one.give(given)
    results = [np.asarray(result) for result in one.step()]
    names = {number: program.parameters[at].name for number, at in one.assigned.items()}
    before = {program.parameters[at].name: given[at] for at in one.assigned.values()}
    after = {name: results[number] for number, name in names.items()}
    return checks.first_step(before, results[: program.outputs], after)


def _results(one: Any) -> list[Any]:
    return [r for number, r in enumerate(one.step()) if number not in one.assigned]


def _judge(
    program: Program,
    found: dict[str, Any],
    float32: dict[str, Any] | None,
    exported: dict[str, Any] | None,
    options: argparse.Namespace,
) -> tuple[dict[str, Any] | None, str]:
    """Compares a first step with the exported one, or else with float32's on this device.

    Args:
        program: what was run.
        found: its first step.
        float32: that of float32 on this device, None if it was not run.
        exported: the exported one of float32, if there is one.
        options: of these, `tolerance` counts.
    """
    reference = program.reference or float32
    if reference is None:
        return None, "no reference"
    if program.reference is None:
        # Dropout in another dtype draws other numbers: a training step may only be alike.
        reference = reference | {"updates": {}, "exact": {}}
    difference = checks.differences(reference, found)
    wrong = checks.complaint(difference, program.dtype, options.tolerance)
    if wrong and program.reference and exported:
        inherent = checks.differences(exported, program.reference)
        if not checks.complaint(difference, program.dtype, options.tolerance, inherent):
            wrong = f"ok for {program.dtype}, whose reference is as far from float32's: {wrong}"
    return difference, wrong or "ok"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of `python -m gpu.export`")
    parser.add_argument("--output", type=Path, required=True, help="the results, as JSON")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--workloads", nargs="+")
    parser.add_argument("--variants", nargs="+")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=int, default=25, help="turns of each (25); 0 only checks")
    parser.add_argument("--turn-s", type=float, default=0.1, help="seconds of a turn (0.1)")
    parser.add_argument("--tolerance", type=float, default=1.0, help="times the usual ones (1)")
    parser.add_argument("--budget-s", type=float, help="start no further workload after these")
    parser.add_argument("--no-tf32", action="store_true", help="float32 products in float32")
    options = parser.parse_args()
    started = time.monotonic()
    if options.no_tf32:  # CUDA's libraries read it when they are loaded
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    from gpu import device as devices
    from gpu.report import markdown

    programs = [
        program
        for program in read_programs(options.folder)
        if program.mode in options.modes
        and (not options.workloads or program.workload in options.workloads)
        and (not options.variants or program.variant in options.variants)
    ]
    device = devices.open_device(options.platform)
    results: dict[str, Any] = {"facts": devices.facts(device), "cases": {}}
    results["rounds"] = options.rounds
    if options.output.exists():
        found = json.loads(options.output.read_text())
        if other := _other_conditions(found["facts"], results["facts"]):
            sys.exit(f"{options.output} was measured with another {other}: choose another file.")
        results["cases"] = found["cases"]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    left = []
    for case in dict.fromkeys(f"{program.workload} {program.mode}" for program in programs):
        if case in results["cases"]:
            continue
        if options.budget_s and time.monotonic() - started > options.budget_s:
            left.append(case)
            continue
        chosen = [program for program in programs if f"{program.workload} {program.mode}" == case]
        results["cases"][case] = measure(device, chosen, options.folder, options)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results))
    wrong = [
        f"{case} {name}: {entry['check']}"
        for case, found in results["cases"].items()
        for name, entry in found["variants"].items()
        if not entry["check"].startswith(_GOOD) and not _refused_upstream(name, entry)
    ]
    if left:
        print(f"\nNo time was left for: {', '.join(left)}. The same command goes on with them.")
    if not results["cases"]:
        wrong.append("nothing was chosen")
    if wrong:
        sys.exit("\nWRONG:\n" + "\n".join(wrong))


def _other_conditions(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Which of the conditions differs whose times must not stand in one table."""
    must = ("device", "jaxlib", "XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")
    return next((key for key in must if before[key] != now[key]), None)


def _refused_upstream(name: str, entry: dict[str, Any]) -> bool:
    """Whether TensorFlow refused what its own pass made: a finding about that pass."""
    return name.startswith("upstream") and entry["check"].startswith("not exported")


if __name__ == "__main__":
    main()
