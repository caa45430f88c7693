"""What a user sees of loss scales: counters, TensorBoard summaries, a callback for `fit`."""

from __future__ import annotations

import sys
import threading
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
# No WeakSet: it shrinks in one thread while another goes through it.
_MANAGERS: list[weakref.ref[LossScaleManager]] = []
_LOCK = threading.Lock()


def register(manager: LossScaleManager) -> None:
    """Includes a manager in `counters` for as long as it lives."""
    with _LOCK:
        _MANAGERS[:] = [one for one in _MANAGERS if one() is not None]
        _MANAGERS.append(weakref.ref(manager))


def _living() -> list[LossScaleManager]:
    with _LOCK:
        return [manager for one in _MANAGERS if (manager := one()) is not None]


def counters() -> dict[str, Any]:
    """The loss scales of this process and how many steps they skipped.

    Returns:
        `managers` (how many there are), `skipped_steps` (sum over those that can be read) and
        `loss_scales`, a list with name, rule and state of each. The state is None for a manager
        used in v1 graphs, which only a session can read: see `LossScaleManager.state`.
    """
    scales = []
    skipped_steps = 0
    for manager in sorted(_living(), key=lambda one: one.name):
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


def scale_variables() -> list[tf.Variable]:
    """The variables that hold the scales of the managers that eager code and functions use."""
    return [found for manager in _living() if (found := manager.scale_variable) is not None]


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


# An attribute by which a callback made here is known.
LOSS_SCALE_CALLBACK = "watches_loss_scale"


def loss_scale_callback(model: Any, *, every: int = 100, log: bool = True) -> Any:
    """A callback for `model.fit(callbacks=[...])`.

    Steps compiled by XLA cannot call the host, so this looks at the state instead, once every so
    many batches and at the end of an epoch. It also carries out `at_floor` for them.

    Args:
        model: A compiled model of Keras 3 or tf_keras whose optimizer has a loss scale.
        every: Batches between two looks; each waits for the device. Default 100.
        log: Whether to add `loss_scale` and `skipped_steps` to the logs of each epoch, where
            History, CSVLogger and TensorBoard find them. Default True.

    Returns:
        A callback of the model's library.

    Raises:
        ValueError: If the model's optimizer has no loss scale, or `every` is below 1.
        TypeError: If `model` is of neither library.
    """
    from tf_amp.loss_scale.rule import require_count
    from tf_amp.loss_scale.wrapping import manager_of

    manager = manager_of(getattr(model, "optimizer", None))
    if manager is None:
        raise ValueError(
            "The callback reads the loss scale of the model's optimizer, so the model must be "
            "compiled with an optimizer of wrap_optimizer(), or while loss scaling is on. "
            f"Received: model.optimizer={getattr(model, 'optimizer', None)!r}"
        )
    every, begin, check = require_count("every", every), manager.begin, manager.check
    base = callback_class(model)

    class LossScaleCallback(base):  # type: ignore[misc,valid-type]
        """Looks at a loss scale now and then."""

        watches_loss_scale = True
        batches = 0

        def __init__(self) -> None:
            super().__init__()
            # Set by the base class: tf_keras else converts the logs of each batch, which waits for
            # the device, and refuses a callback of batches under parameter servers.
            self._supports_tf_logs = True

        def on_train_begin(self, logs: Any = None) -> None:
            del logs
            with model.distribute_strategy.scope():
                begin()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            del batch, logs
            self.batches += 1
            if self.batches % every == 0:
                check(step=self.batches)

        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            del epoch
            state = check(step=self.batches)
            if log and logs is not None:
                logs["loss_scale"] = state.scale
                logs["skipped_steps"] = state.skipped_steps

        def on_train_end(self, logs: Any = None) -> None:
            del logs
            check(step=self.batches)

    return LossScaleCallback()


def callback_class(model: Any) -> type:
    """The class of callbacks of a model's library.

    Raises:
        TypeError: the model is of neither Keras 3 nor tf_keras.
    """
    # A layer that Keras' Trainer fits is no Model.
    packages = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    for library in ("keras", "tf_keras"):
        if library in packages and hasattr(model, "fit"):
            found: type = sys.modules[library].callbacks.Callback
            return found
    raise TypeError(
        "`model` must be a model of Keras 3 or tf_keras. Received: "
        f"{type(model).__module__}.{type(model).__qualname__}"
    )
