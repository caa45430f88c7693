"""``tf-amp tune``: measures the costs of kernels and Casts on this machine and keeps them."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tf_amp import autoload
from tf_amp.cost_tables import cached_table_path, device_class
from tf_amp.env_config import read_settings
from tf_amp.env_variables import COST_TABLE


def add_parser(commands: Any) -> None:
    """Adds the command to the sub-parsers of ``tf-amp``."""
    parser = commands.add_parser(
        "tune",
        help="measure what is fast on this machine, in one to two minutes",
        description="Measures kernels and casts in float32 and in the target dtype. From then on "
        "what is slower in the target dtype on this machine stays float32. Leave the machine "
        "alone meanwhile.",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the table there, not to the user's cache"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="ROW", help='rows to measure, such as "Relu" (default: all)'
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures the table and writes it.

    Args:
        arguments: Parsed arguments.

    Returns:
        0; 1 if nothing is rewritten on this hardware, a row is unknown or the file cannot be
        written.

    Raises:
        EnvConfigError: A variable holds an illegal value.
    """
    if arguments.only and arguments.output is None:
        print(
            "tf-amp tune: --only needs --output: a table of a few rows must not replace the whole "
            "one in the user's cache.",
            file=sys.stderr,
        )
        return 1
    settings = read_settings()
    # What is measured must not be rewritten itself.
    autoload.deactivate()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tf_amp.hardware import choose_target

    target = choose_target(settings)
    if target.target_dtype is None:
        print(f"tf-amp tune: there is nothing to measure. {target.reason}", file=sys.stderr)
        return 1
    from graph_passes.costs import format_table
    from tf_amp.tuning import chosen_probes, measure_table

    try:
        probes = chosen_probes(arguments.only)
    except ValueError as error:
        print(f"tf-amp tune: {error}", file=sys.stderr)
        return 1
    name = device_class(target)
    path = arguments.output or cached_table_path(name, target.target_dtype)
    # The Casts are one more thing to measure.
    with tqdm(total=len(probes) + 1, unit="op") as bar:

        def on_probe(key: str) -> None:
            bar.set_description(key)
            bar.update()

        table = measure_table(
            name, target.device, target.target_dtype, only=arguments.only, on_probe=on_probe
        )
    try:
        _write(path, format_table(table))
    except OSError as error:
        print(
            f"tf-amp tune: {str(path)!r} could not be written: {error}. Choose another file with "
            "--output.",
            file=sys.stderr,
        )
        return 1
    slower = sum(cost.low.seconds[-1] > cost.float32.seconds[-1] for _, cost in table.rows)
    print(f"Measured {len(table.rows)} ops on {table.measured_on}: {slower} of them are slower in")
    print(f"{target.target_dtype} than in float32 at their largest size. Written to {path}")
    if arguments.output is not None:
        print(f"To use it, set {COST_TABLE}={path}")
    return 0


def _write(path: Path, text: str) -> None:
    """Writes a file in one go: a program that starts meanwhile must not read half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, suffix=".new", delete=False
    ) as file:
        file.write(text)
    os.replace(file.name, path)
