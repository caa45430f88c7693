"""All normalizations over statistics of single examples in a graph, with their gradients."""

from __future__ import annotations

import dataclasses

from graph_passes.patterns.edits import GraphEdits
from graph_passes.patterns.layer_norm import Norm, find_norm
from graph_passes.patterns.layer_norm_gradient import NormGradient, find_gradient
from graph_passes.patterns.matching import Matcher

CENTRED = "layer-norm"
UNCENTRED = "rms-norm"


@dataclasses.dataclass(frozen=True)
class FoundNorm:
    """A normalization.

    Attributes:
        forward: its forward half.
        gradient: its gradient, None where the graph has none.
    """

    forward: Norm
    gradient: NormGradient | None

    @property
    def inside(self) -> frozenset[int]:
        """The numbers of its nodes."""
        forward = self.forward.nodes | self.forward.weighting
        return forward | (self.gradient.nodes if self.gradient else frozenset())

    @property
    def rule(self) -> str:
        """The rule that it falls under."""
        return CENTRED if self.forward.is_centred else UNCENTRED


def find_norms(edits: GraphEdits, matcher: Matcher) -> list[FoundNorm]:
    """Finds every normalization.

    Args:
        edits: receives the near misses.
        matcher: reads the graph.

    Returns:
        The normalizations, in the order of their Rsqrt nodes.
    """

    def find(number: int) -> FoundNorm | None:
        norm = find_norm(matcher, number)
        return None if norm is None else FoundNorm(norm, find_gradient(matcher, norm))

    found = [edits.attempt(number, find) for number in matcher.view.of_op("Rsqrt")]
    return [norm for norm in found if norm is not None]
