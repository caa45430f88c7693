"""The log lines about single graphs: one INFO line for a top-level graph, DEBUG for the rest."""

from __future__ import annotations

import logging
import threading

from tf_amp.hosts.function_names import SIZES_NEAR
from tf_amp.tally import NodeCounts

_log = logging.getLogger("tf_amp")

# A function that is retraced again and again must not fill the log; the train functions of all
# Keras models, on the other hand, have the same name.
_LINES_PER_NAME = 10


class GraphLog:
    """Says what was done to graphs. Every method may be called from any thread."""

    def __init__(self, target_dtype: str | None) -> None:
        self._target_dtype = target_dtype
        # A handler of a signal may trace a function while this thread is in here.
        self._lock = threading.RLock()
        self._said: dict[str, list[str]] = {}

    def say(self, name: str, counts: NodeCounts, *, announce: bool) -> None:
        """Logs one graph.

        Args:
            name: the graph's name, for people.
            counts: its counts and those of the functions that it calls.
            announce: whether this is a top-level graph. INFO is for those that have matrix products
                or convolutions, or in which something was changed, and not for the same line twice.
        """
        line = counts.line(name, self._target_dtype)
        with self._lock:
            key = name.partition(SIZES_NEAR)[0]
            said = self._said.get(key, [])
            announce = (
                announce
                and bool(counts.converted or counts.products or counts.fused.total())
                and len(said) < _LINES_PER_NAME
                and line not in said
            )
            if announce:
                # What is not said is not kept: a program may trace functions without end.
                self._said[key] = [*said, line]
            last = announce and len(said) + 1 == _LINES_PER_NAME
        _log.log(logging.INFO if announce else logging.DEBUG, "%s", line)
        if last:
            _log.info("More lines about functions named %r are logged at DEBUG.", name)
