"""From a painted graph to a plan: what will change, and why each vertex is as it is."""

from __future__ import annotations

import dataclasses

import numpy as np

from graph_passes.coloring.state import DENY, Coloring
from graph_passes.ops.reasons import Reason


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a rewrite will do. Making it changes nothing.

    Attributes:
        coloring: the painted graph.
        low: the vertices to be retyped, in order.
        cut: the edges that need a Cast, in order.
    """

    coloring: Coloring
    low: tuple[int, ...]
    cut: tuple[int, ...]

    def reason(self, vertex: int) -> Reason:
        """The one reason for a float32 vertex's dtype."""
        coloring = self.coloring
        code = coloring.why[vertex]
        if code:
            return Reason(code)
        if not coloring.list_codes[vertex]:
            return Reason.UNLISTED
        if coloring.list_codes[vertex] == DENY:  # where nothing is allowed, nothing was painted
            return Reason.DENY_LIST
        if not coloring.has_kernel[vertex]:
            return Reason.NO_KERNEL
        return Reason.NO_ALLOW_NEAR

    def path(self, vertex: int) -> tuple[str, ...]:
        """The nodes through which a denied op reaches a vertex, the denied op first."""
        view, parents = self.coloring.view, self.coloring.parents
        path = [vertex]
        while path[-1] in parents:
            path.append(parents[path[-1]])
        # What is no vertex is a relay.
        return tuple(view.node_of(v).name for v in reversed(path) if v < len(view.dtypes))


def make_plan(coloring: Coloring) -> Plan:
    """Reads the colours off a painted graph.

    An edge needs a Cast where exactly one of its ends goes low.
    """
    low = coloring.is_low
    cut = low[coloring.view.sources] != low[coloring.view.targets]
    return Plan(
        coloring=coloring,
        low=tuple(np.flatnonzero(low).tolist()),
        cut=tuple(np.flatnonzero(cut).tolist()),
    )
