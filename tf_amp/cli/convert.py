"""``tf-amp convert``: writes a model with its products in low precision."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_amp.cli.numbers import count
from tf_amp.cli.options import add_target, config_for
from tf_amp.env_config import read_settings
from tf_amp.terminal import say

if TYPE_CHECKING:
    from tf_amp.conversion.convert import Conversion

_MEGABYTE = 1e6
_ROWS = 32


def add_parser(commands: Any) -> None:
    """Adds the command to the sub-parsers of ``tf-amp``."""
    parser = commands.add_parser(
        "convert",
        help="write a model with its products in low precision",
        description="Converts a float32 model. The result has the same signatures, assets, "
        "variables and objects and needs no tf_amp to run. Settings come from the environment.",
        epilog="Exit status: 0; 1 if there is nothing to convert or the model cannot be converted, "
        "and then nothing was written; 2 for a wrong call.",
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="SRC",
        help="a SavedModel's directory, a GraphDef or MetaGraphDef (.pb, .pbtxt, .meta), or a "
        "Keras model (.keras)",
    )
    parser.add_argument(
        "destination",
        type=Path,
        metavar="DST",
        help="a directory for a SavedModel or Keras model, else a file",
    )
    add_target(parser)
    parser.add_argument(
        "--weights",
        action="store_true",
        help="store weights in the target dtype that only products read: a smaller model, no cast "
        "of them per call; variables that a function writes stay float32",
    )
    parser.add_argument(
        "--embeddings",
        action="store_true",
        help="with --weights: store tables so too whose rows are used in float32: it rounds them",
    )
    parser.add_argument(
        "--io",
        choices=("float32", "target"),
        default="float32",
        help="the dtype of float32 inputs and outputs afterwards (default: float32)",
    )
    parser.add_argument(
        "--rows",
        type=count,
        default=_ROWS,
        help="the batch that is expected where a signature leaves it open; what is faster in "
        f"float32 for it stays so (default: {_ROWS})",
    )
    parser.add_argument(
        "--outputs",
        metavar="NODE,...",
        type=lambda text: tuple(filter(None, text.split(","))),
        default=(),
        help="the nodes of a frozen graph that are fetched (default: those that no other reads)",
    )
    parser.add_argument(
        "--allow-lambda",
        action="store_true",
        help="load Python code in a .keras file (Lambda layers); it can do anything",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing destination")
    parser.set_defaults(run=run, needs_tensorflow=True)


def run(arguments: argparse.Namespace) -> int:
    """Converts the model and prints what was done."""
    settings = read_settings()
    from tf_amp.conversion.convert import convert

    done = convert(
        arguments.source,
        arguments.destination,
        dataclasses.replace(config_for(settings, arguments), unknown_dimension=arguments.rows),
        weights=arguments.weights,
        embeddings=arguments.embeddings,
        io=arguments.io,
        outputs=arguments.outputs,
        allow_lambda=arguments.allow_lambda,
        force=arguments.force,
        say=say,
    )
    for line in described(done):
        print(line)
    return 0


def described(done: Conversion) -> list[str]:
    """What a conversion did, as lines for people."""
    low, total = done.products
    before, after = done.bytes_before / _MEGABYTE, done.bytes_after / _MEGABYTE
    dtype = done.graphs[0].target_dtype
    products = f"{low} of {total} products in {dtype}"
    lines = [f"{done.destination}: {products}, {before:.1f} MB before, {after:.1f} MB now"]
    stored = sum(not why for why in done.weights.values())
    if done.weights:
        lines.append(f"{stored} of {len(done.weights)} float32 variables are stored so")
        reasons = sorted({why for why in done.weights.values() if why})
        lines.extend(
            f"  float32: {sum(w == why for w in done.weights.values())}: {why}" for why in reasons
        )
    return lines
