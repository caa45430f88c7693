"""What the rewrites of a process add up to."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from graph_passes.ops.reasons import Reason
from graph_passes.policy.config import PAY_IN_FLOAT32
from tf_amp.state import FunctionStatus

if TYPE_CHECKING:
    from graph_passes import Report, RewriteResult, Rule

_MOST_FUNCTIONS = 100
SLOWER = {
    Reason.SLOWER_HERE: "slower here",
    Reason.SLOWER_UNDER_XLA: "slower under XLA here",
}
"""The reasons that a cost table gives, in few words."""
_FUSED = {
    "fused-update": "update{} fused",
    "batch-norm": "batch normalization{} fused",
    "grouped-convolution": "grouped convolution{} without XLA",
    "onednn-kernel": "op{} by oneDNN's kernels",
}


@dataclasses.dataclass(frozen=True)
class NodeCounts:
    """Node and cast counts of one graph, or of several added up.

    Attributes:
        total: nodes of the original graph.
        converted: nodes that now work in the target dtype.
        casts: casts inserted, in both directions.
        products: matrix products and convolutions, by op type and by the reason why they were
            converted or not.
        fused: what became one op, or has a faster kernel, by the rule, of `PAY_IN_FLOAT32`.
    """

    total: int = 0
    converted: int = 0
    casts: int = 0
    products: Counter[tuple[str, Reason]] = dataclasses.field(default_factory=Counter)
    fused: Counter[str] = dataclasses.field(default_factory=Counter)

    def __add__(self, other: NodeCounts) -> NodeCounts:
        return NodeCounts(
            total=self.total + other.total,
            converted=self.converted + other.converted,
            casts=self.casts + other.casts,
            products=self.products + other.products,
            fused=self.fused + other.fused,
        )

    @classmethod
    def of(cls, report: Report) -> NodeCounts:
        """Counts what a report says."""
        return cls(
            total=report.total_nodes,
            converted=report.converted_nodes,
            casts=report.casts_to_low + report.casts_to_float32,
            products=report.products,
            fused=Counter({rule: report.fused[rule] for rule in PAY_IN_FLOAT32}),
        )

    def converted_alone(self) -> NodeCounts:
        """Returns what was converted, without the nodes that were looked at."""
        return NodeCounts(converted=self.converted, casts=self.casts, fused=self.fused)

    def in_float32(self) -> NodeCounts:
        """Returns the counts where the original runs, because it is faster."""
        products: Counter[tuple[str, Reason]] = Counter()
        for (op, _), count in self.products.items():
            products[op, Reason.SLOWER_HERE] += count
        return NodeCounts(total=self.total, products=products)

    def line(self, name: str, target_dtype: str | None) -> str:
        """Says in one line what was done to the graph `name`, the products first.

        Without a target dtype no graph has anything converted, which need not be said of each.
        """
        if target_dtype is None:
            return f"{name}: {_said(self.fused)}"
        all_of: Counter[str] = Counter()
        low: Counter[str] = Counter()
        for (op, reason), count in self.products.items():
            all_of[op] += count
            if reason.converts:
                low[op] += count
        what = ", ".join(f"{op} {low[op]} of {count}" for op, count in all_of.most_common())
        line = f"{name}: {what or f'{self.converted} nodes'} in {target_dtype}, "
        line += f"{self.casts} cast{'s'[: self.casts != 1]}"
        if self.fused.total():
            line += f", {_said(self.fused)}"
        if not (what or self.converted):
            line += "; it has no matrix product or convolution in float32"
        return "; ".join((line, *self.said_of_kept()))

    def said_of_kept(self) -> list[str]:
        """One phrase for each op type and reason of the products that stay float32."""
        return [
            f"{count} {op} {'stays' if count == 1 else 'stay'} float32: {why}"
            for (op, why), count in self.kept.most_common()
        ]

    @property
    def kept(self) -> Counter[tuple[str, str]]:
        """How many products stay float32, by op type and by the reason in few words."""
        found: Counter[tuple[str, str]] = Counter()
        for (op, reason), count in self.products.items():
            if not reason.converts:
                found[op, SLOWER.get(reason, reason.text)] += count
        return found

    def status(self, name: str) -> FunctionStatus:
        """The same as a row of `tf_amp.status().functions`."""
        products, kept = self.products.total(), self.kept
        return FunctionStatus(
            name=name,
            products=products,
            products_low=products - kept.total(),
            casts=self.casts,
            kept={f"{op}: {why}": count for (op, why), count in kept.most_common()},
        )


def _largest(name: str, why: str) -> str:
    return f"the largest graph looked at was {name!r}: {why}"


def _said(fused: Counter[str]) -> str:
    parts = [
        f"{fused[rule]} {text.format('s'[: fused[rule] > 1])}"
        for rule, text in _FUSED.items()
        if fused[rule]
    ]
    return ", ".join(parts) or "nothing fused"


class Tally:
    """Counters over all graphs of an installation. Every method may be called from any thread.

    Attributes:
        seen: how many graphs were looked at.
        rewritten: how many graphs were changed.
        failed: how many graphs were left alone because something failed.
        converted: how many nodes were converted.
    """

    def __init__(self) -> None:
        # A handler of a signal may trace a function while this thread is in here.
        self._lock = threading.RLock()
        self.seen = 0
        self.rewritten = 0
        self.failed = 0
        self._faults = 0
        self._nodes = self.converted = self._casts = 0
        self._fused: Counter[str] = Counter()
        self._matched: Counter[Rule] = Counter()
        self._functions: dict[int, tuple[str, NodeCounts]] = {}  # by the id of the counts
        self._unchanged_weight = (0, -1)
        self._unchanged_reason: str | None = None

    def add(
        self,
        name: str,
        result: RewriteResult,
        counts: NodeCounts,
        covered: Iterable[NodeCounts] = (),
        *,
        is_top: bool = True,
    ) -> None:
        """Counts one graph.

        Args:
            name: the graph's name, for people.
            result: what the pass returned.
            counts: the counts of the graph and of what it calls.
            covered: what was added before and is part of `counts` now.
            is_top: whether it is a graph of its own, and not a part of another.
        """
        covered = tuple(covered)
        with self._lock:
            for part in covered:
                self._functions.pop(id(part), None)
            works_at_all = counts.converted or counts.products
            if is_top and works_at_all and len(self._functions) < _MOST_FUNCTIONS:
                self._functions[id(counts)] = name, counts
            self.seen += 1
            self._matched.update(result.matched)
            if result.failure is not None:
                self.failed += 1
            elif result.changed:
                self.rewritten += 1
            self._count(counts, 1)
            for part in covered:
                self._count(part, -1)
            if not (result.changed and result.report.converted_nodes):
                self._leave(name, result, counts)

    def _leave(self, name: str, result: RewriteResult, counts: NodeCounts) -> None:
        """Takes note of a graph left alone, if it tells more than those before it.

        The largest one does, first those with products, in float32 or else in another dtype: the
        first one is often a function of a single op. What calls others is told with their
        products, by the name that its line has.
        """
        kept = counts.said_of_kept()
        nodes = counts.total if kept else result.report.total_nodes
        tells = 2 * bool(kept or result.failure) or int(bool(result.report.in_other_dtypes()))
        weight = (tells, nodes)
        if weight > self._unchanged_weight:
            self._unchanged_weight = weight
            why = result.failure or "; ".join(kept[:3]) or result.report.first_reason()
            self._unchanged_reason = _largest(name, why)

    def take_back(
        self, name: str, counts: NodeCounts, *, changed: bool, counted: bool
    ) -> NodeCounts:
        """Takes a graph back whose original runs, because it was faster in a trial.

        Args:
            name: the graph's name, for people.
            counts: what was added for it.
            changed: whether the pass changed it.
            counted: whether its counts are still part of the sum.

        Returns:
            The counts of the original, by which `add` and `rename` know its row from now on.
        """
        lost = counts.in_float32()
        with self._lock:
            self.rewritten -= changed
            if counted:
                self._count(counts, -1)
            row = self._functions.pop(id(counts), None)
            if row is not None:
                self._functions[id(lost)] = row[0], lost
            self.leave_out(_largest(name, "in float32 it was faster in a trial"), counts.total)
        return lost

    def _count(self, counts: NodeCounts, sign: int) -> None:
        for rule, count in counts.fused.items():
            self._fused[rule] += sign * count
        if counts.converted:  # else they were not counted either
            self._nodes += sign * counts.total
            self.converted += sign * counts.converted
            self._casts += sign * counts.casts

    def add_fault(self, name: str, fault: str) -> bool:
        """Counts a graph on which a host failed; returns whether it is the first one."""
        with self._lock:
            self.seen += 1
            self.failed += 1
            self._faults += 1
            if self._unchanged_reason is None:
                self._unchanged_reason = _largest(name, fault)
            return self._faults == 1

    def leave_out(self, why: str, nodes: int = 0) -> None:
        """Takes note of what is not looked at, which tells more than a graph without products.

        Args:
            why: says so, in a clause.
            nodes: how many nodes it has, 0 if that is not known.
        """
        with self._lock:
            if (2, nodes) > self._unchanged_weight:
                self._unchanged_weight = (2, nodes)
                self._unchanged_reason = why

    @property
    def knows_why(self) -> bool:
        """Whether anything was met that tells why no node was converted."""
        with self._lock:
            return self._unchanged_reason is not None

    def why_nothing(self) -> str:
        """Says that no node was converted, and why, from what tells most."""
        with self._lock:
            if self._unchanged_reason is None:
                return (
                    "no graph was converted: no function ran, those of input pipelines aside, and "
                    "no session ran a graph of four nodes or more (TensorFlow optimizes no smaller "
                    "one) while it was on. What is only traced, as for an export, stays as it is. "
                    "So does what runs eagerly: decorate the step with tf.function, and leave "
                    "run_eagerly off."
                )
            what = "no graph was converted"
            if self._fused.total():
                what = f"no matrix product or convolution was converted ({_said(self._fused)})"
            return f"{what}: {self._unchanged_reason}"

    def matches(self, rules: Iterable[Rule]) -> dict[Rule, int]:
        """How many nodes met the criteria of rules, in all graphs together."""
        with self._lock:
            return {rule: self._matched[rule] for rule in rules}

    def fused(self, rules: Iterable[str]) -> dict[str, int]:
        """How much each of some rules did of what is said of it, in all graphs together."""
        with self._lock:
            return {rule: self._fused[rule] for rule in rules}

    def as_dict(self) -> dict[str, Any]:
        """Returns the counters under the names that `status()` gives them."""
        with self._lock:
            return {
                "graphs_seen": self.seen,
                "graphs_rewritten": self.rewritten,
                "graphs_failed": self.failed,
                "nodes_total": self._nodes,
                "nodes_converted": self.converted,
                "casts": self._casts,
                "functions": tuple(c.status(name) for name, c in self._functions.values()),
            }
