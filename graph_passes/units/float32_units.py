"""Units that compute in float32 inside, while they take and give the target dtype.

Statistics and exponentials are denied, and with them the pass leaves all that follows up to the
next op of the infer or allow list in float32: residual sums and dropouts among it. As a unit, a
normalization denies nothing outside: x is cast up once, y is cast down once, and so are
dy and dx. Large terms that cancel in dx are still added in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from graph_passes.policy.op_lists import FLOAT32
from graph_passes.rewriter.editor import GraphEdits


@dataclasses.dataclass(frozen=True)
class Float32Unit:
    """A subgraph that stays float32 and denies nothing outside.

    Attributes:
        kind: the pattern that it is an instance of.
        output: the node that makes its result.
        inside: its nodes.
    """

    kind: str
    output: int
    inside: frozenset[int]


def keep_inside(edits: GraphEdits, units: Iterable[Float32Unit]) -> None:
    """Lists the nodes of units as float32, whatever other units have listed them as.

    Args:
        edits: receives the lists of nodes and the units.
        units: the units.
    """
    names = edits.view.names
    for unit in units:
        inside = [names[number] for number in sorted(unit.inside)]
        edits.propose(
            unit.kind,
            unit.output,
            lambda new, inside=inside: new.node_lists.update(dict.fromkeys(inside, FLOAT32)),  # type: ignore[misc]
        )
