"""``tf-amp demo``: the same real training in float32 and in mixed precision, side by side."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tf_amp import autoload
from tf_amp.cli.numbers import count
from tf_amp.cli.options import add_options, chosen_variables
from tf_amp.env_config import check_environment
from tf_amp.env_variables import ENABLING_VARIABLES, IGNORE_PERFORMANCE
from tf_amp.terminal import Tell, progress_bar
from tf_amp.tool_error import ToolError

_TRAINING = "tf_amp.cli.demo_training"
_REQUIREMENTS = {"tensorflow": "tensorflow", "keras": "keras", "sklearn": "scikit-learn"}


@dataclass(frozen=True)
class Training:
    """What one training printed.

    Attributes:
        losses: The training loss of each epoch.
        accuracy: On the test images, 0..1.
        step_seconds: The median time of a step, without the first epoch.
        status: `tf_amp.status()` at the end.
        messages: The lines that tf_amp logged.
    """

    losses: tuple[float, ...]
    accuracy: float
    step_seconds: float
    status: Mapping[str, Any]
    messages: tuple[str, ...] = ()


def add_parser(commands: Any) -> None:
    """Adds the command to the sub-parsers of ``tf-amp``."""
    parser = commands.add_parser(
        "demo",
        help="train a small CNN on real digits in float32 and in mixed precision",
        description="Trains a small CNN on scikit-learn's 1,797 digits in float32 and in mixed "
        "precision, in turns, and compares accuracy, loss curves and step times.",
    )
    add_options(parser)
    at_least_2 = functools.partial(count, least=2)
    parser.add_argument("--epochs", type=at_least_2, default=8, help="per training (8)")
    parser.add_argument("--rounds", type=at_least_2, default=2, help="trainings of each kind (2)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo.

    Args:
        arguments: Parsed arguments.

    Returns:
        0; 1 if a package is missing or a training failed.

    Raises:
        EnvConfigError: A variable holds an illegal value.
    """
    missing = [name for name in _REQUIREMENTS if importlib.util.find_spec(name) is None]
    if missing:
        packages = " ".join(_REQUIREMENTS[name] for name in missing)
        raise ToolError(
            f"it needs {', '.join(missing)}, which this Python cannot import. "
            f"Remedy: {sys.executable} -m pip install {packages}"
        )
    low = {**os.environ, **chosen_variables(arguments)}
    low.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    check_environment(low)
    plan = _plan(low)
    fast = plan["target_dtype"] is not None
    if not fast:
        print(f"Note: {plan['reason']}")
        print("The demo sets that. Expect mixed precision to be SLOWER than float32 here.")
        low[IGNORE_PERFORMANCE] = "1"
        plan = _plan(low)
    # Emulated bfloat16 can be 20 times slower: a narrower network keeps the demo short there.
    width = 64 if fast else 16
    print(f"Digits CNN, {arguments.rounds} x float32 and AMP in turns. AMP: {plan['reason']}.")
    full = {name: value for name, value in low.items() if name not in ENABLING_VARIABLES}
    training = ("-m", _TRAINING)
    low_training: tuple[str, ...] = training
    if autoload.pth_path() is None:
        print("No .pth file is installed, so the launcher `tf-amp run` switches AMP on.")
        low_training = ("-m", "tf_amp.cli.main", "run", *training)
    baseline, mixed = [], []
    with progress_bar(2 * arguments.rounds * arguments.epochs) as tell:
        for seed in range(arguments.rounds):
            chosen = (str(seed), str(arguments.epochs), str(width))
            baseline.append(_train((*training, *chosen), full, "float32", tell))
            mixed.append(_train((*low_training, *chosen), low, "AMP", tell))
    print(comparison(baseline, mixed))
    return 0


def _plan(environ: Mapping[str, str]) -> dict[str, Any]:
    """Asks another process what the settings lead to: this one stays free of TensorFlow."""
    command = [sys.executable, "-m", "tf_amp.cli.main", "env", "--json"]
    done = subprocess.run(command, env={**environ}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError(f"the settings could not be read.\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout))


def _train(
    arguments: tuple[str, ...], environ: Mapping[str, str], what: str, tell: Tell
) -> Training:
    tell(what, 0)
    losses = []
    result: dict[str, Any] = {}
    # A file, because a pipe that nobody reads would block a training that warns a lot.
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        with subprocess.Popen(
            [sys.executable, *arguments],
            env={**environ},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    result = json.loads(line)
                    if "loss" in result:
                        losses.append(result["loss"])
                        tell(f"{what}, loss {result['loss']:.4f}", 1)
        errors.seek(0)
        said = errors.readlines()
    if process.returncode or "accuracy" not in result:
        raise ToolError(
            f"a training ended with status {process.returncode}. Its last lines:\n"
            + "".join(said[-25:])
        )
    return Training(
        tuple(losses),
        result["accuracy"],
        result["step_seconds"],
        result["status"],
        messages=tuple(line.rstrip() for line in said if line.startswith("tf_amp")),
    )


def comparison(baseline: list[Training], mixed: list[Training]) -> str:
    """Compares trainings pairwise.

    Args:
        baseline: Trainings in float32, each with a seed of its own; at least two.
        mixed: Trainings in mixed precision with the same seeds.

    Returns:
        A text of a few lines. The distance of two loss curves is the largest difference of any
        epoch; two seeds of float32 show how much of it is chance.
    """
    pairs = list(zip(baseline, mixed, strict=True))
    gap = max(_distance(full, low) for full, low in pairs)
    chance = max(_distance(baseline[0], other) for other in baseline[1:])
    ratios = [full.step_seconds / low.step_seconds for full, low in pairs]
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    status = mixed[-1].status
    lines = [
        f"{'':24}{'float32':>12}{'AMP':>12}",
        _row("test accuracy (mean)", [_mean_accuracy(baseline), _mean_accuracy(mixed)], ".4f"),
        _row("last loss (mean)", [_mean_loss(baseline), _mean_loss(mixed)], ".4f"),
        _row("step, ms (median)", [1e3 * _step(baseline), 1e3 * _step(mixed)], ".2f"),
        f"step-time ratio         {statistics.median(ratios):.2f}x ({each}; float32 / AMP)",
        f"loss curves             at most {gap:.4f} apart (two float32 seeds: {chance:.4f})",
        f"graphs rewritten        {status.get('graphs_rewritten', 0)}",
        f"nodes converted         {status.get('nodes_converted', 0)}",
        f"casts inserted          {status.get('casts', 0)}",
    ]
    if not status.get("nodes_converted"):
        lines.append(f"WARNING: AMP was asked for but nothing was converted: {status.get('why')}")
    lines += ["what AMP said:", *(f"  {message}" for message in mixed[-1].messages)]
    return "\n".join(lines)


def _row(title: str, values: list[float], form: str) -> str:
    return f"{title:24}" + "".join(f"{value:>12{form}}" for value in values)


def _distance(one: Training, other: Training) -> float:
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def _mean_accuracy(trainings: list[Training]) -> float:
    return statistics.fmean(training.accuracy for training in trainings)


def _mean_loss(trainings: list[Training]) -> float:
    return statistics.fmean(training.losses[-1] for training in trainings)


def _step(trainings: list[Training]) -> float:
    return statistics.median(training.step_seconds for training in trainings)
