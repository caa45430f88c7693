"""What one call of an optimizer does to the state of its loss scale, as tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from tf_amp.loss_scale.gradients import select
from tf_amp.loss_scale.rule import LossScale, LossScaleState
from tf_amp.loss_scale.state_variables import FIELDS


@dataclasses.dataclass(frozen=True)
class PlannedUpdate:
    """What one call of an optimizer will do to the state; all fields are scalar tensors.

    Attributes:
        before: The state before the call.
        after: The state after it.
        window_finite: Whether all gradients of the window so far are finite.
        closes_window: Whether this call ends the window; None where each call is a window.
        values: The new value of every variable, by field name.
    """

    before: LossScaleState
    after: LossScaleState
    window_finite: tf.Tensor
    closes_window: tf.Tensor | None
    values: dict[str, tf.Tensor]


def plan_update(
    rule: LossScale, window: int, variables: Mapping[str, tf.Variable], finite: tf.Tensor
) -> PlannedUpdate:
    """Computes the state after a call; writes nothing.

    All of it is arithmetic on scalars, without control flow: it costs a few small kernels, or
    none where XLA fuses them.

    Args:
        rule: The rule that moves the scale.
        window: How many calls make one update of the scale.
        variables: The state variables by field name.
        finite: Scalar bool tensor: whether all gradients of this call are finite.
    """
    before = LossScaleState(**{field: tf.convert_to_tensor(variables[field]) for field in FIELDS})
    if window == 1:
        after = rule.update(before, finite, select)
        return PlannedUpdate(before, after, finite, None, _values(after))
    position = tf.convert_to_tensor(variables["window_position"]) + 1
    window_finite = tf.logical_and(variables["window_finite"], finite)
    closes = position >= window
    closed = _values(rule.update(before, window_finite, select))
    values = {field: select(closes, closed[field], getattr(before, field)) for field in FIELDS}
    window_values = {
        "window_position": select(closes, 0, position),
        "window_finite": tf.logical_or(closes, window_finite),
    }
    return PlannedUpdate(
        before, LossScaleState(**values), window_finite, closes, {**values, **window_values}
    )


def _values(state: LossScaleState) -> dict[str, tf.Tensor]:
    return {field: getattr(state, field) for field in FIELDS}
