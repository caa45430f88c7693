"""All normalizations in a graph, with their gradients."""

from __future__ import annotations

import dataclasses

from graph_passes.rewriter.editor import GraphEdits
from graph_passes.units.normalization.forward import Norm, find_forward
from graph_passes.units.normalization.gradient import NormGradient, find_gradient

OF_BATCH = "batch-norm"
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
        forward = self.forward.nodes | self.forward.statistics.weighting
        return forward | (self.gradient.nodes if self.gradient else frozenset())

    @property
    def rule(self) -> str:
        """The rule that it falls under."""
        if not self.forward.is_centred:
            return UNCENTRED
        return OF_BATCH if self.forward.statistics.is_of_batch else CENTRED


def find_norms(edits: GraphEdits) -> list[FoundNorm]:
    """Every normalization, in the order of the names of their Rsqrt nodes."""
    matcher, names = edits.matcher, edits.view.names

    def find(number: int) -> list[FoundNorm]:
        forward = find_forward(matcher, number)
        return [FoundNorm(norm, find_gradient(matcher, norm)) for norm in forward]

    numbers = sorted(edits.view.of_op("Rsqrt"), key=names.__getitem__)
    return [norm for number in numbers for norm in edits.attempt(number, find) or ()]
