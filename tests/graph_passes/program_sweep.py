"""Many random programs, run by hand or by a test: which promise of the rewrite each breaks.

    python tests/graph_passes/program_sweep.py --cases 100000 --seed 1 --jobs 2

Each case is a `RandomProgram`, run in float32, rewritten and in naive low precision. Cases are made
in batches, each in a process and with a seed of its own, so that a crash or a hang costs one batch
and is a finding too. A finding is printed with the command that makes its batch again; with
`--shrink` that command looks for the smallest program with the same fault.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

BATCH = 200
FLOAT32_RUNS = 5
"""How often a program that ended its process is run in float32: damaged memory shows by chance."""
SECONDS_A_CASE = 30
"""What a batch may take before it counts as hung."""
DIFFERS = 9
"""The exit status of a process whose runs of one program in float32 differ."""
DTYPES = ("bfloat16", "float16", "float32")
ROUTES = (
    *("offline", "function", "session", "v1 session", "xla", "saved", "tape outside", "converted"),
    *("fit", "scaled loop", "v1 minimize"),
)


def run_batch(options: argparse.Namespace, seed: int, cases: int) -> dict[str, Any]:
    """Runs a batch in a process of its own; what it counted and what it found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--cases", str(cases), "--seed", str(seed)]
        command += ["--steps", str(options.steps), "--depth", str(options.depth)]
        command += ["--routes", *options.routes, "--dtypes", *options.dtypes]
        command += ["--in-process", folder]
        if options.shrink:
            command.append("--shrink")
        why = ""
        with Path(folder, "output").open("wb") as output:
            try:
                limit = cases * SECONDS_A_CASE + 120
                done = subprocess.run(command, stdout=output, stderr=output, timeout=limit)
                why = f"the process ended with {done.returncode}" if done.returncode else ""
            except subprocess.TimeoutExpired:
                why = "it hangs"
        made = Path(folder, "results.json")
        result = json.loads(made.read_text()) if made.exists() else {"counts": {}, "found": []}
        counts = Counter(result["counts"])
        found, apart = [], []
        for finding in result["found"]:
            (apart if ends_in_float32([finding["program"]]) else found).append(finding)
        if why:
            begun = Path(folder, "programs")
            said = Path(folder, "output").read_text(errors="replace")[-2000:]
            programs = begun.read_text().splitlines() if begun.exists() else []
            program = programs[-1] if programs else "before the first program"
            is_apart = bool(programs) and ends_in_float32(programs)
            finding = {"what": why, "why": said, "program": program}
            (apart if is_apart else found).append(finding)
        counts["ends in float32 too"] += len(apart)
        return {"counts": +counts, "found": found, "apart": apart, "seed": seed}


def ends_in_float32(programs: Sequence[str]) -> bool:
    """Whether one of some processes that run programs in float32 alone hangs or is ended.

    The last one is tried by itself first: memory that an earlier one has damaged may end a process
    in any later one. It may also change values, so what is found is tried too, and runs that
    differ from one another count as an end.
    """
    for tried in (programs[-1:], programs) if len(programs) > 1 else (programs,):
        limit = SECONDS_A_CASE * (10 + len(tried))
        command = [sys.executable, __file__, "--float32", *tried]
        try:
            for _ in range(FLOAT32_RUNS):
                status = subprocess.run(command, capture_output=True, timeout=limit).returncode
                if status < 0 or status == DIFFERS:
                    return True
        except subprocess.TimeoutExpired:
            return True
    return False


def run_in_float32(programs: Sequence[str]) -> int:
    """Runs programs, as their reprs, by the routes that need no rewrite; the exit status."""
    from random_program_runs import run_exact
    from random_programs import RandomProgram
    from random_steps import Step

    known = {"RandomProgram": RandomProgram, "Step": Step}
    is_same = [run_exact(eval(program, known)) for program in programs]
    return 0 if all(is_same) else DIFFERS


def run_here(options: argparse.Namespace) -> None:
    """Runs a batch in this process and leaves the results in a folder."""
    import gc
    import logging

    import tensorflow as tf
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from random_program_runs import check
    from random_programs import RandomProgram, random_programs
    from rewrite_checks import BrokenPromiseError

    logging.getLogger("tf_amp").setLevel(logging.WARNING)
    tf.get_logger().setLevel("ERROR")
    gc.freeze()  # what the imports made lives on: a tenth of the time went into walking over it
    folder: Path = options.in_process
    counts: Counter[str] = Counter()
    found: dict[str, dict[str, str]] = {}

    def keep(what: str, why: str, program: RandomProgram) -> None:
        if options.shrink:
            found.clear()
        found[repr(program)] = {"what": what, "why": why, "program": repr(program)}

    def one(program: RandomProgram) -> None:
        with (folder / "programs").open("a") as begun:
            begun.write(f"{program!r}\n")
        how = f"{program.route} {program.dtype}"
        try:
            counts[f"{how}: {check(program)}"] += 1
        except Exception as error:
            counts[f"{how}: broken"] += 1
            what = error.what if isinstance(error, BrokenPromiseError) else type(error).__name__
            keep(what, str(error)[:1000], program)
            if options.shrink:
                raise
        finally:
            result = {"counts": counts, "found": list(found.values())}
            (folder / "results.json").write_text(json.dumps(result))

    run = settings(
        max_examples=options.cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink) if options.shrink else (Phase.generate,),
        report_multiple_bugs=False,
    )(
        given(
            random_programs(
                routes=tuple(options.routes),
                dtypes=tuple(options.dtypes),
                max_steps=options.steps,
                depth=options.depth,
            )
        )(one)
    )
    try:
        seed(options.seed)(run)()
    except Exception:
        if not found:
            raise


def main() -> int:
    """Runs the batches and prints what they found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--routes", nargs="*", default=ROUTES, choices=ROUTES)
    parser.add_argument("--dtypes", nargs="*", default=DTYPES, choices=DTYPES)
    parser.add_argument("--steps", type=int, default=6, help="in a row, at most")
    parser.add_argument("--depth", type=int, default=2, help="of bodies in bodies")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--float32", metavar="PROGRAM", nargs="*", help="run these alone, and not rewritten"
    )
    parser.add_argument("--in-process", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.float32 is not None:
        return run_in_float32(options.float32)
    if options.in_process:
        run_here(options)
        return 0
    batches = [min(BATCH, options.cases - at) for at in range(0, options.cases, BATCH)]
    counts: Counter[str] = Counter()
    found = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        runs = [
            pool.submit(run_batch, options, options.seed + number, cases)
            for number, cases in enumerate(batches)
        ]
        for run in concurrent.futures.as_completed(runs):
            result = run.result()
            counts.update(result["counts"])
            for finding in result["apart"]:
                told = f"(seed {result['seed']}): {finding['why']}\n    {finding['program']}"
                print(f"{finding['what']}, but it ends in float32 too {told}", flush=True)
            for finding in result["found"]:
                finding["seed"] = result["seed"]
                found.append(finding)
                print("{what} (seed {seed}): {why}\n    {program}".format(**finding), flush=True)
    print(f"{sum(counts.values())} cases, {len(found)} findings: {dict(sorted(counts.items()))}")
    if found:
        print("Smallest program of a seed: --cases 100 --shrink --seed SEED, other options alike")
    if options.json:
        options.json.write_text(json.dumps({"counts": counts, "found": found}, indent=1))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
