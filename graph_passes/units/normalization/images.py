"""A tensor with one axis of channels, seen as the images that a fused batch normalization takes.

`FusedBatchNormV3` takes rank 4, channels last or second. A tensor of another rank, or with its
channels elsewhere, is a Reshape away from one of both:

    channels last:  [1, all other axes, 1, channels]
    otherwise:      [axes before, channels, axes behind, 1]
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from graph_passes.ir.graph_view import Shape, elements
from graph_passes.rewriter.matcher import NoMatchError
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.normalization.norms import FoundNorm

_MIN_EPSILON = {"GPU": float(np.float32(1e-5)), "CPU": 0.0}
"""Device -> the smallest epsilon that its fused kernels take; on a GPU that is cuDNN's."""


@dataclasses.dataclass(frozen=True)
class Images:
    """The layout of a tensor.

    Attributes:
        shape: its static shape; the rank is known, sizes may be None.
        axis: the axis of the channels, counted from 0.
    """

    shape: Shape
    axis: int

    @property
    def channels(self) -> int | None:
        """The number of channels, None where it is not known."""
        return self.shape[self.axis]

    @property
    def sizes(self) -> Shape:
        """The static shape of the images."""
        if len(self.shape) == 4 and self.axis in (1, 3):
            return self.shape
        before, behind = self.shape[: self.axis], self.shape[self.axis + 1 :]
        if not behind:
            return (1, elements(before), 1, self.channels)
        return (elements(before), self.channels, elements(behind), 1)

    def attributes(self, found: FoundNorm, device: str) -> dict[str, Any]:
        """What the fused op of a normalization, and that of its gradient, are told.

        Raises:
            NoMatchError: they cannot stand for it, or its gradient is not proved to be one.
        """
        epsilon, least = found.forward.statistics.epsilon, _MIN_EPSILON[device]
        if found.forward.statistics.weights is not None:
            raise NoMatchError("the statistics are weighted")
        if epsilon < least:
            raise NoMatchError(f"epsilon {epsilon:g} is below {least:g}")
        if found.gradient is not None and not found.gradient.is_proved:
            raise NoMatchError("the shapes inside the gradient are not known")
        return {
            "epsilon": epsilon,
            "data_format": "NHWC" if self.axis == len(self.shape) - 1 else "NCHW",
            "is_training": not found.forward.is_stored,
            "shape": self.sizes,
        }

    def enter(self, new: Replacement, name: str, tensor: str) -> str:
        """A tensor of this layout as images; itself where it is such."""
        return tensor if self.sizes == self.shape else new.reshape(tensor, self.sizes, name=name)

    def leave(self, new: Replacement, name: str, images: str, like: str) -> str:
        """Images in the shape of the tensor `like` of this layout; themselves where they are."""
        return images if self.sizes == self.shape else new.reshape_like(images, like, name=name)
