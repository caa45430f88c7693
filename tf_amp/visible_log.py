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
        root, logger = logging.getLogger(), logging.getLogger(record.name.partition(".")[0])
        own_level = logger.level == _OWN_LEVEL
        if own_level and _is_configured(root) and record.levelno < root.level:
            return
        if root.handlers:
            for handler in root.handlers:
                # pytest gives its own to the root logger and to each that does not propagate.
                if record.levelno >= handler.level and handler not in logger.handlers:
                    handler.handle(record)
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


def _is_configured(root: logging.Logger) -> bool:
    """Whether anybody chose the level, and not only something logged.

    `logging.warning`, and absl in every program that saves a model, call `basicConfig()` for a
    handler. The level is WARNING then as without one, which says nothing about what is wanted.
    """
    bare = all(
        type(handler) is logging.StreamHandler
        and handler.formatter is not None
        and handler.formatter._fmt == logging.BASIC_FORMAT
        for handler in root.handlers
    )
    return root.level != logging.WARNING or not bare


def ensure_visible() -> None:
    """Gives the loggers of this project a handler and a level, unless they have their own."""
    for logger in map(logging.getLogger, LOGGERS):
        if logger.level == logging.NOTSET:
            logger.setLevel(_OWN_LEVEL)
        if not logger.handlers:
            logger.addHandler(_VisibleHandler())
            logger.propagate = False  # the handler does that
