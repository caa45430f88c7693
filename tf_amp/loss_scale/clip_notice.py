"""Says which gradients were clipped while they were multiplied by the loss scale."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_amp.loss_scale.unscaled import DIVISIONS

_LOGGER = logging.getLogger("tf_amp.loss_scale")

_TEXT = (
    "Gradients were clipped by %s while they were multiplied by the loss scale, so they are far "
    "smaller than the bound once they are divided by it. %s"
)
_BEHIND = (
    "Have the optimizer clip (global_clipnorm=, clipnorm=, clipvalue= of Keras), or clip what "
    "optimizer.unscale(gradients) gives: an optimizer of tf_amp.loss_scale.wrap_optimizer() has "
    "it, also for compile()."
)
_WITHIN = (
    "There (tf.custom_gradient), clip what manager.unscale([dy]) gives, and return "
    "manager.multiply() of that, with the manager of an optimizer of "
    "tf_amp.loss_scale.wrap_optimizer(), also for compile(): optimizer.manager. bfloat16 needs no "
    "scale."
)
# What may stand between gradients that were clipped and the one that is applied.
_LINEAR_OPS = frozenset(
    {"AddN", "AddV2", "Cast", "Identity", "Mean", "Mul", "RealDiv", "Reshape", "Sum"}
)
_CLIPS = re.compile(r"(.*/)?clip_by_(value|norm|global_norm|average_norm)(_\d+)?(/.*)?")


class ClipNotice:
    """The notice of one loss scale, which is given once."""

    def __init__(self) -> None:
        self._is_given = False

    def look(self, gradients: Sequence[Any], factor: tf.Tensor | None) -> None:
        """Warns, the first time, of gradients that were clipped before they are divided.

        Args:
            gradients: Tensors or `tf.IndexedSlices`, or None.
            factor: By what their loss was multiplied, None where that is not known.
        """
        if self._is_given:
            return
        if clip := clipped_behind(gradients):
            remedy = _BEHIND
        elif hasattr(factor, "graph") and (clip := clipped_within(gradients, factor)):
            remedy = _WITHIN
        else:
            return
        self._is_given = True
        _LOGGER.warning(_TEXT, clip, remedy)


def clipped_behind(gradients: Iterable[Any]) -> str:
    """The op of a graph that clipped some gradients, or what they are the sum of; "" for none.

    Per-example gradients are clipped before they are averaged, and noise may be added after. The
    gradient of something that was clipped is not meant. Eager tensors tell nothing.
    """
    waiting = [op for g in gradients if (op := getattr(g, "op", None)) is not None]
    seen = set(waiting)
    for op in waiting:
        if _is_of_gradient(op):
            continue
        if _CLIPS.fullmatch(op.name):
            return str(op.name)
        if op.type in _LINEAR_OPS:
            found = {tensor.op for tensor in op.inputs} - seen
            seen |= found
            waiting += found
    return ""


def clipped_within(gradients: Iterable[Any], factor: tf.Tensor) -> str:
    """The op of a `tf.custom_gradient` that clips what some gradients are made of; "" for none.

    Args:
        gradients: Tensors of a graph, `tf.IndexedSlices`, or None.
        factor: The tensor of a graph that the loss was multiplied by. What is divided by it, or of
            which the sign is taken, before it is clipped is not meant.
    """
    operations = factor.graph.get_operations()
    later = operations[operations.index(factor.op) + 1 :]
    clips = {op for op in later if _CLIPS.fullmatch(op.name) and not _is_of_gradient(op)}
    if not clips:  # as nearly always: what an op reads takes longer to ask
        return ""
    scaled, clipped = {factor.op}, dict[Any, str]()
    for op in later:
        read = [tensor.op for tensor in op.inputs]
        if scaled.isdisjoint(read):
            continue
        if op in clips:
            clipped[op] = op.name
        elif op.type == "Sign" or (op.type in DIVISIONS and read[1] in scaled):
            continue
        elif found := next(filter(None, map(clipped.get, read)), None):
            clipped[op] = found
        scaled.add(op)
    return next(filter(None, (clipped.get(getattr(g, "op", None)) for g in gradients)), "")


def _is_of_gradient(op: tf.Operation) -> bool:
    return "gradient_tape/" in op.name or "gradients/" in op.name
