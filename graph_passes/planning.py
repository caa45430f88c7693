"""From a painted graph to a plan: what will change, and why each vertex is as it is."""

from __future__ import annotations

import dataclasses

import numpy as np

from graph_passes.canvas import Canvas
from graph_passes.reasons import Reason


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a rewrite will do. Making it changes nothing.

    Attributes:
        canvas: the painted graph.
        low: the vertices to be retyped, in order.
        cut: the edges that need a Cast, in order.
    """

    canvas: Canvas
    low: tuple[int, ...]
    cut: tuple[int, ...]

    def reason(self, vertex: int) -> Reason:
        """The one reason for a float32 vertex's dtype."""
        canvas = self.canvas
        code = canvas.why[vertex]
        if code:
            return Reason(code)
        if not canvas.listed[vertex]:
            return Reason.UNLISTED
        if not canvas.has_kernel(vertex):
            return Reason.NO_KERNEL
        return Reason.NO_ALLOW_NEAR

    def path(self, vertex: int) -> tuple[str, ...]:
        """The nodes through which a denied op reaches a vertex, the denied op first."""
        view, parents = self.canvas.view, self.canvas.parents
        path = [vertex]
        while path[-1] in parents and len(path) <= len(parents):
            path.append(parents[path[-1]])
        return tuple(view.node_of(step).name for step in reversed(path))


def make_plan(canvas: Canvas) -> Plan:
    """Reads the colours off a painted graph.

    An edge needs a Cast where exactly one of its ends goes low.
    """
    low = np.frombuffer(bytes(canvas.low), bool)
    cut = low[canvas.view.sources] != low[canvas.view.targets]
    return Plan(
        canvas=canvas,
        low=tuple(np.flatnonzero(low).tolist()),
        cut=tuple(np.flatnonzero(cut).tolist()),
    )
