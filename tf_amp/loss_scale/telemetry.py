"""Counters of all loss scales of the process, and their TensorBoard summaries."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from tf_amp.loss_scale.manager import LossScaleManager

# Summary tag of each state field.
TAGS = {
    "scale": "amp/loss_scale",
    "good_steps": "amp/good_steps",
    "skipped_steps": "amp/skipped_steps",
    "skipped_in_a_row": "amp/skipped_in_a_row",
}
_MANAGERS: weakref.WeakSet[LossScaleManager] = weakref.WeakSet()


def register(manager: LossScaleManager) -> None:
    """Includes a manager in `counters` for as long as it lives."""
    _MANAGERS.add(manager)


def counters() -> dict[str, Any]:
    """The loss scales of this process and how many steps they skipped.

    Returns:
        `managers` (how many there are), `skipped_steps` (sum over those that can be read) and
        `loss_scales`, a list with name, rule and state of each. The state is None for a manager
        used in v1 graphs, which only a session can read: see `LossScaleManager.state`.
    """
    scales = []
    skipped_steps = 0
    for manager in sorted(_MANAGERS, key=lambda one: one.name):
        entry: dict[str, Any] = {
            "name": manager.name,
            "rule": type(manager.rule).__name__,
            "state": None,
        }
        with tf.init_scope():
            if tf.executing_eagerly():
                state = manager.state()
                entry["state"] = {field: getattr(state, field) for field in TAGS}
                skipped_steps += state.skipped_steps
        scales.append(entry)
    return {"managers": len(scales), "skipped_steps": skipped_steps, "loss_scales": scales}


def write_summary(variables: Mapping[str, tf.Variable], step: int) -> None:
    """Writes state variables to the default summary writer.

    Args:
        variables: The state variables by field name.
        step: The step to file the values under.
    """
    # `tf.summary.scalar` needs the package tensorboard, which TensorFlow no longer brings along.
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.plugin_data.plugin_name = "scalars"
    metadata.data_class = 1  # DATA_CLASS_SCALAR of tensorflow/core/framework/summary.proto
    for field, tag in TAGS.items():
        tf.summary.write(tag, tf.cast(variables[field], tf.float32), step, metadata)
