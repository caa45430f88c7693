"""Says which functions train in float16 without a loss scale, and what to do about it."""

from __future__ import annotations

import logging
import threading
from typing import Any

from tf_amp.env_variables import DTYPE, ENABLE_LOSS_SCALING
from tf_amp.loss_scale.data_flow import Program
from tf_amp.loss_scale.seen_graphs import (
    gradients_are_given,
    is_seen,
    mark_giving,
    notes_of,
)
from tf_amp.loss_scale.unscaled import computes_gradients, gives_gradients, trains_unscaled

_LOGGER = logging.getLogger("tf_amp.loss_scale")


class UnscaledNotice:
    """The notice of one installation. Every method may be called from any thread.

    Args:
        active: Whether training in float16 without a loss scale is to be told at all.
    """

    def __init__(self, *, active: bool) -> None:
        self._active = active
        # A handler of a signal may trace a function while this thread is in here.
        self._lock = threading.RLock()
        self._names: dict[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The functions and session graphs of which it was said."""
        with self._lock:
            return tuple(self._names.values())

    def look(
        self,
        name: str,
        traced: Program,
        running: Program,
        *,
        built: Any = None,
        kind: str = "",
    ) -> None:
        """Warns if a graph trains in float16 without a loss scale, once for each name.

        What was noted while the graph was built tells better what to do, and is said instead.

        Args:
            name: The name of the graph, for people.
            traced: The graph or function as it was traced.
            running: The same as it will run.
            built: The graph of Python's that it was made of, None where that is not known.
            kind: What it shares the warning with, by default graphs of its own name.
        """
        kind, notes = kind or name, notes_of(built)
        # What tf_amp scales is none of the silent ones.
        if not self._active or kind in self._names or (is_seen(built) and not notes):
            return
        try:
            found = trains_unscaled(traced, running)
            if not found and gives_gradients(running):
                mark_giving(built)
            elif not found and notes and gradients_are_given():
                found = not computes_gradients(running)  # it takes them from another graph
        except Exception:  # a fault of ours must not stop the user's program
            found = False
            _LOGGER.exception(
                "Whether %r trains without a loss scale is not known: looking for one failed. This "
                "is a fault of tf_amp, please report it with the traceback.",
                name,
            )
        with self._lock:
            if not found or kind in self._names:
                return
            self._names[kind] = name
        for say in notes.values():
            say()
        if not notes:
            _LOGGER.warning(_TEXT, name)


_TEXT = (
    "%r trains in float16, and no loss scale of tf_amp's is in it: it updates variables with "
    "gradients that were computed in float16, where small ones become 0. An optimizer gets a loss "
    "scale before compile(), or before a v1 graph is built with it: "
    "optimizer = tf_amp.enable_mixed_precision_graph_rewrite(optimizer); a custom loop then takes "
    "the gradients of optimizer.scale_loss(loss). A loop that updates variables by hand scales by "
    "hand: manager = LossScaleManager(StaticLossScale(1024)) of tf_amp.loss_scale, the gradients "
    "of manager.multiply(loss), then manager.unscale(gradients). bfloat16 needs none: "
    f"{DTYPE}=bfloat16. If the loss is scaled otherwise, or is to be as it is: "
    f"{ENABLE_LOSS_SCALING}=0 says so."
)
