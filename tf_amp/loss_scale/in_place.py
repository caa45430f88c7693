"""What an optimizer of an unchanged script is given: a loss scale, and not another class or name.

The optimizer stays the object that the script made. Methods of its class are replaced, for all its
instances; they do something for those that have a `Scaling` and nothing for the others.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

from tf_amp.loss_scale.manager import LossScaleManager
from tf_amp.loss_scale.step_protocol import current_place

_LOGGER = logging.getLogger("tf_amp.loss_scale")
_ATTRIBUTE = "_tf_amp_loss_scaling"
_running = threading.local()


class Scaling:
    """The loss scale of one optimizer, and whether it takes part in the step that is running.

    A step is one call that takes gradients and applies them, such as `Model.train_step`. Both
    halves are seen by Python together or, once they are traced, neither. Outside a step a loss is
    not scaled, and in it only where the gradients cannot be taken by a function traced earlier.

    Args:
        manager: The loss scale.
        horovod: Whether the optimizer is Horovod's.
    """

    def __init__(self, manager: LossScaleManager, horovod: bool) -> None:
        self.manager = manager
        self.horovod = horovod
        # Of each thread: the replicas of a MirroredStrategy are traced in threads.
        self._local = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return Scaling, (self.manager, self.horovod)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Marks the step; a step in a step, such as `super().train_step()`, is the same one."""
        place, scaled = getattr(self._local, "place", None), self.loss_was_scaled
        applied = getattr(self._local, "applied", False)
        if place is not current_place():
            self._local.place, self._local.scaled = current_place(), False
        self._local.applied = False
        try:
            yield
        finally:
            # What an inner step scaled and did not apply is applied in the outer one.
            is_left = place is self._local.place and not self._local.applied
            self._local.scaled = scaled or (is_left and self._local.scaled)
            self._local.place, self._local.applied = place, applied

    @property
    def in_step(self) -> bool:
        """Whether a step is running, in the function in which this is asked."""
        return getattr(self._local, "place", None) is current_place()

    @property
    def loss_was_scaled(self) -> bool:
        """Whether gradients of the running step are those of a scaled loss."""
        return getattr(self._local, "scaled", False)

    def scale_loss(self, loss: Any) -> Any:
        """Scales a loss if a step is running in this very function."""
        if not self.in_step:
            return loss
        self._local.scaled = True
        return self.manager.multiply(loss)

    def unscale(self, gradients: Any) -> Any:
        """The gradients as they would be without loss scaling."""
        self._local.applied = True
        return self.manager.unscale(gradients) if self.loss_was_scaled else gradients


def scaling_of(optimizer: Any) -> Scaling | None:
    """The loss scale that an optimizer was given in place, or None."""
    found: Scaling | None = getattr(optimizer, "__dict__", {}).get(_ATTRIBUTE)
    return found


def give_scaling(optimizer: Any) -> Scaling:
    """Gives an optimizer a dynamic loss scale, which is saved in its checkpoints.

    Args:
        optimizer: An optimizer of Keras 3 or tf_keras.
    """
    window = getattr(optimizer, "gradient_accumulation_steps", None) or 1
    horovod = type(optimizer).__module__.startswith("horovod")
    scaling = Scaling(LossScaleManager(window=window), horovod)
    # Past the attribute machinery of the optimizers, which would track it by this name.
    object.__setattr__(optimizer, _ATTRIBUTE, scaling)
    optimizer._track_trackable(scaling.manager, "loss_scale", overwrite=True)
    return scaling


@contextlib.contextmanager
def applying() -> Iterator[None]:
    """Marks a call of an optimizer by whoever has dealt with its gradients."""
    _running.depth = getattr(_running, "depth", 0) + 1
    try:
        yield
    finally:
        _running.depth -= 1


def is_applying() -> bool:
    """Whether this thread is in such a call."""
    return getattr(_running, "depth", 0) > 0


class CustomLoopNotice:
    """Says once that a custom loop trains without loss scaling, and how to change that."""

    def __init__(self) -> None:
        self._given = False

    def give(self, optimizer: Any) -> None:
        """Logs the notice, the first time.

        Args:
            optimizer: The optimizer whose gradients are those of a loss that was not scaled.
        """
        if self._given:
            return
        self._given = True
        _LOGGER.warning(
            "A custom training loop applies gradients with %s, which is not wrapped: its loss is "
            "not scaled, and small float16 gradients are lost. A loop must be changed by hand: "
            "optimizer = tf_amp.loss_scale.wrap_optimizer(optimizer), then take the gradients of "
            "optimizer.scale_loss(loss) inside the GradientTape.",
            type(optimizer).__name__,
        )
