"""Rewritten functions and their float32 originals run in turns, and the faster of the two stays.

Every call runs one of them, so what a function does is done once a call, as ever. Outcomes are kept
in the user's cache, by graph and machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2

from tf_amp.cost_tables import user_cache
from tf_amp.hardware import processor_name
from tf_amp.hosts.function_redirects import Find, with_callees
from tf_amp.whole_files import write_whole

_log = logging.getLogger("tf_amp")

_SCALARS = ("type", "shape", "i", "b", "f")


@dataclasses.dataclass(frozen=True)
class Contest:
    """What is to be tried against each other.

    Attributes:
        title: the function's name, for people.
        target_dtype: what it was rewritten to.
        add_float32: makes the original known to the runtime; returns its name there.
        digest: tells the graph and its settings from others.
        lose: is called when the original proves faster, and stays.
    """

    title: str
    target_dtype: str
    add_float32: Callable[[], bytes]
    digest: Callable[[], str]
    lose: Callable[[], None]


class FunctionTrials:
    """The trials of one installation.

    Args:
        steps: calls of each of the two that are timed, behind one that is not; 0 tries nothing.
        directory: where outcomes are kept, None for nowhere.
        say_fault: is told the name of a function that could not be tried, and why.
    """

    def __init__(
        self, steps: int, directory: Path | None, say_fault: Callable[[str, Exception], None]
    ) -> None:
        self.steps, self._say_fault = steps, say_fault
        self._outcomes = _Outcomes(directory)
        self._trials: dict[bytes, _Trial] = {}

    def watch(self, function: Any, name: bytes, contest: Contest) -> None:
        """Has a function tried at its next calls.

        Args:
            function: the AtomicFunction with which the trial ends, settled or not.
            name: the rewritten function's, or that of a variant.
            contest: how to try it.
        """
        if self.steps:
            self._trials[name] = _Trial(name, contest, self.steps, self._outcomes)
            weakref.finalize(function, self._trials.pop, name, None)

    def call(
        self,
        run: Callable[[bytes, Sequence[Any], int], Any],
        name: bytes,
        inputs: Sequence[Any],
        outputs: int,
    ) -> Any:
        """Calls a function, or the one of two that has its turn, as `FunctionSizes.call`."""
        trial = self._trials.get(name)
        if trial is None:
            return run(name, inputs, outputs)
        try:
            chosen, is_timed = trial.next()
        except Exception as error:  # a fault of ours must not stop the user's program
            self._give_up(name, error)
            return run(name, inputs, outputs)
        if not is_timed:
            return run(chosen, inputs, outputs)
        # What was started before, on whatever device, is none of this call's.
        tf.test.experimental.sync_devices()
        started = time.perf_counter()
        found = run(chosen, inputs, outputs)
        tf.test.experimental.sync_devices()
        seconds = time.perf_counter() - started
        try:
            trial.took(chosen, seconds)
        except Exception as error:
            self._give_up(name, error)
        return found

    def _give_up(self, name: bytes, error: Exception) -> None:
        self._trials.pop(name, None)
        self._say_fault(name.decode(), error)


class _Trial:
    """The trial of one function; the arguments are those of `FunctionTrials.watch`."""

    def __init__(self, name: bytes, contest: Contest, steps: int, outcomes: _Outcomes) -> None:
        self._low, self._contest, self._steps = name, contest, steps
        self._outcomes = outcomes
        # A handler of a signal or of the log may call the function that is tried.
        self._lock = threading.RLock()
        self._seconds: dict[bytes, list[float]] = {}
        self._turn = 0
        self._winner: bytes | None = None

    def next(self) -> tuple[bytes, bool]:
        """The name to call, and whether the call is to be timed."""
        with self._lock:
            if not self._seconds:
                self._begin()
            if self._winner is not None:
                return self._winner, False
            low, float32 = self._seconds
            # Who comes first in a round comes last in the next.
            order = (low, float32) if self._turn % 4 < 2 else (float32, low)
            chosen = order[self._turn % 2]
            self._turn += 1
            return chosen, True

    def took(self, name: bytes, seconds: float) -> None:
        """Takes note of a call's time, and ends the trial with the last one that it needs."""
        with self._lock:
            self._seconds[name].append(seconds)
            if self._winner is None and min(map(len, self._seconds.values())) > self._steps:
                # The first call of each has made the kernels.
                low, float32 = (statistics.median(s[1:]) for s in self._seconds.values())
                self._settle(low, float32)
                self._outcomes.keep(self._contest.digest, low, float32)

    def _begin(self) -> None:
        float32 = self._contest.add_float32()
        self._seconds = {self._low: [], float32: []}
        kept = self._outcomes.find(self._contest.digest)
        if kept is not None:
            self._settle(*kept, ", as tried before")

    def _settle(self, low: float, float32: float, when: str = "") -> None:
        of = self._contest
        low_name, float32_name = self._seconds
        self._winner = low_name if low <= float32 else float32_name
        _log.info(
            "%s: a call takes %.1f ms in float32 and %.1f ms rewritten to %s%s: %s stays.",
            of.title,
            float32 * 1e3,
            low * 1e3,
            of.target_dtype,
            when,
            of.target_dtype if self._winner == low_name else "float32",
        )
        if self._winner == float32_name:
            of.lose()


