"""What is going on, said of what takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeAlias

Say: TypeAlias = Callable[[str], None]

PATIENCE = 2.0
"""Seconds after which a job starts to say what it does."""


class Progress:
    """Tells of the stages of a job, from `PATIENCE` on.

    Args:
        say: takes a line for people.
    """

    def __init__(self, say: Say) -> None:
        self._say, self._start, self._stage = say, time.monotonic(), ""
        self._lock, self._told = threading.Lock(), False
        self._timer = threading.Timer(PATIENCE, self._begin)
        self._timer.daemon = True

    def __enter__(self) -> Progress:
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()

    def __call__(self, stage: str) -> None:
        """Says that a stage begins."""
        with self._lock:
            self._stage = stage
            if self._told:
                self._line()

    def _begin(self) -> None:
        with self._lock:
            self._told = True
            if self._stage:
                self._line()

    def _line(self) -> None:
        self._say(f"[{time.monotonic() - self._start:.0f} s] {self._stage} ...")
