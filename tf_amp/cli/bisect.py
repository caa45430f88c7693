"""``tf-amp bisect``: finds the conversion that breaks a program, without looking at a value."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_amp.cli import programs
from tf_amp.cli.numbers import amount
from tf_amp.env_variables import ENABLE, ENABLE_GRAPH_REWRITE, RULES
from tf_amp.terminal import say
from tf_amp.tool_error import ToolError, WrongCallError
from tf_amp.whole_files import write_whole

if TYPE_CHECKING:
    from tf_amp.tracing.bisection import Found

_RULES = "tf_amp_rules.toml"


def add_parser(commands: Any) -> None:
    """Adds the command to the sub-parsers of ``tf-amp``."""
    parser = commands.add_parser(
        "bisect",
        help="find the conversion that breaks a program",
        description="Runs a program with more and fewer conversions until the one is found with "
        "which it fails: about log2 of their number runs. The program must do the same in each "
        "run, so give it seeds. It names the node and the Python line that made it, and writes "
        "the rule that keeps it float32; if the program fails with that rule too, the next one "
        "is looked for.",
        usage="tf-amp bisect [options] -- python train.py [arguments]",
        epilog="Exit status: 0 if the program passes with the rules; 1 if it does not, or no "
        "conversion breaks it; 2 for a wrong call.",
    )
    parser.add_argument(
        "--check",
        metavar="'NAME < X'",
        help="what the last figure of that name in the output must be (also <=, >, >=); a run that "
        "ends with an error fails in any case, and is all that counts without this",
    )
    parser.add_argument(
        "--timeout", type=amount, metavar="SECONDS", help="a run that takes longer fails"
    )
    parser.add_argument(
        "--rules",
        type=Path,
        default=Path(_RULES),
        metavar="FILE",
        help=f"where the rule is written, behind those that are there (default: {_RULES})",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program, behind --")
    parser.set_defaults(run=run, needs_tensorflow=True)


def run(arguments: argparse.Namespace) -> int:
    """Finds the conversion and prints it."""
    command = programs.behind_dashes(arguments.command)
    if not command:
        raise WrongCallError("give the program behind --.")
    from tf_amp.tracing.bisection import BisectionError, Check, bisect

    try:
        check = Check.parse(arguments.check) if arguments.check else None
    except ValueError as error:
        raise WrongCallError(str(error)) from error

    printed: list[bool] = []  # of each run that ended well: whether the figure was there

    def passes(variables: Mapping[str, str]) -> bool:
        output = _output(command, variables, arguments.timeout)
        if output is None or check is None:
            return output is not None
        printed.append(bool(check.figures(output)))
        return check.holds(output)

    try:
        own = os.environ.get(RULES, "").strip()
        rules = Path(own).read_text(encoding="utf-8") if own else ""
        done = bisect(passes, say, rules=rules)
    except (BisectionError, OSError) as error:
        why = str(error)
        if check and printed and not any(printed):
            why += (
                f"\nNo run printed a figure {check.name!r}, so none could pass --check. Write it "
                f"as '{check.name}: 0.25' or '{check.name}=0.25'."
            )
        raise ToolError(why) from error
    for found in done.found:
        print("\n".join(_described(found)))
    print(f"{done.runs} runs")
    try:
        before = arguments.rules.read_bytes() if arguments.rules.exists() else b""
        write_whole(arguments.rules, before + b"\n" * bool(before) + done.rules.encode())
    except OSError as error:
        raise ToolError(f"these rules were not written: {error}\n\n{done.rules}") from error
    print(f"\nwritten to {arguments.rules}:\n\n{done.rules}", end="")
    if not done.passes:
        print("tf-amp bisect: with these rules the program still fails.", file=sys.stderr)
    return not done.passes


def _output(command: list[str], variables: Mapping[str, str], timeout: float | None) -> str | None:
    """What one run of a program prints; None if it fails or takes too long."""
    on = {} if os.environ.get(ENABLE_GRAPH_REWRITE, "").strip() else {ENABLE: "1"}
    child = programs.start(command, {**on, **variables}, subprocess.PIPE)
    try:
        output, _ = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        programs.stop(child)
        say(f"stopped after --timeout {timeout:g} seconds")
        return None
    except BaseException:
        programs.stop(child)
        raise
    return output if child.returncode == 0 else None


def _described(found: Found) -> list[str]:
    remark = found.remark
    what = f"the unit {remark.rule}" if remark.kind == "unit" else remark.op
    number = f"number {remark.number} of {found.total}"
    lines = [f"{what} {remark.node}, {number}, in {found.function}"]
    lines.extend(f"  at {line}" for line in remark.lines)
    return lines
