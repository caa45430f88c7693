"""``tf-amp completion``: prints what makes a shell complete commands and options."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

from tf_amp.tool_error import ToolError

SHELLS = ("bash", "zsh", "tcsh")


def add_parser(commands: Any, whole: Callable[[], argparse.ArgumentParser]) -> None:
    """Adds the command to the sub-parsers of ``tf-amp``; `whole` gives the parser of all of it."""
    parser = commands.add_parser(
        "completion",
        help="print what makes a shell complete commands and options",
        description='Prints a script for a shell; for bash: eval "$(tf-amp completion bash)". '
        "Needs the package shtab: pip install 'tf-amp[completion]'.",
        epilog="Exit status: 0; 1 without shtab; 2 for a wrong call.",
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=lambda arguments: run(arguments, whole()))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Prints the script.

    Args:
        arguments: Parsed arguments.
        parser: that of the whole command line.

    Returns:
        The exit status.
    """
    if importlib.util.find_spec("shtab") is None:
        raise ToolError(
            "the package shtab is not installed. Remedy: pip install 'tf-amp[completion]'"
        )
    import shtab

    print(shtab.complete(parser, shell=arguments.shell))
    return 0
