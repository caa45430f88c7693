"""The log lines about single graphs: one INFO line for a top-level graph, DEBUG for the rest."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from tf_amp.hosts.function_names import SIZES_NEAR
from tf_amp.tally import NodeCounts

_log = logging.getLogger("tf_amp")

# A function that is retraced again and again must not fill the log; the train functions of all
# Keras models, on the other hand, have the same name.
_LINES_PER_NAME = 10


class GraphLog:
    """Says what was done to graphs. Every method may be called from any thread."""

    def __init__(self, target_dtype: str) -> None:
        self._target_dtype = target_dtype
        # A handler of a signal may trace a function while this thread is in here.
        self._lock = threading.RLock()
        self._said: dict[str, list[str]] = {}
        self._thread = threading.local()

    def say(self, name: str, counts: NodeCounts, *, announce: bool) -> None:
        """Logs one graph.

        Args:
            name: the graph's name, for people.
            counts: its counts and those of the functions that it calls.
            announce: whether this is a top-level graph. INFO is for those that have matrix products
                or convolutions, or in which something was changed, and not for the same line twice.
        """
        group: list[NodeCounts] | None = getattr(self._thread, "group", None)
        if group is not None:
            group.append(counts)
            announce = False
        line = counts.line(name, self._target_dtype)
        with self._lock:
            key = name.partition(SIZES_NEAR)[0]
            said = self._said.get(key, [])
            announce = (
                announce
                and bool(counts.converted or counts.products or counts.updates)
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

    @property
    def shares_a_line(self) -> bool:
        """Whether this thread is inside `one_line`."""
        return getattr(self._thread, "group", None) is not None

    @contextlib.contextmanager
    def one_line(self, name: str) -> Iterator[None]:
        """Makes the graphs that this thread logs inside the context share one INFO line.

        Args:
            name: what they are together, like "loaded SavedModel".
        """
        outer = getattr(self._thread, "group", None)
        group: list[NodeCounts] = []
        self._thread.group = group
        try:
            yield
        finally:
            self._thread.group = outer
            if group:
                self.say(
                    f"{name} ({len(group)} functions)", sum(group, NodeCounts()), announce=True
                )
