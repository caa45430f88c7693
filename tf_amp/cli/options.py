"""Options that stand for environment variables, shared by the commands that start a training."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from tf_amp.env_variables import (
    DTYPE,
    ENABLE,
    ENABLE_GRAPH_REWRITE,
    ENABLE_LOSS_SCALING,
    IGNORE_PERFORMANCE,
    LEVEL,
    LOG_PATH,
    VARIABLES,
)

_CHOICES = {variable.name: variable.choices for variable in VARIABLES}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options; one that is not given leaves its variable as it is."""
    parser.add_argument("--dtype", choices=_CHOICES[DTYPE], help=f"the target dtype (sets {DTYPE})")
    parser.add_argument("--level", choices=_CHOICES[LEVEL], help=f"how far to go (sets {LEVEL})")
    parser.add_argument("--log-path", metavar="DIR", help=f"write the graphs (sets {LOG_PATH})")
    parser.add_argument(
        "--no-loss-scaling",
        action="store_true",
        help=f"rewrite only (sets {ENABLE_LOSS_SCALING}=0)",
    )
    parser.add_argument(
        "--ignore-performance",
        action="store_true",
        help=f"rewrite on hardware without fast units too (sets {IGNORE_PERFORMANCE}=1)",
    )


def chosen_variables(arguments: argparse.Namespace) -> Mapping[str, str]:
    """Returns the variables that switch AMP on as the options say, which win over the environment.

    Args:
        arguments: Parsed arguments of a parser with `add_options`.

    Returns:
        Variable name -> value.
    """
    chosen = {ENABLE: "1", ENABLE_GRAPH_REWRITE: "1"}
    options = {DTYPE: arguments.dtype, LEVEL: arguments.level, LOG_PATH: arguments.log_path}
    chosen.update({name: value for name, value in options.items() if value is not None})
    if arguments.no_loss_scaling:
        chosen[ENABLE_LOSS_SCALING] = "0"
    if arguments.ignore_performance:
        chosen[IGNORE_PERFORMANCE] = "1"
    return chosen
