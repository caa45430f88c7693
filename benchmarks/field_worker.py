"""One process of `field_trials.py`: one program in one variant."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import numpy as np
from field_programs import PROGRAMS
from field_programs.program import Running
from variants import DTYPES, FLOAT32, VARIANTS, amp_status, prepare
from worker_channel import Message, serve

_STEPS_COMPARED = 3
_LOGGERS = ("tf_amp", "graph_passes")


class _Said(logging.Handler):
    """Keeps what this project says, however the program sets logging up."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.INFO:
            self.messages.append({"level": record.levelno, "text": record.getMessage()})


class FieldWorker:
    """Runs a program on the first request, and goes on with its steps on the others."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._said = _Said()
        self._running: Running | None = None

    def handle(self, request: Message) -> Message:
        """Answers one request: "start" (with `outputs`, a path) or "run" (with `seconds`)."""
        if request["do"] == "start":
            return self._start(request["outputs"])
        return self._run(request["seconds"])

    def _start(self, path: str) -> Message:
        """Takes the first steps and computes the outputs, which it writes into an .npz file."""
        from tf_amp.visible_log import ensure_visible

        arguments = self._arguments
        ensure_visible()
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(self._said)
        prepare(arguments.variant, arguments.dtype)
        program = PROGRAMS[arguments.program]
        self._running = running = program.build()
        started = time.process_time()
        losses = [float(running.step())]
        first_step = time.process_time() - started
        losses += [float(running.step()) for _ in range(_STEPS_COMPARED - 1)]
        np.savez(path, **_arrays("", running.outputs()))
        answer: Message = {
            "losses": losses,
            "first_step_s": first_step,
            "math_ops": _math_ops(),
            "packages": {name: _version(name) for name in ("tensorflow", *program.needs)},
        }
        if arguments.variant == "tf_amp":
            answer["amp"] = amp_status()
            answer["said"] = self._said.messages
        return answer

    def _run(self, seconds: float) -> Message:
        """Takes steps for about so long; answers with the CPU seconds of one."""
        if self._running is None:
            raise RuntimeError('Asked to "run" before "start".')
        steps, started, cpu_started = 0, time.perf_counter(), time.process_time()
        while not steps or time.perf_counter() - started < seconds:
            self._running.step()
            steps += 1
        return {"step_s": (time.process_time() - cpu_started) / steps}


def _arrays(name: str, value: Any) -> dict[str, np.ndarray]:
    """Flattens outputs into named arrays; low precision is kept as float32 with its name."""
    if isinstance(value, Mapping):
        parts = {str(key): part for key, part in value.items()}
    elif isinstance(value, (list, tuple)):
        parts = {str(number): part for number, part in enumerate(value)}
    else:
        array = np.asarray(value)
        if array.dtype.name in ("bfloat16", "float16"):
            return {f"{name} {array.dtype.name}": array.astype("float32")}
        return {name: array}
    return {
        key: array
        for part, inner in parts.items()
        for key, array in _arrays(f"{name}.{part}" if name else part, inner).items()
    }


def _math_ops() -> dict[str, dict[str, int]]:
    from function_evidence import low_precision_ops

    return low_precision_ops()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", choices=PROGRAMS, required=True)
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--dtype", choices=(*DTYPES, FLOAT32), default="bfloat16")
    serve(FieldWorker(parser.parse_args()).handle)


if __name__ == "__main__":
    main()
