"""What the loss-scale manager costs per training step, beside Keras 3's LossScaleOptimizer.

One command, for example `python benchmarks/loss_scale_cost.py --json cost.json`. For two models and
with XLA on and off, four node_types of step are compiled in one process: without a loss scale, with
Keras 3's optimizer, with tf_amp's, and with tf_amp's at a static scale that checks no gradient.
They are run in turn, round after round, so that a change in the machine's load meets all of them.
The table gives the median time of a step and, for each scale, the ratio to the step without one:
the median over the rounds, with the smallest and the largest. The last column is tf_amp's time by
Keras's, round by round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import keras
import numpy as np
import tensorflow as tf

from tf_amp.loss_scale import StaticLossScale, wrap_optimizer

# Name -> (layers, width, batch): many small variables, where a step is mostly overhead; and few
# large ones, where it is mostly arithmetic.
MODELS = {"16 layers of 64": (16, 64, 32), "4 layers of 512": (4, 512, 64)}
KINDS: dict[str, Callable[[Any], Any]] = {
    "no scale": lambda optimizer: optimizer,
    "Keras 3": keras.optimizers.LossScaleOptimizer,
    "tf_amp": wrap_optimizer,
    "tf_amp, static, unchecked": lambda optimizer: wrap_optimizer(
        optimizer, StaticLossScale(2.0**10, skip_non_finite=False)
    ),
}

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio of two times, over the rounds.

    Attributes:
        median: The median over the rounds.
        smallest: The smallest.
        largest: The largest.
    """

    median: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
        """The ratios of two series of times that were taken in the same rounds."""
        ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.smallest:.3f}, {self.largest:.3f}]"


def make_step(kind: str, model: str, *, xla: bool) -> Callable[[], Any]:
    """A compiled training step, run until it is warm."""
    layers, width, batch = MODELS[model]
    keras.utils.set_random_seed(0)
    network = keras.Sequential(
        [keras.layers.Input((width,)), *(keras.layers.Dense(width, "relu") for _ in range(layers))]
    )
    optimizer = KINDS[kind](keras.optimizers.Adam(1e-4))
    optimizer.build(network.trainable_variables)
    data = tf.constant(np.random.default_rng(0).normal(size=(batch, width)).astype(np.float32))
    tensors = [variable.value for variable in network.trainable_variables]

    @tf.function(jit_compile=xla)
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((network(data, training=True) - data) ** 2)
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, tensors), network.trainable_variables)
        return loss

    for _ in range(3):
        step()
    return step


def time_of(step: Callable[[], Any], steps: int, clock: Callable[[], float]) -> float:
    """Seconds per step; reading the last loss waits for the device."""
    start = clock()
    for _ in range(steps):
        loss = step()
    float(loss)
    return (clock() - start) / steps


def measure(model: str, *, xla: bool, rounds: int, steps: int, clock: str) -> dict[str, Any]:
    """Times all node_types of step in turn."""
    made = {kind: make_step(kind, model, xla=xla) for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for round_ in range(rounds):
        # Another one goes first in each round.
        order = list(KINDS)[round_ % len(KINDS) :] + list(KINDS)[: round_ % len(KINDS)]
        for kind in order:
            times[kind].append(time_of(made[kind], steps, CLOCKS[clock]))
    return {
        "model": model,
        "xla": xla,
        "milliseconds": {kind: statistics.median(t) * 1e3 for kind, t in times.items()},
        "by_no_scale": {
            kind: dataclasses.asdict(Ratio.of(t, times["no scale"])) for kind, t in times.items()
        },
        "tf_amp_by_keras": dataclasses.asdict(Ratio.of(times["tf_amp"], times["Keras 3"])),
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as text."""
    lines = [f"{'model':18} {'XLA':4} {'step with':26} {'ms':>8}  by no scale          by Keras 3"]
    for result in results:
        for kind in KINDS:
            ratio = Ratio(**result["by_no_scale"][kind])
            by_keras = Ratio(**result["tf_amp_by_keras"]) if kind == "tf_amp" else ""
            lines.append(
                f"{result['model']:18} {'yes' if result['xla'] else 'no':4} {kind:26} "
                f"{result['milliseconds'][kind]:8.3f}  {ratio!s:20} {by_keras!s}".rstrip()
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="at least 7; default 9")
    parser.add_argument("--steps", type=int, default=20, help="steps per round; default 20")
    parser.add_argument(
        "--clock",
        choices=sorted(CLOCKS),
        default="wall",
        help="wall time (default), or processor time, for a CPU that others use as well",
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    if arguments.rounds < 7:
        parser.error(f"--rounds must be at least 7. Received: {arguments.rounds}")
    results = [
        measure(
            model, xla=xla, rounds=arguments.rounds, steps=arguments.steps, clock=arguments.clock
        )
        for model in MODELS
        for xla in (False, True)
    ]
    text = table(results)
    sys.stdout.write(text + "\n")
    if arguments.json:
        environment = {
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "devices": [device.name for device in tf.config.list_logical_devices()],
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "rounds": arguments.rounds,
            "steps": arguments.steps,
            "clock": arguments.clock,
        }
        arguments.json.write_text(
            json.dumps({"environment": environment, "results": results}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
