"""``tf-amp calibrate``: rules for a model, from its values on sample inputs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tf_amp.cli.numbers import amount, count
from tf_amp.cli.options import add_target, config_for
from tf_amp.env_config import read_settings
from tf_amp.terminal import say
from tf_amp.tool_error import WrongCallError


def add_parser(commands: Any) -> None:
    """Adds the command to the sub-parsers of ``tf-amp``."""
    parser = commands.add_parser(
        "calibrate",
        help="write the rules that a model needs, from its values on sample inputs",
        description="Runs a model in float32 and writes rules that keep float32 the nodes whose "
        "values the target dtype cannot hold. The rules are for `convert --rules`, `plan --rules`, "
        "the API and the environment variable. Settings come from the environment.",
        epilog="Exit status: 0; 1 if the model cannot be calibrated, and then nothing was written; "
        "2 for a wrong call; 3 if the tolerance does not hold with the rules that were written.",
    )
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="the float32 model: SavedModel, .pb, .keras"
    )
    parser.add_argument(
        "--inputs",
        required=True,
        metavar="FILE.npz|FILE.tfrecord|MODULE:FUNCTION",
        help="as of `tf-amp compare`, where a sample is a batch",
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help="the file of rules to write (TOML)",
    )
    add_target(parser)
    parser.add_argument(
        "--batches", type=count, metavar="N", help="the first N batches only (default: all)"
    )
    parser.add_argument(
        "--tolerance",
        type=amount,
        metavar="X",
        help="keep more nodes float32, until no output of the converted model is further from "
        "float32 than `tf-amp compare --tolerance X` allows; as few FLOPs as can be",
    )
    parser.add_argument(
        "--underflow",
        type=amount,
        metavar="SHARE",
        help="keep a node float32 if the target dtype flushes a larger share of its values to 0 "
        "(default: 0.5)",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.set_defaults(run=run, needs_tensorflow=True)


def run(arguments: argparse.Namespace) -> int:
    """Calibrates the model and writes the rules."""
    settings = read_settings()
    from tf_amp.calibration.calibrate import UNDERFLOW, calibrate
    from tf_amp.comparison.samples import read_samples
    from tf_amp.conversion.staging import staged

    if arguments.output.is_dir():
        raise WrongCallError(f"{str(arguments.output)!r} is a directory: name a file in it.")
    with staged(arguments.output, force=arguments.force) as path:
        found = calibrate(
            arguments.model,
            read_samples(arguments.inputs),
            config_for(settings, arguments),
            batches=arguments.batches,
            tolerance=arguments.tolerance,
            underflow=UNDERFLOW if arguments.underflow is None else arguments.underflow,
            say=say,
        )
        path.write_text(found.text, encoding="utf-8")
    print(f"{arguments.output}: {found}")
    for rule in found.rules:
        print(f"  {rule.node}: {rule.why}")
    return 3 if found.holds is False else 0
