"""Makes the messages of the "tf_amp" loggers visible in a program that configured no logging."""

from __future__ import annotations

import logging
import sys


class _StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`, as long as the root logger has no handler.

    The root logger is looked at for every message: a program that configures logging later than
    TensorFlow is imported then gets each message once, in its own format.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
            sys.stderr.write(f"{record.name}: {level}{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            self.handleError(record)


def ensure_visible() -> None:
    """Gives the "tf_amp" logger a handler and the level INFO, unless it has its own already."""
    logger = logging.getLogger("tf_amp")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(_StderrHandler())
