"""What loss scales did, one event at a time, for the trace of the process.

An event is known when the host learns of it, and nothing is done in a step for its sake: of a
skipped step at once, of a scale that grew with the next skipped step or the next look at the state
(`LossScaleManager.check`, which `fit` calls every 100 batches and at the end of an epoch). A step
that XLA compiled tells nothing itself, so that there several skipped steps are one event.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from tf_amp.loss_scale.floor import SkippedStep
from tf_amp.loss_scale.rule import LossScaleState

LOSS_SCALE_EVENTS = "loss_scale.jsonl"
"""The file of a traced process that holds the events, one JSON object a line:

`time` (local, ISO 8601), `loss_scale` (a number for each scale of the process, from 0), `name`
(the prefix of its variables), `event` ("skipped" or "moved"), `step` (the optimizer's iteration,
or null; of "moved": by when it had), `from` and `to` (the scale before and after), `steps` (how
many were skipped, null for "moved"), `skipped_steps` (in total), `skipped_in_a_row`, `good_steps`,
`gradient` and `kind` (the first one that is not finite and "inf" or "NaN"; null where they are not
known).
"""

Listener = Callable[[dict[str, Any]], None]


class _Listeners:
    """Who is told of events; one at most."""

    def __init__(self) -> None:
        self.told: Listener | None = None


_listeners = _Listeners()
_numbers = itertools.count()


def listen(listener: Listener | None) -> None:
    """Has a function told of every event from now on, instead of the one before; None for none."""
    _listeners.told = listener


class History:
    """Finds the events of one loss scale. Its methods may be called from any thread.

    Args:
        name: the prefix of its variables' names.
        state: the state before the first step.
    """

    def __init__(self, name: str, state: LossScaleState) -> None:
        self._name, self._number = name, next(_numbers)
        self._scale, self._skipped = float(state.scale), int(state.skipped_steps)
        self._lock = threading.Lock()
        self._is_new = True

    def begin(self, state: LossScaleState) -> bool:
        """Takes a restored state for that before the first step; False after the first note."""
        with self._lock:
            if self._is_new:
                self._scale, self._skipped = float(state.scale), int(state.skipped_steps)
            return self._is_new

    def note(self, step: int | None, state: LossScaleState) -> None:
        """Takes note of the state as it is after a step."""
        with self._lock:
            self._is_new = False
            if state.skipped_steps == self._skipped:
                self._move(step, float(state.scale), state)

    def note_skip(self, skipped: SkippedStep) -> None:
        """Takes note of a skipped step, which may have been noted before."""
        state = skipped.state
        with self._lock:
            self._is_new = False
            steps = int(state.skipped_steps) - self._skipped
            if steps == 0:
                return
            if steps < 0:  # a checkpoint was restored that knew of fewer
                steps = 1
            if skipped.before is not None:
                self._move(skipped.step, skipped.before, state)
            self._tell("skipped", skipped.step, float(state.scale), state, steps, skipped.culprit)
            self._skipped = int(state.skipped_steps)

    def _move(self, step: int | None, scale: float, state: LossScaleState) -> None:
        if scale != self._scale:
            self._tell("moved", step, scale, state)

    def _tell(
        self,
        event: str,
        step: int | None,
        scale: float,
        state: LossScaleState,
        steps: int | None = None,
        culprit: tuple[str, str] | None = None,
    ) -> None:
        before, self._scale = self._scale, scale
        if _listeners.told is None:
            return
        gradient, kind = culprit or (None, None)
        _listeners.told(
            {
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "loss_scale": self._number,
                "name": self._name,
                "event": event,
                "step": step,
                "from": before,
                "to": scale,
                "steps": steps,
                "skipped_steps": int(state.skipped_steps),
                "skipped_in_a_row": int(state.skipped_in_a_row),
                "good_steps": int(state.good_steps),
                "gradient": gradient,
                "kind": kind,
            }
        )
