"""Makes the messages of this project visible in a program that configured no logging."""

from __future__ import annotations

import logging
import sys

LOGGERS = ("tf_amp", "graph_passes")
"""Under which all of this project is logged."""
# Just below INFO, so that the level that is set here can be told from one that the user sets.
_OWN_LEVEL = logging.INFO - 1


class _VisibleHandler(logging.Handler):
    """Writes to the current `sys.stderr`, or hands over to the root logger once that has handlers.

    The root logger is looked at for every message: a program that configures logging later than
    TensorFlow is imported then gets each message once, in its own format and from its level on.
    """

    def emit(self, record: logging.LogRecord) -> None:
        root = logging.getLogger()
        name = record.name.partition(".")[0]
        own_level = logging.getLogger(name).level == _OWN_LEVEL
        # Without a configuration its level is WARNING, which says nothing about what is wanted.
        configured = bool(root.handlers) or root.level != logging.WARNING
        if own_level and configured and record.levelno < root.level:
            return
        if root.handlers:
            root.callHandlers(record)
        elif sys.stderr is not None:  # None where it was closed before the start
            try:
                sys.stderr.write(self._text(record))
                sys.stderr.flush()
            except (OSError, ValueError):
                self.handleError(record)

    def _text(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        lines = f"{level}{self.format(record)}".splitlines()
        return "".join(f"tf_amp: {line}\n" for line in lines)


def ensure_visible() -> None:
    """Gives the loggers of this project a handler and a level, unless they have their own."""
    for logger in map(logging.getLogger, LOGGERS):
        if logger.level == logging.NOTSET:
            logger.setLevel(_OWN_LEVEL)
        if not logger.handlers:
            logger.addHandler(_VisibleHandler())
            logger.propagate = False  # the handler does that
