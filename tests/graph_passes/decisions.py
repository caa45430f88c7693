"""What became of each type attribute, as the remarks of a report say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from graph_passes import Reason, Report


class Decision(NamedTuple):
    """What became of one type attribute of one node, with the fields of its remark."""

    node: str
    op: str
    attr: str
    converted: bool
    reason: Reason
    path: tuple[str, ...]


def decisions_of(report: Report) -> tuple[Decision, ...]:
    """One entry for each float32 type attribute of the graph, in node order."""
    return tuple(
        Decision(
            "/".join(filter(None, (r.function, r.node))),
            r.op,
            r.attr,
            r.kind == "converted",
            Reason[r.rule.upper()],
            r.path,
        )
        for r in report.remarks().remarks
        if r.kind in ("converted", "kept")
    )


def reasons_of(report: Report) -> Mapping[str, str]:
    """Node -> why it was converted or not; the first of its type attributes counts."""
    reasons: dict[str, str] = {}
    for decision in decisions_of(report):
        text = ": ".join(filter(None, (decision.reason.text, " -> ".join(decision.path))))
        reasons.setdefault(decision.node, text)
    return reasons
