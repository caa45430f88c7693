"""``tf-amp``: parses the command line and hands it to the command's module."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Sequence

from tf_amp import __version__, autoload
from tf_amp.cli import (
    bisect,
    calibrate,
    compare,
    completion,
    convert,
    demo,
    diagnose,
    diff,
    env,
    explain,
    lists,
    plan,
    profile,
    run,
    tune,
    verify,
)
from tf_amp.env_variables import EnvConfigError
from tf_amp.tool_error import ToolError, WrongCallError
from tf_amp.visible_log import LOGGERS

# A command is a module with `add_parser(commands)`, whose parser sets the default `run`: a function
# that takes the parsed arguments, returns the exit status and lets pass what `main` tells. With the
# default `needs_tensorflow` it looks at things by TensorFlow, and must not put itself into mixed
# precision.
COMMANDS = (
    run,
    demo,
    explain,
    profile,
    diff,
    plan,
    verify,
    convert,
    compare,
    calibrate,
    diagnose,
    bisect,
    lists,
    tune,
    env,
)

LEVELS = ("debug", "info", "warning", "error")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="tf-amp",
        description="Automatic mixed precision for stock TensorFlow 2.",
        epilog="Exit status: 0; 1 for a command that failed; 2 for a wrong call or setting; 3 "
        "where a gate (--fail-if, --tolerance of calibrate, verify, diagnose) says no; `run` ends "
        "as its script does. Everything can be had without this command too: set "
        "TF_ENABLE_AUTO_MIXED_PRECISION=1 and start the script as usual.",
    )
    top.add_argument("--version", action="version", version=f"tf-amp {__version__}")
    top.add_argument(
        "--verbosity",
        choices=LEVELS,
        help="the least that tf_amp logs, in `run` and wherever else it does (default: info)",
    )
    top.add_argument(
        "--flagfile",
        metavar="FILE",
        help="take further arguments from a file, a line each, as absl does; also behind a command",
    )
    commands = top.add_subparsers(
        title="commands", metavar="COMMAND", dest="command_name", required=True
    )
    for command in COMMANDS:
        command.add_parser(commands)
    completion.add_parser(commands, parser)
    return top


def _with_flagfiles(argv: list[str]) -> list[str]:
    """Puts the lines of each --flagfile in its place, by absl's rules (absl.flags).

    What stands behind `--`, or behind `run`, is the program's.
    """
    if argv[:1] == ["run"] or not any(given.startswith("--flagfile") for given in argv):
        return argv
    try:
        from absl import flags
    except ImportError as error:
        raise WrongCallError(
            f"--flagfile needs absl, which TensorFlow brings along: {error}."
        ) from error
    try:
        return list(flags.FlagValues().read_flags_from_files(argv))
    except flags.Error as error:
        raise WrongCallError(f"--flagfile: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments without the program's name; by default those of the process.

    Returns:
        The exit status: 0, 1 for a failed command (of `diff`: for a difference), 2 for a wrong call
        or setting, 3 where a gate says no.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    command = ""
    try:
        arguments = parser().parse_args(_with_flagfiles(given))
        command = f" {arguments.command_name}"
        if arguments.verbosity:
            for name in LOGGERS:
                logging.getLogger(name).setLevel(arguments.verbosity.upper())
        if "needs_tensorflow" in arguments:
            if importlib.util.find_spec("tensorflow") is None:
                raise ToolError(
                    "this Python cannot import TensorFlow. "
                    f"Remedy: {sys.executable} -m pip install tensorflow"
                )
            autoload.deactivate()
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        status = int(arguments.run(arguments))
        print(end="", flush=True)  # there may be no stdout
        return status
    except EnvConfigError as error:
        print(f"tf-amp: error: {error}", file=sys.stderr)
        return 2
    except ToolError as error:
        if command == " run":
            raise  # it is the script's own
        print(f"tf-amp{command}: error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        if command == " run":
            raise
        return 128 + signal.SIGINT
    except OSError as error:
        if command == " run" or error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Who read the output, as `head` does, has enough; that a disk is full is told.
        if error.errno == errno.ENOSPC:
            print(f"tf-amp{command}: error: {error}", file=sys.stderr)
        # Python would try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
