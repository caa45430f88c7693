"""``tf-amp lists``: prints the op lists and the rules in force, and who put each op there."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tf_amp.cli.options import add_target, config_for
from tf_amp.env_config import read_settings
from tf_amp.terminal import table
from tf_amp.tool_error import ToolError

if TYPE_CHECKING:
    from graph_passes import OpLists, Rule


def add_parser(commands: Any) -> None:
    """Adds the command to the sub-parsers of ``tf-amp``."""
    parser = commands.add_parser(
        "lists",
        help="print the op lists and rules in force and where they come from",
        description="Prints for each op type the list that it is on, who put it there and why: the "
        "lists that are shipped, then what the environment changes. Behind them the rules on "
        "single nodes, the weakest level first.",
        epilog="Exit status: 0; 1 if an op that is asked for is on no list and nothing is written "
        "down of it; 2 for a wrong call or setting.",
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="only these op types")
    parser.add_argument(
        "--diff", action="store_true", help="only what differs from the shipped lists"
    )
    add_target(parser)
    parser.add_argument(
        "--json", action="store_true", help='as one JSON object: "ops", "rules", "notes"'
    )
    parser.set_defaults(run=run, needs_tensorflow=True)


class Row(NamedTuple):
    """One op type.

    Attributes:
        op: its name.
        list_name: the list that it is on, "" for none.
        shipped: the list that it is on as shipped.
        origin: who put it there.
        reason: why, as the shipped lists say it.
    """

    op: str
    list_name: str
    shipped: str
    origin: str
    reason: str


def run(arguments: argparse.Namespace) -> int:
    """Prints the lists."""
    settings = read_settings()
    from graph_passes import load_op_lists
    from graph_passes.policy.rules import LEVELS

    config = config_for(settings, arguments)
    lists = load_op_lists(config)
    shipped = load_op_lists(dataclasses.replace(config, list_edits=(), level=""))
    edits = {edit.op: edit.source for edit in config.list_edits}
    rows = list_rows(lists, shipped, edits, settings.decided_by.get("level", "the level"))
    unknown = sorted(set(arguments.ops) - {row.op for row in rows})
    if arguments.diff:
        rows = [row for row in rows if row.list_name != row.shipped]
    if arguments.ops:
        rows = [row for row in rows if row.op in arguments.ops]
    rules = sorted(config.rules, key=lambda rule: LEVELS.index(rule.level))
    if arguments.ops:
        rules = [rule for rule in rules if not rule.op or rule.op in arguments.ops]
    if arguments.json:
        ops = [row._asdict() for row in rows]
        told = {"ops": ops, "rules": [r.to_dict() for r in rules], "notes": lists.notes}
        print(json.dumps(told, indent=1))
    else:
        print(f"{config.target_dtype} on {config.device}")
        if rows:
            head = ("op", "list", "shipped", "by", "reason")
            print(table(head, [(r.op, r.list_name or "-", r.shipped or "-", *r[3:]) for r in rows]))
        else:
            print("No op is elsewhere than in the shipped lists." if arguments.diff else "No op.")
        if rules:
            head = ("rule", "action", "level", "nodes", "why")
            print("\n" + table(head, map(_cells, rules)))
        for note in lists.notes:
            print(f"note: {note}")
    if unknown:
        raise ToolError(f"on no list: {', '.join(unknown)}")
    return 0


def _cells(rule: Rule) -> tuple[str, ...]:
    return (rule.origin, rule.action, rule.level, rule.criteria, rule.why or "-")


def list_rows(lists: OpLists, shipped: OpLists, edits: Mapping[str, str], level: str) -> list[Row]:
    """A row for each op type of which the lists say anything, sorted by name.

    Args:
        lists: those in force.
        shipped: those without edits.
        edits: op type -> who edited its place last.
        level: who decided the level, which takes ops off lists.
    """
    rows = []
    for op in sorted({*lists.entries, *lists.unlisted, *shipped.entries}):
        now, before = lists.list_of(op) or "", shipped.list_of(op) or ""
        entry = shipped.entries.get(op)
        reason = entry.reason if entry else shipped.unlisted.get(op, "")
        origin = "shipped" if now == before else edits.get(op, level)
        rows.append(Row(op, now, before, origin, reason))
    return rows
