"""The order of calls within a step of a custom training loop, and what is said when it is wrong.

A step is `scale_loss`, then optionally `unscale`, then `apply_gradients`. Whether a call happened
is known in Python only while it runs eagerly or is being traced. A loop may trace the first half
of a step and run the second half eagerly, so that from the second step on only the second half is
seen. Therefore the way the last complete step was written is remembered and assumed for a step
whose beginning was not seen.
"""

from __future__ import annotations

import enum
import logging
import threading

_LOGGER = logging.getLogger("tf_amp.loss_scale")

_LOOP = """
    with tf.GradientTape() as tape:
        loss = loss_fn()
        scaled_loss = optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled_loss, variables)
    optimizer.apply_gradients(zip(gradients, variables))"""


class Phase(enum.Enum):
    """How far a step has come."""

    READY = enum.auto()
    SCALED = enum.auto()
    UNSCALED = enum.auto()


class LossScaleProtocolError(RuntimeError):
    """The calls of a training step came in an order that cannot be right."""


class StepProtocol:
    """Follows the steps of one optimizer.

    Each thread has a phase of its own: the replicas of a `MirroredStrategy` are traced in
    threads, one within the step of the other.

    Args:
        strict: Whether a loss that was not scaled is an error instead of one warning.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._local = threading.local()
        self._ever_scaled = False
        self._scaled_eagerly = False
        self._unscales_itself = False
        self._warned = False

    @property
    def phase(self) -> Phase:
        """How far the step of this thread has come."""
        return getattr(self._local, "phase", Phase.READY)

    def loss_scaled(self, *, eagerly: bool) -> None:
        """Records that a loss was scaled; legal at any time, also after an abandoned step.

        Args:
            eagerly: Whether the call was executed, and not traced into a graph.
        """
        self._ever_scaled = True
        self._scaled_eagerly = eagerly
        self._local.phase = Phase.SCALED

    def gradients_unscaled(self) -> None:
        """Records that gradients were unscaled.

        Raises:
            LossScaleProtocolError: If they were before in this step, or, when strict, if no loss
                was scaled.
        """
        if self.phase is Phase.UNSCALED:
            self.abandon_step()
            raise LossScaleProtocolError(
                "unscale() was called twice in one step, which divides the gradients by the loss "
                "scale twice. Received: a second call since the last scale_loss(). Call it once, "
                "with the gradients of all variables, between tape.gradient() and "
                "apply_gradients(); or leave it out, for apply_gradients() unscales by itself."
            )
        if not self._ever_scaled:
            self._complain(
                "unscale() was called, but scale_loss() never was: the gradients become smaller "
                "than they are by the loss scale."
            )
        self._local.phase = Phase.UNSCALED

    def gradients_need_unscaling(self, *, eagerly: bool) -> bool:
        """Ends the step and says whether its gradients still have to be unscaled.

        Args:
            eagerly: Whether `apply_gradients` is executed, and not traced into a graph.

        Returns:
            True if the gradients of this step are scaled. False if `unscale` was called, or if no
            loss was ever scaled, so that the gradients never were: after one warning they are
            used as they are.

        Raises:
            LossScaleProtocolError: If the loss was not scaled and the protocol is strict.
        """
        phase = self.phase
        self._local.phase = Phase.READY
        if phase is Phase.READY:
            if not self._ever_scaled:
                self._complain(
                    "apply_gradients() was called, but scale_loss() never was: the gradients are "
                    "used as they are, without loss scaling, and small float16 ones are lost."
                )
                return False
            if eagerly and self._scaled_eagerly:
                self._complain(
                    "apply_gradients() was called, but scale_loss() was not called since the last "
                    "apply_gradients(): the gradients are taken to be scaled as those before."
                )
            return not self._unscales_itself
        self._unscales_itself = phase is Phase.UNSCALED
        return phase is Phase.SCALED

    def abandon_step(self) -> None:
        """Forgets a step that was begun, for example after an exception in it."""
        self._local.phase = Phase.READY

    def _complain(self, what_is_wrong: str) -> None:
        message = f"{what_is_wrong} Scale the loss before its gradients are taken:{_LOOP}"
        if self._strict:
            self.abandon_step()
            raise LossScaleProtocolError(message)
        if not self._warned:
            self._warned = True
            _LOGGER.warning("%s", message)
