"""What a tool says where it cannot do what it is asked."""

from __future__ import annotations


class ToolError(ValueError):
    """A tool cannot do what it is asked; the message tells its user why, and the remedy.

    Attributes:
        exit_status: how the command ends.
    """

    exit_status = 1


class WrongCallError(ToolError):
    """What a tool is asked makes no sense."""

    exit_status = 2
