"""A benchmark process and the pipe on which it is told what to do, one JSON line each way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any

Message = dict[str, Any]

_LINES_SHOWN = 12


class WorkerError(RuntimeError):
    """A worker process ended, or answered with an error."""


class Worker:
    """A child process that answers requests. It computes only while a request is open.

    Several workers can therefore be alive at once and be measured in turn.
    """

    def __init__(
        self, arguments: list[str], env: Mapping[str, str], python: str = sys.executable
    ) -> None:
        self.name = " ".join(arguments)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._process = subprocess.Popen(
            [python, *arguments],
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
        )

    def ask(self, *, timeout_s: float | None = None, **request: Any) -> Message:
        """Sends a request and waits for the answer.

        Args:
            timeout_s: seconds after which the process is killed; None, the default, is never.
            **request: what the worker is told.

        Raises:
            WorkerError: the process ended, was killed, or the request failed in it. The message
                ends with what the process wrote last on stderr.
        """
        requests, answers = self._process.stdin, self._process.stdout
        if requests is None or answers is None or requests.closed:
            raise WorkerError(f"The worker {self.name!r} was closed.")
        watchdog = threading.Timer(timeout_s or threading.TIMEOUT_MAX, self._process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            requests.write(json.dumps(request) + "\n")
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late = not watchdog.is_alive()
            watchdog.cancel()
        if not line:
            code = self._process.wait()
            how = f"gave no answer in {timeout_s} s" if late else f"ended with exit code {code}"
            last_lines = "\n".join(self.log().splitlines()[-_LINES_SHOWN:])
            raise WorkerError(f"The worker {self.name!r} {how}.\n{last_lines}")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process; an idle one ends by itself when its input is closed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def log(self) -> str:
        """Returns what the process has written on stdout and stderr."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


def serve(handle: Callable[[Message], Message]) -> None:
    """Answers requests until the parent closes the pipe; the child's side of `Worker`.

    Whatever libraries print goes to stderr, so that it cannot get between two answers.

    Args:
        handle: request -> answer. What it raises ends the process.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        answers.write(json.dumps(handle(json.loads(line))) + "\n")
