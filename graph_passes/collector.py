"""The garbage collector, kept from walking what is about to be freed anyway."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

_NEVER = 1 << 30


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keeps the garbage collector from starting by itself, in a `with` or as a decorator.

    A rewrite makes many small objects that reference counting frees at its end. Until then they
    count as new, and each 700 of them start a collection; in a process that is tracing a model, a
    full one takes longer than the rewrite.
    """
    # The number says by itself that it is raised, and from what: other threads pause too, fork, or
    # switch the collector off for reasons of their own.
    least, *rest = gc.get_threshold()
    if least >= _NEVER:
        yield
        return
    gc.set_threshold(least + _NEVER, *rest)
    try:
        yield
    finally:
        _resume()


def _resume() -> None:
    least, *rest = gc.get_threshold()
    if least >= _NEVER:
        gc.set_threshold(least - _NEVER, *rest)


# The thread that would resume is not in the child.
os.register_at_fork(after_in_child=_resume)
