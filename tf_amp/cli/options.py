"""Options that stand for environment variables, shared by the commands that start a training."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from tf_amp.env_variables import (
    DTYPE,
    ENABLE,
    ENABLE_GRAPH_REWRITE,
    ENABLE_LOSS_SCALING,
    IGNORE_PERFORMANCE,
    LEVEL,
    LOG_PATH,
    RULES,
    VARIABLES,
    EnvConfigError,
)

if TYPE_CHECKING:
    from graph_passes import PrecisionConfig
    from graph_passes.policy.config import TargetDtype
    from tf_amp.env_config import Settings

CHOICES = {variable.name: variable.choices for variable in VARIABLES}
"""Variable -> its legal words, () for one that takes others."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options; one that is not given leaves its variable as it is."""
    parser.add_argument("--dtype", choices=CHOICES[DTYPE], help=f"the target dtype (sets {DTYPE})")
    parser.add_argument("--level", choices=CHOICES[LEVEL], help=f"how far to go (sets {LEVEL})")
    parser.add_argument("--rules", metavar="FILE", help=f"rules on single nodes (sets {RULES})")
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
    options = {
        DTYPE: arguments.dtype,
        LEVEL: arguments.level,
        RULES: arguments.rules,
        LOG_PATH: arguments.log_path,
    }
    chosen.update({name: value for name, value in options.items() if value is not None})
    if arguments.no_loss_scaling:
        chosen[ENABLE_LOSS_SCALING] = "0"
    if arguments.ignore_performance:
        chosen[IGNORE_PERFORMANCE] = "1"
    return chosen


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say for what to plan."""
    parser.add_argument("--device", choices=("CPU", "GPU"), help="default: this machine's")
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16"),
        help=f"the target dtype; default: {DTYPE}, else float16 on a GPU and bfloat16 on a CPU",
    )
    parser.add_argument(
        "--rules",
        metavar="FILE",
        help=f"a file of rules on single nodes, which wins over that of {RULES}",
    )


def config_for(settings: Settings, arguments: argparse.Namespace) -> PrecisionConfig:
    """The configuration for the target that is asked for, whatever this machine is fast at.

    Args:
        settings: what the environment asks for.
        arguments: parsed by a parser with `add_target`.

    Returns:
        The configuration. A cost table is in it where the target is this machine's device.

    Raises:
        EnvConfigError: what is asked for does not go together.
    """
    from graph_passes import RulesError, load_rules
    from tf_amp.cost_tables import choose_table
    from tf_amp.hardware import Target, choose_target
    from tf_amp.plan import precision_config

    device = arguments.device or choose_target(settings).device
    asked = arguments.dtype or settings.target_dtype
    by_device = "float16" if device == "GPU" else "bfloat16"
    dtype = cast("TargetDtype", by_device if asked == "auto" else asked)
    if arguments.rules:
        try:
            rules = load_rules(arguments.rules, "call")
        except RulesError as error:
            raise EnvConfigError(f"--rules: {error}") from error
        settings = dataclasses.replace(settings, rules=settings.rules + rules)
    target = Target(dtype, device, f"{dtype} on {device}, as asked for")
    return precision_config(settings, target, choose_table(settings, target))
