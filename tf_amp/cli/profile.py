"""``tf-amp profile``: where the time of a program's steps goes, in float32 and in AMP."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_amp.cli import programs
from tf_amp.cli.numbers import amount, count
from tf_amp.cli.options import add_options, chosen_variables
from tf_amp.env_config import check_environment
from tf_amp.env_variables import ENABLE
from tf_amp.terminal import say, table
from tf_amp.tool_error import ToolError, WrongCallError

if TYPE_CHECKING:
    from tf_amp.profiling.profile import Costly, Profile, Steps

_NOTHING_REWRITTEN = (
    "nothing was rewritten: both columns are float32 and differ by chance. "
    f"`{ENABLE}=1 tf-amp env` tells whether this machine is the reason"
)
_SHOWN = 5
_POLL_SECONDS = 0.2


def add_parser(commands: Any) -> None:
    """Adds the command to the sub-parsers of ``tf-amp``."""
    parser = commands.add_parser(
        "profile",
        help="measure where the time of a program's steps goes, in float32 and in AMP",
        description="Runs a training program, unchanged, in float32 and in mixed precision, in "
        "turns, and stops each run after some calls of its training function: the first one whose "
        "graph holds gradients. Tells step time by class of op, what Casts cost, how much faster "
        "faster products can make a step at most, and what a step waits for its input: the "
        "program's own against one batch that is there already. The program must find its data "
        "again in each run, and what it has written to disk by then stays.",
        usage="tf-amp profile [options] -- python train.py [arguments]",
        epilog="Exit status: 0; 1 if the program could not be measured; 2 for a wrong call or "
        "setting.",
    )
    parser.add_argument(
        "--steps", type=count, default=10, help="steps timed, and profiled, in a run (default: 10)"
    )
    parser.add_argument(
        "--skip", type=count, default=5, help="steps that come before them (default: 5)"
    )
    parser.add_argument(
        "--rounds", type=count, default=2, help="runs of each of the two (default: 2)"
    )
    parser.add_argument(
        "--function",
        default="",
        metavar="NAME",
        help="the function to measure, or the session's fetch, by a part of its name; for a "
        "program that trains nothing, or that takes gradients outside of its functions",
    )
    parser.add_argument(
        "--timeout", type=amount, metavar="SECONDS", help="a run that takes longer is given up"
    )
    parser.add_argument("--json", action="store_true", help="all figures as JSON, times in seconds")
    add_options(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program, behind --")
    parser.set_defaults(run=run, needs_tensorflow=True)


def run(arguments: argparse.Namespace) -> int:
    """Measures the program and prints what was found."""
    command = programs.behind_dashes(arguments.command)
    if not command:
        raise WrongCallError("give the program behind --.")
    check_environment()
    from tf_amp.profiling.profile import profile
    from tf_amp.profiling.step_watch import Request

    def run_program(variables: Mapping[str, str], result: Path) -> str:
        return _run(command, variables, result, arguments.timeout)

    try:
        with tempfile.TemporaryDirectory(prefix="tf-amp-profile-") as folder:
            found = profile(
                run_program,
                say,
                Path(folder),
                Request(arguments.steps, arguments.skip, arguments.function),
                rounds=arguments.rounds,
                variables=chosen_variables(arguments),
            )
    except OSError as error:
        raise ToolError(str(error)) from error
    print(json.dumps(found.to_dict(), indent=1) if arguments.json else "\n\n".join(_text(found)))
    return 0


def _run(
    command: list[str], variables: Mapping[str, str], result: Path, timeout: float | None
) -> str:
    """Runs the program until it has ended or its result is there.

    Raises:
        ProfileError: its time is over.
    """
    from tf_amp.profiling.profile import ProfileError

    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = programs.start(command, variables, output)
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        try:
            # A program that starts others need not end with the one that was measured.
            while child.poll() is None and not result.exists():
                if time.monotonic() > until:
                    raise ProfileError(
                        f"The program was stopped after --timeout {timeout:g} seconds, before all "
                        "steps were measured. Give it more time, or ask for fewer steps."
                    )
                time.sleep(_POLL_SECONDS)
        finally:
            programs.stop(child)
        output.seek(0)
        return output.read()


def _text(found: Profile) -> Iterator[str]:
    """The paragraphs for people."""
    from tf_amp.profiling.kernels import CLASSES
    from tf_amp.profiling.profile import IDLE, OUTSIDE
    from tf_amp.tracing.text import in_seconds, percent

    settings = found.trace.process.get("settings", {}) if found.trace else {}
    low, high = found.amp, found.float32

    def row(name: str, of: str = "") -> tuple[str, ...]:
        times = [steps.classes.get(of, 0.0) if of else steps.step for steps in (high, low)]
        ratio = f"{times[0] / times[1]:.2f}" if all(times) else "-"
        shares = (percent(t / s.step) for t, s in zip(times, (high, low), strict=True))
        cells = (f"{in_seconds(t)} ({share})" for t, share in zip(times, shares, strict=True))
        return name, *(cells if of else map(in_seconds, times)), ratio

    yield f"{high.function}; {settings.get('reason') or _NOTHING_REWRITTEN}"
    parts = [c for c in (*CLASSES, IDLE, OUTSIDE) if high.classes.get(c) or low.classes.get(c)]
    rows = [row("a step"), *(row(f"  {part}", part) for part in parts)]
    yield table(("", "float32", "AMP", "times as fast"), rows)
    yield _bounds(found)
    most = {op: max(high.ops.get(op, 0.0), low.ops.get(op, 0.0)) for op in {**high.ops, **low.ops}}
    ops = sorted(most, key=lambda op: -most[op])[: 2 * _SHOWN]
    listed = [(op, *(in_seconds(s.ops.get(op, 0.0)) for s in (high, low))) for op in ops]
    yield table(("op", "float32", "AMP, a step"), listed)
    for what, nodes in (
        ("Casts", found.casts),
        ("Products that stay float32", found.float32_products),
    ):
        if nodes:
            total = in_seconds(sum(one.seconds for one in nodes))
            head = f"{what}: {len(nodes)}, {total} of an AMP step; the most costly:"
            yield "\n".join((head, *map(_costly_text, nodes[:_SHOWN])))
    yield _input_text(high, low)


def _bounds(found: Profile) -> str:
    """What faster products can give at most."""
    from tf_amp.tracing.text import percent

    share = found.float32.products / found.float32.step
    told = (
        f"Products are {percent(share)} of a float32 step. If they took no time at all, a step "
        f"would be {found.bound:.2f} times as fast."
    )
    if found.products_speed_up is not None and found.trace is not None:
        told += (
            f"\nThey are {found.products_speed_up:.2f} times as fast, which makes a step "
            f"{found.bound_measured:.2f} times as fast if all else stays; measured: "
            f"{found.speed_up:.2f}."
        )
    return told


def _costly_text(one: Costly) -> str:
    from tf_amp.tracing.text import in_seconds

    remark, what = one.remark, f"{one.op} {one.node}"
    if remark and remark.kind == "cast":
        what = remark.reason
    elif remark:
        what = f"{remark.op} {remark.node}: {remark.reason}"
    at = f"\n    at {', in '.join(remark.lines)}" if remark and remark.lines else ""
    return f"  {in_seconds(one.seconds)}  {what}{at}"


def _input_text(high: Steps, low: Steps) -> str:
    """What a step waits for its input."""
    from tf_amp.tracing.text import in_seconds, percent

    if low.exposed_input is None or high.exposed_input is None:
        told = (
            "The program's input could not be replaced by one batch (a distributed iterator, or "
            "a session that reads for itself): see the rows of input and of what is outside."
        )
    else:
        waits = [
            f"{in_seconds(s.exposed_input or 0)} ({percent((s.exposed_input or 0) / s.step)})"
            for s in (high, low)
        ]
        told = (
            "With one batch that is there already, and without the program's own Python between "
            f"two calls, a step takes {in_seconds(high.cached or 0)} in float32 and "
            f"{in_seconds(low.cached or 0)} in AMP: {waits[0]} and {waits[1]} of a step are spent "
            "on input and Python."
        )
    for name, seconds in low.others.items():
        told += f"\nBetween two steps the program calls {name}: {in_seconds(seconds)} a step."
    return told
