"""Keeps frames of this package out of tracebacks where TensorFlow and Keras leave out their own.

Calls of functions go through the hooks, so an error of the user's program would seem to come from
here. `tf.debugging.disable_traceback_filtering()` shows the frames, with those of the libraries.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType

from tensorflow.python.util import traceback_utils

from tf_amp.after_import import AfterImport
from tf_amp.compatibility import TRACEBACKS, obstacle
from tf_amp.patches import Patches

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


class TracebackFilters:
    """The hooks of one installation."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._awaited = AfterImport(
            dict.fromkeys(
                (f"{library}.src.utils.traceback_utils" for library in ("keras", "tf_keras")),
                self._hook,
            )
        )

    def install(self) -> str | None:
        """Hooks the filters of what is imported, and those of Keras as soon as they are.

        Returns:
            None, or why TensorFlow's could not be hooked.
        """
        if (why := obstacle(TRACEBACKS)) is None:
            self._hook(traceback_utils)
            self._awaited.start()
        return why

    def uninstall(self) -> None:
        """Takes the hooks off."""
        self._awaited.stop()
        self._patches.undo()

    def _hook(self, module: ModuleType) -> None:
        if hasattr(module, "include_frame"):
            self._patches.replace(module, "include_frame", _include_frame)


def _include_frame(original: Callable[[str], bool]) -> Callable[[str], bool]:
    def include_frame(fname: str) -> bool:
        return original(fname) and not fname.startswith(_OURS)

    return include_frame
