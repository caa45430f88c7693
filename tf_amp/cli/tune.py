"""``tf-amp tune``: measures the costs of kernels and Casts on this machine and keeps them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_amp.cost_tables import cached_table_path, table_class
from tf_amp.env_config import read_settings
from tf_amp.env_variables import COST_TABLE, IGNORE_PERFORMANCE
from tf_amp.terminal import progress_bar
from tf_amp.tool_error import ToolError, WrongCallError
from tf_amp.whole_files import write_whole

if TYPE_CHECKING:
    from graph_passes.policy.config import Device, TargetDtype
    from graph_passes.policy.cost_table import CostTable


def add_parser(commands: Any) -> None:
    """Adds the command to the sub-parsers of ``tf-amp``."""
    parser = commands.add_parser(
        "tune",
        help="measure what is fast on this machine, in one to two minutes",
        description="Measures kernels and casts in float32 and in the target dtype. From then on "
        "what is slower in the target dtype on this machine stays float32. On a CPU, functions "
        "that XLA compiles have a table of their own, which is measured as well. Leave the "
        "machine alone meanwhile.",
        epilog="Exit status: 0; 1 if nothing could be measured or written; 2 for a wrong call or "
        "setting.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the table there, not to the user's cache; with --xla that for XLA, else the "
        "other one",
    )
    parser.add_argument(
        "--xla", action="store_true", help="measure the table for functions that XLA compiles alone"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="ROW",
        help='rows to measure, such as "Relu", with --output (default: all)',
    )
    parser.set_defaults(run=run, needs_tensorflow=True)


def run(arguments: argparse.Namespace) -> int:
    """Measures the tables and writes them.

    Args:
        arguments: Parsed arguments.

    Returns:
        0; 1 if nothing is converted on this hardware or XLA has no table for it, a row is unknown
        or a file cannot be written; 2 for rows without a file.

    Raises:
        EnvConfigError: A variable holds an illegal value.
    """
    if arguments.only and arguments.output is None:
        raise WrongCallError(
            "--only needs --output: a table of a few rows must not replace the whole one in the "
            "user's cache."
        )
    settings = read_settings()
    from tf_amp.hardware import choose_target

    target = choose_target(settings)
    if target.target_dtype is None:
        raise ToolError(f"there is nothing to measure. {target.reason}")
    if arguments.xla and target.device != "CPU":
        raise ToolError(
            "--xla is for CPUs; on a GPU functions that XLA compiles have no table of their own. "
            "Leave it out."
        )
    from graph_passes.policy.cost_table_files import format_table, shipped_table

    both = target.device == "CPU" and arguments.output is None
    try:
        for compiled in (False, True) if both and not arguments.xla else (arguments.xla,):
            name = table_class(target, compiled=compiled)
            path = arguments.output or cached_table_path(name, target.target_dtype)
            table = _measure(name, target.device, target.target_dtype, arguments.only, compiled)
            shipped = shipped_table(name, target.target_dtype)
            if shipped is not None:  # networks tell these, which takes longer than a minute
                table = dataclasses.replace(
                    table, doubt=shipped.doubt, fused_tails=shipped.fused_tails
                )
            text = format_table(table)
            try:
                _write(path, text)
            except OSError:
                print(text)  # it took minutes to measure
                raise
            _tell(table, path)
    except (OSError, ValueError) as error:
        raise ToolError(str(error)) from error
    if arguments.output is not None:
        print(f"To use it, set {COST_TABLE}={arguments.output}")
    elif settings.ignore_performance:
        print(f"With {IGNORE_PERFORMANCE}=1 it counts only where {COST_TABLE} names it.")
    return 0


def _measure(
    name: str, device: Device, dtype: TargetDtype, only: Sequence[str] | None, compiled: bool
) -> CostTable:
    """Measures one table behind a progress bar.

    Raises:
        ValueError: a row is unknown.
    """
    from tf_amp.tuning import chosen_probes, measure_table

    # The Casts are one more thing to measure.
    with progress_bar(len(chosen_probes(only, compiled=compiled)) + 1) as tell:

        def on_probe(key: str) -> None:
            tell(f"XLA {key}" if compiled else key, 1)

        return measure_table(name, device, dtype, only=only, compiled=compiled, on_probe=on_probe)


def _tell(table: CostTable, path: Path) -> None:
    slower = sum(cost.low.seconds[-1] > cost.float32.seconds[-1] for _, cost in table.rows)
    print(
        f"Measured {len(table.rows)} ops{' under XLA' if table.compiled else ''} on "
        f"{table.measured_on}: {slower} of them are slower in {table.target_dtype} than in float32 "
        f"at their largest size. Written to {path}"
    )


def _write(path: Path, text: str) -> None:
    """Writes a file in one go: a program that starts meanwhile must not read half of it.

    Raises:
        OSError: it cannot be written; the message says what to do.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        raise OSError(
            f"{str(path)!r} could not be written: {error}. The table is on standard output: put it "
            f"into a file and set {COST_TABLE} to that, or choose another file with --output."
        ) from error
