"""Programs of the user's that a command runs, with all that they start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO


def start(
    command: Sequence[str], variables: Mapping[str, str], output: int | IO[str]
) -> subprocess.Popen[str]:
    """Starts a program with more variables in its environment.

    It has a session of its own, so what ends this process does not reach it: from now on SIGTERM
    and SIGHUP raise SystemExit here, whose way leads through the caller's `stop`.

    Args:
        command: the program and its arguments.
        variables: name -> value.
        output: where stdout and stderr go, as for `subprocess.Popen`.

    Raises:
        OSError: there is no such program.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has it ignored
            signal.signal(number, _end)
    return subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def stop(child: subprocess.Popen[str]) -> None:
    """Ends a program with all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def behind_dashes(arguments: Sequence[str]) -> list[str]:
    """The program of a command line that ends with "-- PROGRAM ARGUMENTS"."""
    return [*arguments[arguments[:1] == ["--"] :]]
