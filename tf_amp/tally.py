"""What the rewrites of a process add up to."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graph_passes import Report, RewriteResult


@dataclasses.dataclass(frozen=True)
class NodeCounts:
    """Node and cast counts of one graph, or of several added up.

    Attributes:
        total: nodes of the original graph.
        converted: nodes that now work in the target dtype.
        casts: casts inserted, in both directions.
        allow: converted nodes whose op is on the allow list.
        deny: float32 nodes whose op is on the deny list.
        blocked: nodes on a list that stay in float32 because a denied node reaches them.
    """

    total: int = 0
    converted: int = 0
    casts: int = 0
    allow: int = 0
    deny: int = 0
    blocked: int = 0

    def __add__(self, other: NodeCounts) -> NodeCounts:
        return NodeCounts(
            total=self.total + other.total,
            converted=self.converted + other.converted,
            casts=self.casts + other.casts,
            allow=self.allow + other.allow,
            deny=self.deny + other.deny,
            blocked=self.blocked + other.blocked,
        )

    @classmethod
    def of(cls, report: Report) -> NodeCounts:
        """Counts what a report says."""
        return cls(
            total=report.total_nodes,
            converted=report.converted_nodes,
            casts=report.casts_to_low + report.casts_to_float32,
            allow=report.allow_nodes,
            deny=report.denied_nodes,
            blocked=report.blocked_nodes,
        )

    def converted_alone(self) -> NodeCounts:
        """Returns what was converted, without the nodes that were looked at."""
        return NodeCounts(converted=self.converted, casts=self.casts, allow=self.allow)

    def line(self, name: str, target_dtype: str) -> str:
        """Says in one line what was done to the graph `name`."""
        return (
            f"Converted {self.converted}/{self.total} nodes of {name!r} to {target_dtype} using "
            f"{self.casts} casts ({self.allow} allow, {self.deny} deny, "
            f"{self.blocked} blocked by denied nodes)"
        )


class Tally:
    """Counters over all graphs of an installation. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = 0
        self._rewritten = 0
        self._failed = 0
        self._faults = 0
        self._sum = NodeCounts()
        self._unchanged_nodes = -1
        self._unchanged_reason: str | None = None

    def add(self, name: str, result: RewriteResult) -> NodeCounts:
        """Counts one graph and returns its own counts."""
        counts = NodeCounts.of(result.report)
        with self._lock:
            self._seen += 1
            if result.failure is not None:
                self._failed += 1
            elif result.changed:
                self._rewritten += 1
                self._sum += counts
            # The largest graph left alone tells more than the first one, which is often a
            # function of a single op.
            if not result.changed and counts.total > self._unchanged_nodes:
                self._unchanged_nodes = counts.total
                self._unchanged_reason = (
                    f"{name!r}: {result.failure or result.report.first_reason()}"
                )
        return counts

    def add_fault(self, name: str, fault: str) -> bool:
        """Counts a graph on which a host failed; returns whether it is the first one."""
        with self._lock:
            self._seen += 1
            self._failed += 1
            self._faults += 1
            if self._unchanged_reason is None:
                self._unchanged_reason = f"{name!r}: {fault}"
            return self._faults == 1

    @property
    def rewritten(self) -> int:
        """How many graphs were changed."""
        return self._rewritten

    @property
    def failed(self) -> int:
        """How many graphs were left alone because something failed."""
        return self._failed

    def why_nothing(self) -> str:
        """Says why no graph was changed, from the largest graph that was looked at."""
        with self._lock:
            if self._unchanged_reason is None:
                return "no function was traced and no session ran a graph while it was on."
            return f"the largest graph looked at was {self._unchanged_reason}"

    def as_dict(self) -> dict[str, int]:
        """Returns the counters under the names that `status()` gives them."""
        with self._lock:
            return {
                "graphs_seen": self._seen,
                "graphs_rewritten": self._rewritten,
                "graphs_failed": self._failed,
                "nodes_total": self._sum.total,
                "nodes_converted": self._sum.converted,
                "casts": self._sum.casts,
            }
