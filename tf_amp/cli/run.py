"""``tf-amp run``: starts a script in mixed precision, without the .pth file of the package."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from typing import Any

from tf_amp import autoload
from tf_amp.cli.options import add_options, chosen_variables
from tf_amp.env_config import check_environment


def add_parser(commands: Any) -> None:
    """Adds the command to the sub-parsers of ``tf-amp``."""
    parser = commands.add_parser(
        "run",
        help="start a script in mixed precision",
        description="Starts a Python script in mixed precision; the script needs no change.",
        usage="tf-amp run [options] script.py [arguments of the script]",
        epilog="Exit status: that of the script; 2 without such a file, or for a wrong setting.",
    )
    add_options(parser)
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module's name, not a file"
    )
    parser.add_argument("script", help="the script to start")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the script in this process, as its main module.

    Args:
        arguments: Parsed arguments.

    Returns:
        0 if the script comes to its end, 2 if there is no such script.

    Raises:
        EnvConfigError: A variable holds an illegal value.
    """
    script = arguments.script
    if not arguments.is_module and not os.path.exists(script):
        print(
            f"tf-amp run: error: there is no script {script!r} in {os.getcwd()}. "
            "Give the path of a Python file, or -m and the name of a module.",
            file=sys.stderr,
        )
        return 2
    # Into the environment, so that processes that the script starts are in mixed precision too.
    os.environ.update(chosen_variables(arguments))
    check_environment()
    autoload.activate()
    sys.argv = [script, *arguments.arguments]
    # Where Python itself looks first: beside a script, or here for a module; nowhere if it is safe.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = (
            os.getcwd() if arguments.is_module else os.path.dirname(os.path.abspath(script))
        )
    if arguments.is_module:
        try:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        except ImportError as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if frame.f_globals is not vars(runpy):
                raise
            sys.exit(f"{sys.executable}: {error}")  # as `python -m` says that there is none
    else:
        runpy.run_path(script, run_name="__main__")
    return 0
