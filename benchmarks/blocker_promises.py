"""What `tf-amp explain` promises of a blocker, beside what moving it really gives.

    python benchmarks/blocker_promises.py
    python benchmarks/blocker_promises.py --programs lstm_ctc --keep traces

A program makes one training step with a trace. Of what blocks most in it, each of the first few is
moved as its printed line says, by the variable, in a further process that makes the same step; and
the figures of its trace are set beside the promise. Ends with an error where they differ.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from results import RESULTS, print_table, write_json
from variants import DTYPES, environment, prepare

_LOG_PATH = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LOG_PATH"
_FIGURES = ("products", "flops", "casts", "cast_bytes")


def _keras(name: str) -> None:
    from workloads import WORKLOADS

    model, (x, y) = WORKLOADS[name].compiled(jit_compile=False)
    model.train_on_batch(x, y)


def _lstm_ctc(
    batch: int = 16, length: int = 200, features: int = 80, width: int = 256, symbols: int = 29
) -> None:
    """Speech recognition: two bidirectional LSTMs under connectionist temporal classification."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((length, features))
    for _ in range(2):
        lstm = keras.layers.LSTM(width, return_sequences=True)
        x = keras.layers.Bidirectional(lstm)(x)
    model = keras.Model(inputs, keras.layers.Dense(symbols)(x))
    model.compile("adam", keras.losses.CTC(), jit_compile=False)
    rng = np.random.default_rng(0)
    sound = rng.standard_normal((batch, length, features), dtype=np.float32)
    model.train_on_batch(sound, rng.integers(1, symbols, (batch, 20)))


def _v1(name: str) -> None:
    import tensorflow as tf
    from v1_workloads import WORKLOADS

    v1 = tf.compat.v1
    v1.disable_v2_behavior()
    workload = WORKLOADS[name]()
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        session.run([workload.train_op, workload.loss], workload.batch(0))


PROGRAMS: dict[str, Callable[[], None]] = {
    "resnet50": lambda: _keras("resnet50"),
    "encoder": lambda: _keras("encoder"),
    "lstm_ctc": _lstm_ctc,
    "v1_lstm": lambda: _v1("lstm"),
    "v1_resnet": lambda: _v1("resnet"),
}


def _trace(program: str, dtype: str, folder: Path, more: Mapping[str, str]) -> Any:
    """Has a program make its step in a process of its own; returns its trace."""
    from tf_amp.tracing.trace import read_traces

    env = {**environment("tf_amp", dtype), _LOG_PATH: str(folder), **more}
    command = [sys.executable, __file__, "--worker", program, "--dtypes", dtype]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{program} failed:\n{done.stderr[-4000:]}")
    (trace,) = read_traces(folder)
    return trace


def _figures(trace: Any) -> Any:
    from tf_amp.tracing.figures import figures_of

    graphs = [graph.remarks for graph in trace.graphs]
    return figures_of(g for g in graphs if any(r.is_product for r in g.remarks))


def compare(program: str, dtype: str, folder: Path, top: int) -> list[dict[str, Any]]:
    """Sets the promises of one program beside what is found.

    Args:
        program: one of `PROGRAMS`.
        dtype: the target dtype; for float16 there is no cost table on a CPU.
        folder: where its traces go.
        top: how many blockers are moved.

    Returns:
        For each blocker its name, line, and figure -> what was promised and found.
    """
    from tf_amp.tracing.blockers import find_blockers

    trace = _trace(program, dtype, folder / "as_it_is", {})
    now = _figures(trace)
    rows = []
    for number, blocker in enumerate(find_blockers(trace.graphs).found[:top]):
        line = blocker.change.line(trace.process["variables"])
        variable, _, value = line.removeprefix("export ").partition("=")
        then = _figures(_trace(program, dtype, folder / str(number), {variable: value}))
        found = {
            "products": then.products_low - now.products_low,
            "flops": then.flops_low - now.flops_low,
            "casts": then.casts - now.casts,
            "cast_bytes": then.cast_bytes - now.cast_bytes,
        }
        row: dict[str, Any] = {"blocker": blocker.change.what, "line": line}
        row |= {figure: (getattr(blocker, figure), found[figure]) for figure in _FIGURES}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--top", type=int, default=5, help="blockers that are moved (5)")
    parser.add_argument("--keep", type=Path, help="where the traces stay")
    parser.add_argument("--json", type=Path, default=RESULTS / "blocker_promises.json")
    parser.add_argument("--worker", choices=PROGRAMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        prepare("tf_amp", *options.dtypes)
        return PROGRAMS[options.worker]()
    with tempfile.TemporaryDirectory() as temporary:
        found = {
            f"{program} {dtype}": compare(
                program, dtype, (options.keep or Path(temporary)) / program / dtype, options.top
            )
            for program in options.programs
            for dtype in options.dtypes
        }
    cells = [
        [program, row["blocker"], *(f"{row[f][0]} / {row[f][1]}" for f in _FIGURES)]
        for program, rows in found.items()
        for row in rows
    ]
    print_table(["program", "blocker", *(f"{f}, promised / found" for f in _FIGURES)], cells)
    write_json(options.json, {"promises": found})
    rows = [row for rows in found.values() for row in rows]
    if any(row[figure][0] != row[figure][1] for row in rows for figure in _FIGURES):
        raise SystemExit("What was found differs from what was promised.")
    return None


if __name__ == "__main__":
    main()
