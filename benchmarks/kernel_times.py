"""Where the time of a step goes: kernel time by op, for each variant of a workload.

    python benchmarks/kernel_times.py --workloads bert_base gpt2_small vit_base
    python benchmarks/kernel_times.py --workloads mlp --disable ones-product

TensorFlow's own profiler notes every kernel of a few steps, after some to warm up. An op's time is
the sum over its kernels, so that ops that run beside one another count in full, and kernels that
share the cores are longer than alone. With --disable, a further variant is tf_amp without a rule.
The variants run one after another, each in a process of its own.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from results import RESULTS, print_table, write_json
from step_time import WORKER, WORKLOAD_NAMES
from step_worker import MODES
from variants import FLOAT32, VARIANTS, environment, variants_for
from worker_channel import Worker

_RULES_DISABLE = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_RULES_DISABLE"


def kernel_times(
    workload: str, mode: str, variant: str, dtype: str, disable: str, steps: int
) -> Counter[str]:
    """Milliseconds of kernel time a step by op type, of one variant of a workload.

    Args:
        workload: one of `WORKLOAD_NAMES`.
        mode: "training" or "inference".
        variant: one of `VARIANTS`.
        dtype: the target dtype, or `FLOAT32`.
        disable: a rule of tf_amp to leave out; "" for none.
        steps: the number of steps that are profiled.
    """
    env = environment(variant, dtype)
    if disable:
        env[_RULES_DISABLE] = disable
    asked = {"workload": workload, "variant": variant, "mode": mode, "dtype": dtype}
    options = [part for name, value in asked.items() for part in (f"--{name}", value)]
    worker = Worker([WORKER, *options], env)
    try:
        worker.ask(do="start")
        return Counter(worker.ask(do="profile", steps=steps)["kernel_ms"])
    finally:
        worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOAD_NAMES, default=WORKLOAD_NAMES)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="(all that fit the dtype)")
    parser.add_argument("--dtype", choices=("bfloat16", FLOAT32), default="bfloat16")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["training"])
    parser.add_argument("--disable", nargs="*", default=[], help="rules, each left out by itself")
    parser.add_argument("--steps", type=int, default=5, help="steps that are profiled (5)")
    parser.add_argument("--top", type=int, default=20, help="ops in the table (20)")
    parser.add_argument("--json", type=Path, default=RESULTS / "kernel_times.json")
    options = parser.parse_args()
    payload: dict[str, Any] = {}
    columns = [(variant, "") for variant in options.variants or variants_for(options.dtype)]
    columns += [("tf_amp", rule) for rule in options.disable]
    for workload in options.workloads:
        for mode in options.modes:
            found = {
                f"{variant} without {rule}" if rule else variant: kernel_times(
                    workload, mode, variant, options.dtype, rule, options.steps
                )
                for variant, rule in columns
            }
            payload[f"{workload} {mode}"] = found
            peak: Counter[str] = Counter()
            for times in found.values():
                peak |= times
            rows = [
                [op, *(f"{times[op]:.1f}" for times in found.values())]
                for op, _ in peak.most_common(options.top)
            ]
            rows.append(["all ops", *(f"{times.total():.1f}" for times in found.values())])
            print(f"\n{workload} {mode}: ms of kernel time a step")
            print_table(["op", *found], rows)
    write_json(options.json, payload)


if __name__ == "__main__":
    main()
