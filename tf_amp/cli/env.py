"""``tf-amp env``: prints the settings in force, where each comes from, and what they lead to."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from tf_amp import autoload
from tf_amp.env_config import read_settings


def add_parser(commands: Any) -> None:
    """Adds the command to the sub-parsers of ``tf-amp``."""
    parser = commands.add_parser(
        "env",
        help="print the settings in force",
        description="Prints what the environment asks for and what this machine makes of it.",
        epilog="Exit status: 0; 2 for a wrong call or setting.",
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(run=run, needs_tensorflow=True)


def run(arguments: argparse.Namespace) -> int:
    """Prints the settings.

    Args:
        arguments: Parsed arguments.

    Returns:
        0.

    Raises:
        EnvConfigError: A variable holds an illegal value.
    """
    settings = read_settings()
    import tensorflow as tf

    from graph_passes import RULES
    from tf_amp.hosts.process_record import variables_set
    from tf_amp.plan import ENVIRONMENT, make_plan

    plan = make_plan(settings, ENVIRONMENT)
    status = plan.status()
    result = {
        "tensorflow": tf.__version__,
        "autoload": autoload.pth_path() or "no .pth file found: only `tf-amp run` switches AMP on",
        "variables": variables_set(),
        **{
            key: status[key]
            for key in (
                "graph_rewrite",
                "target_dtype",
                "device",
                "reason",
                "level",
                "cost_table",
                "cost_table_xla",
                "list_edits",
                "loss_scaling",
                "loss_scaling_reason",
                "log_path",
            )
        },
        "node_rules": list(status.rules),
        "rules": [
            f"{name}: {'on' if plan.config and plan.config.has_rule(name) else 'off'} ({meaning})"
            for name, meaning in RULES.items()
        ],
        "decided_by": dict(settings.decided_by),
        "notes": list(plan.notes),
    }
    if arguments.json:
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        for key, value in result.items():
            print(f"{key:20} {_plain(value)}")
    return 0


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{key}={item}" for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return ("\n" + " " * 21).join(map(str, value)) or "-"
    return "-" if value in (None, "") else str(value)
