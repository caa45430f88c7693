"""A callback for `fit` of Keras 3 and tf_keras: logs the scale, and tells of skipped steps."""

from __future__ import annotations

import sys
from typing import Any

from tf_amp.loss_scale.manager import LossScaleManager
from tf_amp.loss_scale.rule import LossScaleState

# An attribute by which a callback made here is known.
LOSS_SCALE_CALLBACK = "watches_loss_scale"


def loss_scale_callback(model: Any, *, every: int = 100, log: bool = True) -> Any:
    """A callback for `model.fit(callbacks=[...])`.

    Steps compiled by XLA cannot call the host, so this looks at the state instead, once every so
    many batches and at the end of an epoch. It also carries out `at_floor` for them.

    Args:
        model: A compiled model of Keras 3 or tf_keras whose optimizer was made by
            `wrap_optimizer`.
        every: Batches between two looks; each waits for the device. Default 100.
        log: Whether to add `loss_scale` and `skipped_steps` to the logs of each epoch, where
            History, CSVLogger and TensorBoard find them. Default True.

    Returns:
        A callback of the model's library.

    Raises:
        ValueError: If the model's optimizer has no `LossScaleManager`, or `every` is below 1.
        TypeError: If `model` is of neither library.
    """
    manager = getattr(getattr(model, "optimizer", None), "manager", None)
    if not isinstance(manager, LossScaleManager):
        raise ValueError(
            "The callback reads the loss scale of the model's optimizer, so the model must be "
            "compiled with an optimizer of wrap_optimizer(). Received: model.optimizer="
            f"{getattr(model, 'optimizer', None)!r}"
        )
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"`every` must be an integer >= 1. Received: every={every!r}")
    base = _callback_class(model)
    watch = _Watch(manager, every)

    class LossScaleCallback(base):  # type: ignore[misc,valid-type]
        """Looks at a loss scale now and then."""

        # For distributed and asynchronous loops of tf_keras, which otherwise convert the logs.
        _supports_tf_logs = True
        watches_loss_scale = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            del batch, logs
            watch.batch_ended()

        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            del epoch
            state = watch.look()
            if log and logs is not None:
                logs["loss_scale"] = state.scale
                logs["skipped_steps"] = state.skipped_steps

        def on_train_end(self, logs: Any = None) -> None:
            del logs
            watch.look()

    return LossScaleCallback()


class _Watch:
    def __init__(self, manager: LossScaleManager, every: int) -> None:
        self._manager = manager
        self._every = every
        self._batches = 0

    def batch_ended(self) -> None:
        self._batches += 1
        if self._batches % self._every == 0:
            self.look()

    def look(self) -> LossScaleState:
        return self._manager.check(step=self._batches)


def _callback_class(model: Any) -> type:
    for library in ("keras", "tf_keras"):
        module = sys.modules.get(library)
        if module is not None and isinstance(model, module.Model):
            found: type = module.callbacks.Callback
            return found
    raise TypeError(
        "`model` must be a model of Keras 3 or tf_keras. Received: "
        f"{type(model).__module__}.{type(model).__qualname__}"
    )
