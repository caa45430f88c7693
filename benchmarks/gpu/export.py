"""Exports the steps of all workloads as HLO, for `run.py` on a machine with a GPU.

    cd benchmarks
    python -m gpu.export results/gpu_small --small
    python -m gpu.export results/gpu_full
    python -m gpu.export results/gpu_full --workloads encoder --without layer-norm attention-mask

Each workload and variant has a process of its own: float32, tf_amp, Keras' policies and
TensorFlow's own pass, in float16 and bfloat16, training and inference. Nothing here needs a GPU:
tf_amp plans for one, and so does TensorFlow's pass for float16. Weights do not travel, but a rule
by which both machines make the same ones; what the first step gives here does, as digests.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from oracle_environment import oracle_environment
from parity_tasks import TASK_NAMES
from variants import environment

from gpu.program import MODES, VARIANTS

WORKLOADS = ("resnet50", "mobilenetv2", "unet", "encoder", "gpt2_small", "lstm", "mlp")
_FOLDER = Path(__file__).resolve().parents[1]
_MOST_MIB = 64


def export(workload: str, title: str, options: argparse.Namespace) -> bool:
    """Exports one workload in one variant; returns whether all of it could be."""
    name, _, rule = title.partition("-")
    variant, _, dtype = name.rpartition("_") if name != "float32" else (name, "", "float16")
    # The log of the oracle is of no use here.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_CPP_VMODULE": ""}
    env = (
        oracle_environment(dtype) | quiet if variant == "upstream" else environment(variant, dtype)
    )
    if rule:
        env["TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_RULES_DISABLE"] = rule
    if options.cost_table and variant == "tf_amp":
        env["TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_COST_TABLE"] = str(options.cost_table.resolve())
    command = [sys.executable, "-m", "gpu.export_worker", str(options.folder.resolve())]
    command += ["--workload", workload, "--variant", variant, "--dtype", dtype, "--title", title]
    command += ["--modes", *options.modes]
    command += ["--small"] if options.small else []
    if options.numerics:
        command += ["--steps", str(options.steps), "--seeds", str(options.seeds)]
    with_reference = {"none": False, "own": True, "float32": name == "float32"}
    command += ["--reference"] if with_reference[options.references] else []
    done = subprocess.run(command, env=env, cwd=_FOLDER, capture_output=True, text=True)
    sys.stdout.write(done.stdout)
    sys.stdout.flush()
    if done.returncode:
        sys.stderr.write(done.stderr[-4000:])
    return not done.returncode and "FAILED" not in done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the programs are written")
    parser.add_argument("--workloads", nargs="+", choices=(*WORKLOADS, *TASK_NAMES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--small", action="store_true", help="the tiny networks")
    parser.add_argument(
        "--references",
        choices=("own", "float32", "none"),
        help="which variants are run here, on the CPU (own with --small, else none: a step of full "
        "size takes minutes and up to 20 GB)",
    )
    parser.add_argument(
        "--without",
        nargs="+",
        metavar="RULE",
        default=[],
        help="float32 and tf_amp's variants alone, those with each of these rules left out as well",
    )
    parser.add_argument(
        "--numerics", action="store_true", help="the two tasks of `gpu.numerics`, with their data"
    )
    parser.add_argument("--steps", type=int, default=300, help="training steps of a task (300)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of a task (3)")
    parser.add_argument("--cost-table", type=Path, help="for tf_amp, made by `gpu.cost_table`")
    options = parser.parse_args()
    options.references = options.references or ("own" if options.small else "none")
    named = TASK_NAMES if options.numerics else WORKLOADS
    options.workloads = options.workloads or named
    if unknown := set(options.workloads) - set(named):
        parser.error(f"{', '.join(sorted(unknown))}: tasks need --numerics, and it needs tasks")
    options.folder.mkdir(parents=True, exist_ok=True)
    left_out = "upstream" if options.numerics else "none"
    titles = options.variants or [v for v in VARIANTS if not v.startswith(left_out)]
    if options.without:
        rewrites = [title for title in titles if title.startswith("tf_amp")]
        without = [f"{title}-{rule}" for title in rewrites for rule in options.without]
        titles = ["float32", *rewrites, *without]
    failed = [
        f"{workload} {title}"
        for workload in options.workloads
        for title in titles
        if not export(workload, title, options)
    ]
    size = sum(path.stat().st_size for path in options.folder.iterdir()) / 2**20
    print(f"\n{options.folder}: {size:.1f} MiB" + (f", failed: {failed}" if failed else ""))
    if size > _MOST_MIB:
        sys.exit(f"More than {_MOST_MIB} MiB cannot travel at once: export fewer workloads.")
    # What XLA refuses of TensorFlow's own pass is a finding, not a fault of the export.
    sys.exit(any("upstream" not in name for name in failed))


if __name__ == "__main__":
    main()
