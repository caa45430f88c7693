"""The underflow meter: how much of each gradient float16 cannot hold at the current scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

# The smallest positive float16 is 2^-24. Rounding to nearest takes anything up to half of it,
# the tie included, to zero.
LARGEST_FLUSHED = 2.0**-25


@dataclasses.dataclass(frozen=True)
class VariableUnderflow:
    """The underflow of one variable's gradient.

    Attributes:
        name: The variable's name.
        elements: How many elements the gradient has (of a sparse one: those that are stored).
        zero: How many are zero in float32 already, for example behind a ReLU.
        flushed: How many are not zero, but would be in float16 at the scale.
        scale_needed: The smallest power of two that would keep every element, or None if there
            is none to keep.
    """

    name: str
    elements: int
    zero: int
    flushed: int
    scale_needed: float | None

    @property
    def share(self) -> float:
        """The share of the elements that would be flushed, between 0 and 1."""
        return self.flushed / self.elements if self.elements else 0.0


def measure_underflow(
    grads_and_vars: Iterable[tuple[Any, Any]], scale: Any = 1.0
) -> tuple[VariableUnderflow, ...]:
    """Counts, per variable, the gradient elements that float16 would flush to zero.

    Meant for a step now and then, not for each: it reads the gradients to the host. The gradients
    must be float32 gradients of float32 computation, since an element that was flushed already
    looks like any other zero.

    Args:
        grads_and_vars: Pairs of an unscaled float32 gradient (or None, which is left out) and its
            variable, or the name of it.
        scale: The loss scale to judge by; a number or a scalar tensor. Default 1, no scaling.

    Returns:
        One `VariableUnderflow` for each gradient, in the same order.

    Raises:
        RuntimeError: If called while a graph is being built.
    """
    if not tf.executing_eagerly():
        raise RuntimeError(
            "measure_underflow() reads gradients to the host, so it cannot run inside a "
            "tf.function or a v1 graph. Return the gradients from the function and measure them "
            "outside."
        )
    return tuple(
        _measure_one(gradient, _name(variable), float(scale))
        for gradient, variable in grads_and_vars
        if gradient is not None
    )


def _name(variable: Any) -> str:
    if isinstance(variable, str):
        return variable
    path = getattr(variable, "path", None)
    return str(path if path else variable.name).removesuffix(":0")


def _measure_one(gradient: Any, name: str, scale: float) -> VariableUnderflow:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    # In float64 the product is exact, so that the comparison decides as float16 rounding would.
    magnitudes = tf.abs(tf.cast(values, tf.float64))
    nonzero = magnitudes[magnitudes > 0]
    flushed = tf.reduce_sum(tf.cast(nonzero * scale <= LARGEST_FLUSHED, tf.int64))
    elements, kept = int(tf.size(magnitudes)), int(tf.size(nonzero))
    needed = None
    if kept:
        smallest = float(tf.reduce_min(nonzero))
        needed = 1.0
        while smallest * needed <= LARGEST_FLUSHED:
            needed *= 2.0
    return VariableUnderflow(name, elements, elements - kept, int(flushed), needed)
