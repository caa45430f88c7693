"""``tf-amp plan``: what would become of a model, without running it."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from tf_amp.cli.explain import EXIT_CODES, add_filters, show
from tf_amp.cli.options import add_target, config_for
from tf_amp.env_config import read_settings


def add_parser(commands: Any) -> None:
    """Adds the command to the sub-parsers of ``tf-amp``."""
    parser = commands.add_parser(
        "plan",
        help="say what would become of a model, without running it",
        description="Plans a model for a device, which need not be in this machine, and prints "
        "what `tf-amp explain` prints of a run. Nothing is executed. Settings come from the "
        "environment.",
        epilog=EXIT_CODES,
    )
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="a SavedModel's directory, a GraphDef or MetaGraphDef (.pb, .pbtxt, .meta), or a "
        "Keras model (.keras)",
    )
    add_target(parser)
    add_filters(parser)
    parser.set_defaults(run=run, needs_tensorflow=True)


def run(arguments: argparse.Namespace) -> int:
    """Plans the model and prints the outcome."""
    settings = read_settings()
    from tf_amp.hardware import choose_target
    from tf_amp.tracing.models import plan_model

    config = config_for(settings, arguments)
    target = choose_target(dataclasses.replace(settings, target_dtype=config.target_dtype))
    is_slow = target.target_dtype is None and target.device == config.device
    here = target.reason.rstrip(".") if is_slow else ""
    return show([plan_model(arguments.model, config, here)], arguments)
