"""Normalizations that compute in float32 inside, while they take and give the target dtype.

The statistics of a normalization are denied, and with them the pass leaves all that follows up to
the next op of the infer or allow list in float32: residual sums and dropouts among it. As a unit,
a normalization denies nothing outside: x is cast up once, y is cast down once, and so are dy and
dx. Large terms that cancel in dx are still added in float32.
"""

from __future__ import annotations

from collections.abc import Iterable

from graph_passes.op_lists import FLOAT32
from graph_passes.patterns.edits import GraphEdits
from graph_passes.patterns.norms import FoundNorm


def keep_norms_inside(edits: GraphEdits, norms: Iterable[FoundNorm]) -> None:
    """Lists the nodes of normalizations as float32 units.

    Args:
        edits: receives the lists of nodes and the units.
        norms: the normalizations.
    """
    nodes = edits.view.nodes
    for norm in norms:
        edits.listed.update((nodes[number].name, FLOAT32) for number in sorted(norm.inside))
        edits.units.append(f"{norm.rule}: {nodes[norm.forward.output].name}")
