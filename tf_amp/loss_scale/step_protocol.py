"""The steps of a custom training loop: its methods on a wrapped optimizer, and their order.

A step is `scale_loss`, then optionally `unscale`, then `apply_gradients`. Python sees a call only
while it runs eagerly or is being traced, so a step is not judged by the one before it:
`apply_gradients` unscales, as Keras 3 does, unless the call itself says that it was done already.
It need not say so where `unscale` was called in the same function, or was executed eagerly as it
is: there Python sees both calls of every step or of none.
"""

from __future__ import annotations

import enum
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.autograph.impl.api import autograph_artifact
from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow

from tf_amp.loss_scale.gradients import VariableUnderflow, measure_underflow

if TYPE_CHECKING:
    from tf_amp.loss_scale.manager import LossScaleManager

_LOGGER = logging.getLogger("tf_amp.loss_scale")

_LOOP = """
    with tf.GradientTape() as tape:
        loss = loss_fn()
        scaled_loss = optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled_loss, variables)
    optimizer.apply_gradients(zip(gradients, variables))"""


class _Eager:
    """The place of calls that are executed and not traced."""


_EAGER = _Eager()


def current_place() -> Any:
    """Where a call takes place: the function being traced, or one object for all eager calls.

    Loops and branches are traced with what is around them, and are a part of it.
    """
    *_, outermost = _places()
    return outermost


def _places() -> Iterator[Any]:
    """The branch or body being built, those around it, and the function or graph they are in."""
    place = _EAGER if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    yield place
    while isinstance(place, control_flow.ControlFlowFuncGraph):
        place = place.outer_graph
        yield place


class UsedScale:
    """By what a traced function multiplied its loss, for its gradients to be divided by that.

    The scale may have moved in between: by a step of another thread or worker, or by the first of
    two steps whose losses were multiplied before. The loss that was multiplied last is known too,
    in eager code as well: nothing is to multiply it again.
    """

    def __init__(self) -> None:
        # Of each thread: each replica of a MirroredStrategy reads its own copy.
        self._local = threading.local()

    def note(self, scale: tf.Tensor) -> None:
        """Keeps a scalar tensor of a function; one of eager code, or of a v1 graph, says nothing.

        What eager code multiplied last may be of another step, and a tensor of a v1 graph may be
        in a loop that is left.
        """
        if not tf.executing_eagerly() and scale.graph.building_function:
            self._local.scale = weakref.ref(scale)

    def found(self) -> tf.Tensor | None:
        """The tensor noted last, if it can be read where this is asked."""
        reference = getattr(self._local, "scale", None)
        scale = reference() if reference is not None else None
        return scale if scale is not None and scale.graph in _places() else None

    def note_loss(self, loss: Any) -> None:
        """Keeps a scaled loss, if it is a tensor."""
        self._local.loss = weakref.ref(loss) if tf.is_tensor(loss) else None

    def has_scaled(self, loss: Any) -> bool:
        """Whether a loss is the very tensor that was kept last."""
        reference = getattr(self._local, "loss", None)
        return reference is not None and loss is not None and reference() is loss


class Phase(enum.Enum):
    """How far a step has come; APPLIED only where its gradients had been unscaled before."""

    READY = enum.auto()
    SCALED = enum.auto()
    UNSCALED = enum.auto()
    APPLIED = enum.auto()


