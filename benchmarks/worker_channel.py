"""A benchmark process and the pipe on which it is told what to do, one JSON line each way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
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

    def __init__(self, arguments: list[str], env: Mapping[str, str]) -> None:
        self.name = " ".join(arguments)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
        )

    def ask(self, **request: Any) -> Message:
        """Sends a request and waits for the answer.

        Raises:
            WorkerError: the process ended or the request failed in it. The message ends with what
                the process wrote last on stderr.
        """
        requests, answers = self._process.stdin, self._process.stdout
        if requests is None or answers is None or requests.closed:
            raise WorkerError(f"The worker {self.name!r} was closed.")
        try:
            requests.write(json.dumps(request) + "\n")
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise WorkerError(
                f"The worker {self.name!r} ended with exit code {code}.\n{self._last_lines()}"
            )
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

    def _last_lines(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LINES_SHOWN:])


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
