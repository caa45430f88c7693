"""The garbage collector, kept from walking what is about to be freed anyway."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keeps the garbage collector off, in a `with` or as a decorator.

    A rewrite makes many small objects that reference counting frees at its end. Until then they
    count as new, and each 700 of them start a collection; in a process that is tracing a model, a
    full one takes longer than the rewrite.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