class LossScaleProtocolError(RuntimeError):
    """The calls of a training step came in an order that cannot be right, or is not known."""


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
        self._warned = False

    @property
    def phase(self) -> Phase:
        """How far the step of this thread has come."""
        return getattr(self._local, "phase", Phase.READY)

    def loss_scaled(self) -> None:
        """Records that a loss was scaled; legal at any time, also after an abandoned step."""
        self._ever_scaled = True
        self._scaled_eagerly = tf.executing_eagerly()
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
        # What is around a branch does not know whether it ran.
        bodies = control_flow.WhileBodyFuncGraph
        place = next(place for place in _places() if not isinstance(place, bodies))
        self._local.place = weakref.ref(place)

    @autograph_artifact
    def gradients_need_unscaling(self, unscaled: bool | None = None) -> bool:
        """Ends the step and says whether its gradients still have to be unscaled.

        Args:
            unscaled: What the call says: whether the gradients were unscaled already. None if it
                says nothing.

        Returns:
            True if the gradients of this step are scaled. False if they were unscaled, or if no
            loss was ever scaled, so that the gradients never were: after one warning they are
            used as they are.

        Raises:
            LossScaleProtocolError: If the call says nothing and it cannot be known, or if the loss
                was not scaled and the protocol is strict.
        """
        phase = self.phase
        if unscaled is not None:
            self._local.phase = Phase.READY
            return not unscaled
        if phase is Phase.APPLIED or (
            phase is Phase.UNSCALED and self._local.place() not in _places()
        ):
            self.abandon_step()
            raise LossScaleProtocolError(_NOT_KNOWN)
        self._local.phase = Phase.APPLIED if phase is Phase.UNSCALED else Phase.READY
        if phase is Phase.READY:
            if not self._ever_scaled:
                self._complain(
                    "apply_gradients() was called, but scale_loss() never was: the gradients are "
                    "used as they are, without loss scaling, and small float16 ones are lost."
                )
                return False
            if self._scaled_eagerly and tf.executing_eagerly():
                self._complain(
                    "apply_gradients() was called, but scale_loss() was not called since the last "
                    "apply_gradients(): the gradients are unscaled as those before."
                )
        return phase is not Phase.UNSCALED

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


_NOT_KNOWN = (
    "Whether these gradients are still scaled cannot be known: unscale() was called in another "
    "function than apply_gradients(), in a branch alone, or for the apply_gradients() before this "
    "one, and calls that are traced are not seen again. Received: unscaled=None. Say it in the "
    "call: apply_gradients(..., unscaled=True) for gradients that came out of unscale(), "
    "unscaled=False for others."
)


class CustomLoopMethods:
    """What a custom loop calls, the same on every wrapped optimizer; a mixin.

    The class it is mixed into sets `manager` and `_protocol`.
    """

    manager: LossScaleManager
    _protocol: StepProtocol

    @property
    def loss_scale(self) -> tf.Tensor:
        """The current loss scale, a scalar float32 tensor."""
        return self.manager.scale

    @autograph_artifact
    def scale_loss(self, loss: Any) -> Any:
        """Multiplies a loss by the scale; see `LossScaleManager.scale_loss`."""
        return self.manager.scale_loss(loss)

    @autograph_artifact
    def unscale(self, gradients: Sequence[Any]) -> list[Any]:
        """Divides gradients by the scale, for loops that look at them before applying them.

        Optional: `apply_gradients` unscales by itself when this was not called. Clip the result
        of this method, never scaled gradients. Where it is called in another function than
        `apply_gradients`, or on some steps only, say `apply_gradients(..., unscaled=True)`.

        Args:
            gradients: The gradients of a scaled loss; None stays None, sparse ones stay sparse.

        Returns:
            The gradients in the same order.

        Raises:
            LossScaleProtocolError: If it is called twice in one step.
        """
        self._protocol.gradients_unscaled()
        return self.manager.unscale(gradients)

    def get_scaled_loss(self, loss: Any) -> Any:
        """The name Keras 2 has for `scale_loss`."""
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """The name Keras 2 has for `unscale`."""
        return self.unscale(grads)

    def measure_underflow(
        self, grads_and_vars: Iterable[tuple[Any, Any]]
    ) -> tuple[VariableUnderflow, ...]:
        """How much of each gradient float16 would flush to zero at the current scale.

        Args:
            grads_and_vars: Pairs of an unscaled float32 gradient and its variable.
        """
        return measure_underflow(grads_and_vars, self.manager.scale)
