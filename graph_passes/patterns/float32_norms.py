"""Normalizations that compute in float32 inside, while they take and give the target dtype.

The statistics of a normalization are denied, and with them the pass leaves all that follows up to
the next op of the infer or allow list in float32: residual sums and dropouts among it. As a unit,
a normalization denies nothing outside: x is cast up once, y is cast down once, and so are dy and
dx. Large terms that cancel in dx are still added in float32.
"""

from __future__ import annotations

from collections.abc import Collection

from graph_passes.op_lists import FLOAT32
from graph_passes.patterns.edits import GraphEdits, NearMiss
from graph_passes.patterns.layer_norm import Norm, find_norm
from graph_passes.patterns.layer_norm_gradient import find_gradient
from graph_passes.patterns.matching import Matcher, NoMatchError

CENTRED = "layer-norm"
UNCENTRED = "rms-norm"


def rule_of(norm: Norm) -> str:
    """The rule that a normalization falls under."""
    return CENTRED if norm.is_centred else UNCENTRED


def keep_norms_inside(edits: GraphEdits, rules: Collection[str]) -> None:
    """Lists the nodes of every normalization, with its gradient, as float32 units.

    Args:
        edits: receives the lists of nodes, the units and the near misses.
        rules: which of `CENTRED` and `UNCENTRED` are in force.
    """
    view = edits.view
    matcher = Matcher(view)
    for number in view.of_op("Rsqrt"):
        if view.nodes[number].name in edits.listed:
            continue
        try:
            norm = find_norm(matcher, number)
            if norm is None or rule_of(norm) not in rules:
                continue
            gradient = find_gradient(matcher, norm)
        except NoMatchError as miss:
            edits.misses.append(NearMiss(view.nodes[number].name, str(miss)))
            continue
        inside = norm.nodes | (gradient.nodes if gradient is not None else frozenset())
        edits.listed.update((view.nodes[n].name, FLOAT32) for n in sorted(inside))
        edits.units.append(f"{rule_of(norm)}: {view.nodes[norm.output].name}")
