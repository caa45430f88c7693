"""``tf-amp compare``: two models on the same inputs."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_amp.cli.numbers import amount, count, count_or_none
from tf_amp.cli.strict_json import strict_json
from tf_amp.terminal import table
from tf_amp.tool_error import ToolError

if TYPE_CHECKING:
    from tf_amp.comparison.compare import Comparison
    from tf_amp.comparison.output_figures import OutputFigures

_SHOWN = 8


def add_parser(commands: Any) -> None:
    """Adds the command to the sub-parsers of ``tf-amp``."""
    parser = commands.add_parser(
        "compare",
        help="run two models on the same inputs and say how far they are apart",
        description="Runs two models on the same inputs, the float32 one first, and prints how far "
        "apart their outputs are, how fast both run, and how much they take of disk and memory.",
        epilog="Exit status: 0; 1 if a model cannot be compared, or an output is beyond the "
        "tolerance; 2 for a wrong call.",
    )
    for name, text in (("first", "the model that is right"), ("second", "the model to judge")):
        parser.add_argument(
            name, type=Path, metavar="MODEL", help=f"{text}: SavedModel, .pb, .keras"
        )
    parser.add_argument(
        "--inputs",
        metavar="FILE.npz|FILE.tfrecord|MODULE:FUNCTION",
        help="arrays by input name; tf.train.Example records with features of these names, each a "
        "row; or a function that gives dicts of arrays, one for a sample (default: random by "
        "signature)",
    )
    parser.add_argument(
        "--seed", type=count_or_none, default=0, help="of random inputs (default: 0)"
    )
    parser.add_argument(
        "--batch", type=count, default=8, help="rows of random inputs and of records (default: 8)"
    )
    parser.add_argument(
        "--samples", type=count, default=4, help="random inputs, or batches of records (default: 4)"
    )
    parser.add_argument(
        "--rounds",
        type=count_or_none,
        default=7,
        help="timed calls of each, in turns; 0: neither time nor memory (default: 7)",
    )
    parser.add_argument(
        "--tolerance",
        type=amount,
        metavar="X",
        help="fail if a difference is over X times the largest magnitude of its output, if a value "
        "overflowed, or if a larger share of integers differs",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the figures as one page, with a chart"
    )
    parser.set_defaults(run=run, needs_tensorflow=True)


def run(arguments: argparse.Namespace) -> int:
    """Compares the models and prints the figures."""
    from tf_amp.comparison.compare import compare
    from tf_amp.comparison.samples import read_samples

    found = compare(
        arguments.first,
        arguments.second,
        read_samples(arguments.inputs, batch=arguments.batch, count=arguments.samples)
        if arguments.inputs
        else None,
        seed=arguments.seed,
        batch=arguments.batch,
        count=arguments.samples,
        rounds=arguments.rounds,
        boundaries=True,
        memory=arguments.rounds > 0,
    )
    print(strict_json(dataclasses.asdict(found)) if arguments.json else _text(found))
    if arguments.html is not None:
        from tf_amp.comparison.page import page
        from tf_amp.whole_files import write_whole

        names = str(arguments.first), str(arguments.second)
        try:
            write_whole(arguments.html, page(found, *names, arguments.tolerance).encode())
        except OSError as error:
            raise ToolError(f"the page cannot be written: {error}") from error
    if arguments.tolerance is None:
        return 0
    beyond = found.beyond(arguments.tolerance)
    for output in beyond:
        print(
            f"tf-amp compare: {output.signature}/{output.name} is beyond the tolerance of "
            f"{arguments.tolerance:g}.",
            file=sys.stderr,
        )
    return bool(beyond)


def _figures(o: OutputFigures) -> tuple[str, ...]:
    name = f"{o.signature}/{o.name}"
    if not o.is_float:
        return (name, *"-" * 5)
    return (
        name,
        f"{o.max_abs:.3g}",
        f"{o.max_relative:.3g}",
        f"{o.cosine:.6f}",
        f"{o.overflowed:.2%}",
        f"{o.flushed:.2%}",
    )


def _text(found: Comparison) -> str:
    head = ("max abs", "relative", "cosine", "overflowed", "flushed")
    rows = [
        (
            *_figures(o),
            "-" if o.top_1 is None else f"{o.top_1:.1%}",
            "-" if o.top_k is None else f"{o.top_k:.1%}",
        )
        for o in found.outputs
    ]
    speed = [
        (key, f"{a * 1e3:.2f} ms", f"{b * 1e3:.2f} ms", f"{a / b:.2f}")
        for key, (a, b) in found.seconds.items()
    ]
    parts = [table(("output", *head, "top 1", "top 5"), rows)]
    parts.extend(
        f"{o.signature}/{o.name}: {1 - o.compared:.2%} of the values are not finite in the first "
        "model, and are not compared"
        for o in found.outputs
        if o.compared < 1
    )
    if found.boundaries:
        shown = sorted(found.boundaries, key=lambda o: (-o.overflowed, -o.max_relative))[:_SHOWN]
        inside = [(*_figures(o), o.op) for o in shown]
        of = f"the worst {len(shown)} of {len(found.boundaries)} in low precision inside"
        parts.append(table((of, *head, "op"), inside))
    if found.boundaries_alone:
        parts.append(f"{found.boundaries_alone} more have no counterpart in the first model")
    if speed:
        parts.append(table(("signature", "first", "second", "times as fast"), speed))
    sizes = [("on disk", *map(_megabytes, found.bytes))]
    if any(found.memory):
        sizes.append(("memory, loaded and called", *map(_megabytes, found.memory)))
    parts.append(table((f"{found.samples} samples", "first", "second"), sizes))
    return "\n\n".join(parts)


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.2f} MB"
