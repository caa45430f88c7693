"""What a rewrite gives back."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping

from tensorflow.core.framework import function_pb2, node_def_pb2

from graph_passes.ir.copying import Graph, nodes_of
from graph_passes.plan_remarks import Lines, lines_within, no_lines
from graph_passes.policy.rules import Rule
from graph_passes.remarks import FunctionRemarks, Remark
from graph_passes.report import Report


@dataclasses.dataclass(frozen=True)
class RewriteResult:
    """The outcome of one rewrite.

    Attributes:
        proto: the rewritten graph, or the caller's own where nothing changed or something failed.
        report: what was done and why.
        changed: whether `proto` differs from the original.
        failure: why the rewrite was given up, None where it was not.
        rejected: the graph that failed a post-condition, for inspection.
        extra_functions: functions that a rewritten function calls and that its library lacks; each
            stands behind those it calls itself. A rewritten GraphDef has them in its library.
        function_reports: the reports of functions of a GraphDef's library that were planned by
            themselves, by name; those planned with their callers are in `report`.
        numbers: the places of conversions and units among those of the process, by what
            `numbered` gives for their remarks.
    """

    proto: Graph
    report: Report
    changed: bool = False
    failure: str | None = None
    rejected: Graph | None = None
    extra_functions: tuple[function_pb2.FunctionDef, ...] = ()
    function_reports: Mapping[str, Report] = dataclasses.field(default_factory=dict)
    numbers: Mapping[tuple[str, str, str], int] = dataclasses.field(default_factory=dict)

    @property
    def graph_def(self) -> Graph:
        """The same as `proto`."""
        return self.proto

    @property
    def matched(self) -> Counter[Rule]:
        """Rule of the user -> how many nodes meet its criteria, functions included."""
        total: Counter[Rule] = Counter()
        for report in (self.report, *self.function_reports.values()):
            total.update(report.matched)
        return total

    def nodes(self) -> Iterator[node_def_pb2.NodeDef]:
        """The nodes of `proto`, but not of its library, and of `extra_functions`."""
        return itertools.chain.from_iterable(map(nodes_of, (self.proto, *self.extra_functions)))

    def remarks(
        self, name: str = "", *, lines: Lines = no_lines, products_only: bool = False
    ) -> FunctionRemarks:
        """Everything that was decided, functions included, as `Report.remarks`."""
        found = self.report.remarks(
            name, failure=self.failure, lines=lines, products_only=products_only
        )
        remarks = []
        for rule, count in self.matched.items():
            met = "1 node meets" if count == 1 else f"{count} nodes meet"
            remarks.append(Remark(kind="note", rule=str(rule), reason=f"{met} its criteria"))
        remarks.extend(found.remarks)
        for function, report in self.function_reports.items():
            inner = report.remarks(lines=lines_within(lines, function), products_only=products_only)
            remarks.extend(
                dataclasses.replace(remark, function=remark.function or function)
                for remark in inner.remarks
                if remark.kind != "note"  # the main graph has them too
            )
        numbers = [self.numbers.get(numbered(remark)) for remark in remarks]
        remarks = [
            dataclasses.replace(remark, number=number) if number else remark
            for remark, number in zip(remarks, numbers, strict=True)
        ]
        return dataclasses.replace(found, remarks=tuple(remarks))


def numbered(remark: Remark) -> tuple[str, str, str]:
    """What a conversion or unit is known by in its graph: (rule of a unit, function, node)."""
    return (remark.rule if remark.kind == "unit" else "", remark.function, remark.node)
