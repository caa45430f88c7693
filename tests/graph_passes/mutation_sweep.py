"""Many mutations, run by hand: which promise each breaks, counted over programs.

    python tests/graph_passes/mutation_sweep.py --seconds 600 --json findings.json

Each case is one program of `unit_programs`, in one form, with one mutation (a minimal example as
it is), rewritten for one dtype and device.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Modules of all tests, which pytest finds by itself; the packages, of the same names, come first.
sys.path += map(str, Path(__file__).resolve().parents[2:0:-1])

from mutation_cases import CONFIGS, Case, choices, run_case
from mutations import KINDS, Mutation
from rewrite_checks import BrokenPromiseError
from unit_programs import HAND_WRITTEN, NAMES, Options

PLACES = ("",) * 8 + ("called", "function")


def random_case(rng: random.Random, names: list[str]) -> Case:
    """A case of one mutation, half of them of programs in their plain form."""
    name = rng.choice(names)
    options = Options()
    if name in HAND_WRITTEN and rng.random() < 0.5:
        options = Options(
            rng.choice((0, 1, 4)),
            rng.choice(("float32",) * 3 + ("float16", "float64")),
            rng.random() < 0.5,
        )
    config = rng.choice(list(CONFIGS))
    node = rng.choice(choices(name, options, config))
    mutation = Mutation(rng.choice(list(KINDS)), node, rng.randrange(100))
    made = () if rng.random() < 0.1 else (mutation,)
    return Case(name, options, made, config, rng.choice(PLACES))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rng, end = random.Random(options.seed), time.monotonic() + options.seconds
    counts: Counter[str] = Counter()
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    while time.monotonic() < end:
        case = random_case(rng, list(options.programs))
        try:
            counts[run_case(case)] += 1
        except BrokenPromiseError as broken:
            counts["broken"] += 1
            kind = case.mutations[0].kind if case.mutations else "none"
            key = (broken.what, case.program, kind)
            entry = {"case": str(case), "why": str(broken)}
            found.setdefault(key, []).append(entry)
            if len(found[key]) == 1:
                print(f"{key}: {entry}", file=sys.stderr, flush=True)
    for _, entries in sorted(found.items()):
        print(f"{len(entries):4} {entries[0]['case']}\n     {entries[0]['why'][:240]}")
    print(dict(counts))
    if options.json:
        payload = {" | ".join(key): entries for key, entries in found.items()}
        options.json.write_text(json.dumps({"counts": counts, "found": payload}, indent=1))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
