"""What an optimizer's update takes as the library writes it, and as one op (rule fused-update).

    python benchmarks/fused_updates.py
    python benchmarks/fused_updates.py --variables 4 --rounds 15
    python benchmarks/fused_updates.py --variables 4 --size 3000 --rows 64

Twelve variables of 2048 x 2048, 50 million numbers, are updated with gradients that are there
already; with `--rows` they are of so many rows of each, as of embeddings, of which the rule takes
up to an eighth. Two processes, with the rule and without it, run one update each in turn. Beside
the time of the clock is that of the processor, all threads added up, which other programs disturb
less. The ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results import RESULTS, print_table, spread, write_json
from variants import environment, prepare
from worker_channel import Message, Worker, serve

_RULES_DISABLE = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_RULES_DISABLE"
_WARM_UP = 2
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam": ("Adam", {}),
    "AdamW": ("AdamW", {}),
    "SGD": ("SGD", {}),
    "SGD, momentum": ("SGD", {"momentum": 0.9}),
    "SGD, Nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "RMSprop, momentum": ("RMSprop", {"momentum": 0.9}),
    "RMSprop, centred": ("RMSprop", {"momentum": 0.9, "centered": True}),
}
_BY_ROWS = ("Adam", "AdamW")


class _Updater:
    """Runs the updates of one optimizer after another."""

    def __init__(self, variables: int, size: int, rows: int) -> None:
        prepare("tf_amp")
        self._shapes, self._rows = [(size, size)] * variables, rows
        self._step: Callable[[], Any] | None = None

    def handle(self, request: Message) -> Message:
        """Makes an optimizer of a library, or runs one update."""
        if "optimizer" in request:
            self._step = self._make(request["library"], *OPTIMIZERS[request["optimizer"]])
            for _ in range(_WARM_UP):
                self._step()
            return {}
        if self._step is None:
            raise RuntimeError("Asked to run before an optimizer was made.")
        clock, processor = time.perf_counter(), time.process_time()
        self._step()
        return {
            "clock": time.perf_counter() - clock,
            "processor": time.process_time() - processor,
        }

    def _make(self, library: str, name: str, options: dict[str, Any]) -> Callable[[], Any]:
        import importlib

        import tensorflow as tf

        module = importlib.import_module(library)
        make = tf.Variable if library == "tf_keras" else module.Variable
        held = [make(tf.random.normal(shape)) for shape in self._shapes]
        gradients = [self._gradient(shape) for shape in self._shapes]
        optimizer = getattr(module.optimizers, name)(**options)
        optimizer.build(held)

        def of(given: Any, variable: Any) -> Any:
            # The size of the table is known where its rows were gathered.
            return tf.IndexedSlices(*given, variable.shape) if self._rows else given

        @tf.function(autograph=False)
        def step(*given: Any) -> None:
            gradients = map(of, given, held)
            optimizer.apply_gradients(zip(gradients, held, strict=True))

        return lambda: step(*gradients)

    def _gradient(self, shape: tuple[int, int]) -> Any:
        import tensorflow as tf

        if not self._rows:
            return tf.random.normal(shape)
        indices = tf.random.uniform((self._rows,), maxval=shape[0], dtype=tf.int32)
        return tf.random.normal((self._rows, shape[1])), indices


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variables", type=int, default=12)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=0, help="0: gradients are dense")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=RESULTS / "fused_updates.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(_Updater(options.variables, options.size, options.rows).handle)
        return
    numbers = {name: str(getattr(options, name)) for name in ("variables", "size", "rows")}
    sizes = [part for name, number in numbers.items() for part in (f"--{name}", number)]
    env = environment("tf_amp")
    envs = {"one op": env, "as written": {**env, _RULES_DISABLE: "fused-update"}}
    workers = {name: Worker([__file__, "--worker", *sizes], e) for name, e in envs.items()}
    results, rows = [], []
    try:
        for library in ("keras", "tf_keras"):
            for optimizer in _BY_ROWS if options.rows else OPTIMIZERS:
                entry, row = _measure(workers, library, optimizer, options.rounds)
                results.append({"library": library, "optimizer": optimizer, **entry})
                rows.append([library, optimizer, *row])
                print(f"\r\033[K{library} {optimizer}", end="", file=sys.stderr, flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    print("\r\033[K", end="", file=sys.stderr)
    headers = ["library", "optimizer", "as written, ms", "one op, ms", "ratio"]
    print_table([*headers, "processor: as written", "one op", "ratio"], rows)
    write_json(options.json, {"results": results})


def _measure(
    workers: dict[str, Worker], library: str, optimizer: str, rounds: int
) -> tuple[dict[str, Any], list[str]]:
    for worker in workers.values():
        worker.ask(library=library, optimizer=optimizer)
    taken: dict[str, list[Message]] = {name: [] for name in workers}
    for number in range(rounds):
        for name in list(workers) if number % 2 else reversed(list(workers)):
            taken[name].append(workers[name].ask())
    entry: dict[str, Any] = {}
    row = []
    for kind in ("clock", "processor"):
        times = {name: [each[kind] for each in found] for name, found in taken.items()}
        pairs = zip(times["as written"], times["one op"], strict=True)
        entry[kind] = {name: spread(values) for name, values in times.items()}
        entry[kind]["ratio"] = ratio = statistics.median(a / b for a, b in pairs)
        medians = (statistics.median(times[name]) * 1e3 for name in ("as written", "one op"))
        row += [*(f"{median:.0f}" for median in medians), f"{ratio:.2f}x"]
    return entry, row


if __name__ == "__main__":
    main()
