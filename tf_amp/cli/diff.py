"""``tf-amp diff``: what changed between two traced runs, releases or settings."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_amp.cli.numbers import count_or_none
from tf_amp.terminal import table
from tf_amp.tool_error import WrongCallError

if TYPE_CHECKING:
    from tf_amp.tracing.difference import Difference

_SHOWN = 20


def add_parser(commands: Any) -> None:
    """Adds the command to the sub-parsers of ``tf-amp``."""
    parser = commands.add_parser(
        "diff",
        help="say what changed between two traced runs",
        description="Compares two trace directories: settings, functions with their products, "
        "casts and bytes, and the nodes whose dtype is another, each with both reasons. Process "
        "numbers, times and the places of the traces do not count.",
        epilog="Exit status: 0 if nothing changed; 1 if something did; 2 for a wrong call or a "
        "directory without a trace.",
    )
    parser.add_argument("before", type=Path, metavar="DIR1", help="the trace directory to go from")
    parser.add_argument("after", type=Path, metavar="DIR2", help="the one to compare with it")
    parser.add_argument(
        "--limit",
        type=count_or_none,
        default=_SHOWN,
        help=f"how many nodes to print (default: {_SHOWN})",
    )
    parser.add_argument("--json", action="store_true", help="everything, as one JSON object")
    parser.set_defaults(run=run, needs_tensorflow=True)


def run(arguments: argparse.Namespace) -> int:
    """Prints what changed."""
    from tf_amp.tracing.difference import compare
    from tf_amp.tracing.jobs import jobs_of
    from tf_amp.tracing.trace import TraceError, read_traces

    try:
        found = compare(
            jobs_of(read_traces(arguments.before)), jobs_of(read_traces(arguments.after))
        )
    except TraceError as error:
        raise WrongCallError(str(error)) from error  # 1 is for a difference
    if arguments.json:
        print(json.dumps(_plain(found), indent=1, default=str))
    else:
        print("\n\n".join(_paragraphs(found, arguments.limit)) or "Nothing changed.")
    return 1 if found else 0


def _plain(found: Difference) -> dict[str, Any]:
    from tf_amp.tracing.figures import plain

    return {
        "settings": [{"name": n, "before": b, "after": a} for n, b, a in found.settings],
        "functions": [
            {
                "name": f.name,
                "before": f.before and plain(f.before),
                "after": f.after and plain(f.after),
            }
            for f in found.functions
        ],
        "nodes": [dataclasses.asdict(node) for node in found.nodes],
    }


def _paragraphs(found: Difference, limit: int) -> Iterator[str]:
    from tf_amp.tracing.text import in_bytes, percent

    def figures(of: Any) -> tuple[str, ...]:
        if of is None:
            return "-", "-", "-", "-"
        products = f"{of.products_low} of {of.products}"
        return products, percent(of.flops_share), str(of.casts), in_bytes(of.cast_bytes)

    def change(before: str, after: str) -> str:
        return before if before == after else f"{before} -> {after}"

    if found.settings:
        rows = [(name, _told(before), _told(after)) for name, before, after in found.settings]
        yield table(("setting", "before", "after"), rows)
    if found.functions:
        head = ("function", "products low", "FLOPs low", "casts", "cast bytes")
        changes = (
            (f.name, *map(change, figures(f.before), figures(f.after))) for f in found.functions
        )
        yield table(head, changes)
    both = [(n, n.before, n.after) for n in found.nodes if n.before and n.after]
    lines = ["Nodes whose dtype changed:"] if both else []
    for node, before, after in both[:limit]:
        attr = f" ({node.attr})" if node.attr not in ("", "T") else ""
        at = f", at {node.lines[0]}" if node.lines else ""
        lines += [
            f"{node.function}: {node.op} {node.node}{attr}{at}",
            f"    {': '.join(before)} -> {': '.join(after)}",
        ]
    if len(both) > limit:
        lines.append(f"{len(both) - limit} more nodes; --limit {len(both)} prints them all.")
    if alone := len(found.nodes) - len(both):
        lines.append(f"{alone} nodes are in one of the two only; --json names them.")
    if lines:
        yield "\n".join(lines)


def _told(value: Any) -> str:
    if value is None:
        return "-"
    return json.dumps(value) if isinstance(value, (list, dict)) else str(value) or '""'