class _Outcomes:
    """The outcomes in the user's cache. What is wrong with the cache is said once.

    Args:
        directory: where they are, None for nowhere.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._said = False

    def find(self, digest: Callable[[], str]) -> tuple[float, float] | None:
        """The seconds of a call, rewritten and in float32; None if they are not known."""
        if self._directory is None:
            return None
        try:
            text = (self._directory / f"{digest()}.json").read_text()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._complain(error)
            return None
        try:
            kept = json.loads(text)
            return float(kept["low_s"]), float(kept["float32_s"])
        except (ValueError, KeyError, TypeError) as error:
            _log.debug("The outcome of a trial cannot be read, and it runs again: %s", error)
            return None

    def keep(self, digest: Callable[[], str], low: float, float32: float) -> None:
        """Keeps the seconds of a call."""
        if self._directory is None:
            return
        outcome = json.dumps({"low_s": low, "float32_s": float32})
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_whole(self._directory / f"{digest()}.json", outcome.encode())
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._said:
            self._said = True
            _log.warning(
                "The cache of trials, %s, cannot be used (%s): outcomes hold for this process, and "
                "the next one tries again. XDG_CACHE_HOME chooses another place.",
                self._directory,
                error.strerror or error,
            )


def trials_directory() -> Path | None:
    """Returns where outcomes are kept, None for a user without a home directory."""
    try:
        return user_cache() / "trials"
    except OSError as error:
        _log.debug("Outcomes of trials are not kept: %s", error)
        return None


def digest_of(definition: function_pb2.FunctionDef, find: Find, *more: object) -> str:
    """Returns a name for a function's graph on this machine, the same in every process.

    Args:
        definition: the function.
        find: gives what it calls.
        more: what else tells it from others, by `repr`.
    """
    processor = processor_name("GPU" if tf.config.list_physical_devices("GPU") else "CPU")
    about = (*more, tf.__version__, processor)
    digest = hashlib.sha256(repr(about).encode())
    for function in with_callees((definition,), find):
        for node in function.node_def:
            digest.update(f"{node.op} {len(node.input)}".encode())
            for name in sorted(node.attr):
                # Names and constants differ from process to process.
                value = node.attr[name]
                if value.WhichOneof("value") in _SCALARS or _plain_list(value):
                    digest.update(value.SerializeToString(deterministic=True))
    return digest.hexdigest()[:24]


def _plain_list(value: Any) -> bool:
    return value.WhichOneof("value") == "list" and not (value.list.func or value.list.s)
