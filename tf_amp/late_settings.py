"""Says once that a variable of ours does nothing, as it was changed after it had been read.

Or as it is set without one that switches AMP on. Both are looked for where the variable would have
counted: when a function is traced, when a session is about to run, and at the end of a process that
had done one of the two before.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tensorflow.python.client import session
from tensorflow.python.eager.polymorphic_function import atomic_function

from tf_amp.compatibility import LATE_SETTINGS, require
from tf_amp.env_variables import (
    DISABLE_CALL,
    ENABLE,
    ENABLE_CALL,
    ENABLING_VARIABLES,
    VARIABLES,
    EnvConfigError,
    is_on,
)
from tf_amp.patches import Patches
from tf_amp.visible_log import ensure_visible

if TYPE_CHECKING:
    from tf_amp.plan import Plan

_log = logging.getLogger("tf_amp")
_READ_THEM = ("tf_amp.api", "tf_amp.installation", "tf_amp.model_api")
_NAMES = tuple(name for variable in VARIABLES for name in (variable.name, *variable.legacy))


@functools.cache
def watch() -> None:
    """Starts the watch of this process, from the variables as they are now.

    Raises:
        AttributeError: this TensorFlow, or this Python, is not as expected.
    """
    require(LATE_SETTINGS)
    _Watch().start()


class _Watch:
    """Compares the environment with what it was when it was last looked at."""

    def __init__(self) -> None:
        # A comparison of what lies below `os.environ` takes less than one look-up in it.
        self._environ: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
        self._seen = dict(self._environ)
        self._ran = False
        self._lock = threading.Lock()
        self._patches = Patches()

    def start(self) -> None:
        self._patches.replace(atomic_function, "from_func_graph", self._checked)
        # Each way to run a graph calls it first, and it is in the traceback of none that fails.
        self._patches.replace(session.BaseSession, "_extend_graph", self._checked)
        atexit.register(self._end)

    def _checked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not self._ran:
                self._ran = True
                _say_unused()
            if self._environ != self._seen:
                self._look()
            return original(*args, **kwargs)

        return checked

    def _end(self) -> None:
        # What set them and ran nothing may have meant them for other processes.
        if self._ran and self._environ != self._seen:
            self._look()

    def _look(self) -> None:
        """Warns, and ends the watch, if what was changed is not what is in force."""
        with self._lock:
            if not self._patches.active:
                return
            before, self._seen = self._seen, dict(self._environ)
            keys = ((name, os.environ.encodekey(name)) for name in _NAMES)  # type: ignore[attr-defined]
            changed = [name for name, key in keys if before.get(key) != self._seen.get(key)]
            try:
                said = _why_late(changed) if changed else None
            except Exception:  # somebody else's training must not die of a fault in here
                _log.debug("Nothing is said of variables that are set too late:", exc_info=True)
                return
            if said is None:
                return
            self._patches.undo()
            atexit.unregister(self._end)
        ensure_visible()
        _log.warning("%s", said)


def _say_unused() -> None:
    """Warns of variables that are set where none says on or off and no call can have read them."""
    if not sys.modules.keys().isdisjoint(_READ_THEM) or any(map(_is_set, ENABLING_VARIABLES)):
        return
    if unused := [name for name in _NAMES if _is_set(name)]:
        ensure_visible()
        _log.warning(
            "%s: set, but AMP is off so far, and without %s=1 before `import tensorflow`, or a "
            "call of %s, this does nothing; %s=0 ends this line.",
            ", ".join(unused),
            ENABLE,
            ENABLE_CALL,
            ENABLE,
        )


def _is_set(name: str) -> bool:
    return bool(os.environ.get(name, "").strip())


def _why_late(changed: list[str]) -> str | None:
    """What is wrong with variables that were changed, None if they count or change nothing."""
    module = sys.modules.get("tf_amp.installation")
    installed = module.current() if module else None
    if installed is None:
        on = (name for name in changed if is_on(os.environ.get(name, "")))
        late = next((name for name in on if name in ENABLING_VARIABLES), None)
        return late and (
            f"{late} was set after TensorFlow had been imported and does nothing. Set it before "
            f"`import tensorflow`, or call {ENABLE_CALL}."
        )
    if _is_in_force(installed.plan):
        return None
    values = ", ".join(f"{name}={os.environ.get(name, '')!r}" for name in changed)
    return (
        f"{values} came after AMP had been switched on and does nothing. In force is: "
        f"{installed.plan.summary}. Set it before `import tensorflow`, or call {DISABLE_CALL}; "
        f"{ENABLE_CALL} after that switches AMP on with what the variables say by then."
    )


def _is_in_force(plan: Plan) -> bool:
    """Whether the variables, read now, would lead to the same."""
    from tf_amp.env_config import read_settings
    from tf_amp.plan import ENVIRONMENT, make_plan

    try:
        settings = read_settings()
        if plan.source != ENVIRONMENT:  # a call wins over them
            rules = plan.settings.rules
            settings = dataclasses.replace(settings, graph_rewrite=True, rules=rules)
        return make_plan(settings, plan.source).in_force == plan.in_force
    except EnvConfigError:
        return False
