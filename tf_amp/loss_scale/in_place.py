"""How an optimizer of Keras 3 or tf_keras comes to scale its loss: in place.

It stays the object that the script made, with its variables, its name and its checkpoints. Its
class becomes a subclass of its own class, made here, whose methods do what loss scaling asks for
around the methods of that class. The `Scaling` of the optimizer says when.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import tensorflow as tf

from tf_amp.loss_scale.custom_loop_notice import (
    BY_MINIMIZE,
    OF_COMPILE,
    OWN_GRADIENTS,
    OWN_STEP,
    CustomLoopNotice,
)
from tf_amp.loss_scale.manager import LossScaleManager
from tf_amp.loss_scale.scaled_classes import scaled_class
from tf_amp.loss_scale.step_protocol import CustomLoopMethods, StepProtocol, current_place

if TYPE_CHECKING:
    # Mixed into classes of libraries without types.
    _Optimizer: Any = object
else:
    _Optimizer = object

_ATTRIBUTE = "_tf_amp_loss_scaling"
_running = threading.local()


def _say_nothing() -> None:
    pass


class Scaling:
    """The loss scale of an optimizer of `compile`, and whether it takes part in the running step.

    A step is one call that takes gradients and applies them, such as `Model.train_step`. Both
    halves are seen by Python together or, once they are traced, neither. Outside a step a loss is
    not scaled, and in it only where the gradients cannot be taken by a function traced earlier.

    Args:
        manager: The loss scale.
        horovod: Whether the optimizer is Horovod's.
        notice: Is given to loops that do not scale the loss; once its hooks are off, the
            optimizer is as if it had no loss scale.

    Attributes:
        announce: Is called whenever a loss is scaled, and says so if it was not said.
    """

    # Whether a custom loop asked for it, and hears whether a step was applied.
    by_hand = False

    def __init__(
        self, manager: LossScaleManager, horovod: bool, notice: CustomLoopNotice | None = None
    ) -> None:
        self.manager = manager
        self.horovod = horovod
        self.notice = notice
        self.announce: Callable[[], None] = _say_nothing
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

    @property
    def begins_step(self) -> bool:
        """Whether a call that takes gradients and applies them is a step, and none runs yet."""
        return not self.in_step and self.is_on and takes_part()

    @property
    def is_on(self) -> bool:
        """Whether the hooks that gave the scale are on."""
        return self.notice is None or self.notice.active

    def is_in_charge(self, optimizer: Any) -> bool:
        """Whether gradients that are handed to an optimizer are to be checked."""
        if is_applying() or not self.is_on:
            return False
        if self.notice is not None and not self.loss_was_scaled:
            # tf_keras has what takes the gradients of a loss and applies them, and that is a step.
            outside, inside = OF_COMPILE, OWN_STEP
            if hasattr(optimizer, "minimize"):
                outside, inside = BY_MINIMIZE, OWN_GRADIENTS
            text = inside if self.in_step else outside
            self.notice.give(optimizer, text)
        return takes_part()

    def scale_loss(self, loss: Any) -> Any:
        """Scales a loss if a step is running in this very function."""
        if not self.in_step:
            return loss
        self._local.scaled = True
        self.announce()
        return self.manager.multiply(loss)

    def unscale(self, gradients: Sequence[Any], unscaled: bool | None = None) -> Sequence[Any]:
        """The gradients as they would be without loss scaling.

        Args:
            gradients: The gradients of a step.
            unscaled: What the loop says of them, which none does that does not know of the scale.
        """
        self._local.applied = True
        return (
            self.manager.unscale(gradients) if self.loss_was_scaled and not unscaled else gradients
        )


class LoopScaling:
    """The loss scale of an optimizer that a custom loop asked for; see `Scaling`.

    Args:
        manager: The loss scale.
        horovod: Whether the optimizer is Horovod's.
    """

    by_hand = True
    in_step = True
    begins_step = False
    is_on = True
    announce = staticmethod(_say_nothing)

    def __init__(self, manager: LossScaleManager, horovod: bool) -> None:
        self.manager = manager
        self.horovod = horovod
        self.protocol: StepProtocol = manager.new_protocol()

    def __reduce__(self) -> tuple[Any, ...]:
        return LoopScaling, (self.manager, self.horovod)

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Marks nothing: the loop says what it does."""
        return contextlib.nullcontext()

    def is_in_charge(self, optimizer: Any) -> bool:
        """Whether gradients that are handed to an optimizer are to be checked."""
        del optimizer
        return not is_applying()

    def scale_loss(self, loss: Any) -> Any:
        """Scales a loss."""
        return self.manager.scale_loss(loss)

    def unscale(self, gradients: Sequence[Any], unscaled: bool | None = None) -> Sequence[Any]:
        """As `StepProtocol.gradients_need_unscaling` says."""
        if self.protocol.gradients_need_unscaling(unscaled):
            return self.manager.unscale(gradients)
        return gradients


class InPlace(_Optimizer):
    """What every optimizer is that was given a loss scale in place; a mixin.

    Attributes:
        own_class: The class that the optimizer was made with.
        shown: What `isinstance` finds besides, a class of the library; None for no other.
        behind: A subclass of the library's base class, which the made class has right before it:
            what the classes in between make of its results, such as clipping, comes after.
    """

    _tf_amp_loss_scaling: Scaling | LoopScaling
    own_class: ClassVar[type]
    shown: ClassVar[type | None] = None
    behind: ClassVar[type | None] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """`type(optimizer)(...)` makes one of its own class, to which `compile` gives a scale."""
        return cls.own_class(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        made, arguments, *state = super().__reduce_ex__(protocol)
        if arguments and arguments[0] is type(self):
            # Nobody finds this class by its name.
            made, arguments = _new, (self.own_class, type(self).__bases__[0])
        return made, arguments, *state

    def _plain(self) -> Any:
        """The same optimizer without a loss scale: it shares all that this one has."""
        plain: Any = object.__new__(self.own_class)
        object.__setattr__(plain, "__dict__", self.__dict__)
        return plain


class ByHand(CustomLoopMethods, InPlace):
    """What a custom loop finds besides on an optimizer that it gave a loss scale; a mixin."""

    _tf_amp_loss_scaling: LoopScaling

    @property
    def manager(self) -> LossScaleManager:  # type: ignore[override]
        """The loss scale."""
        return self._tf_amp_loss_scaling.manager

    @property
    def _protocol(self) -> StepProtocol:  # type: ignore[override]
        return self._tf_amp_loss_scaling.protocol

    @property
    def inner_optimizer(self) -> Any:
        """The same optimizer without a loss scale: it shares all that this one has."""
        return self._plain()

    def __dir__(self) -> Iterable[str]:
        # Keras saves what it finds here, and this would be the optimizer once more.
        return [name for name in super().__dir__() if name != "inner_optimizer"]


def scaling_of(optimizer: Any) -> Scaling | LoopScaling | None:
    """The loss scale that an optimizer was given in place, or None."""
    found: Scaling | LoopScaling | None = getattr(optimizer, "__dict__", {}).get(_ATTRIBUTE)
    return found


def give_scaling(optimizer: Any, scaling: Scaling | LoopScaling, mixin: Any) -> None:
    """Gives an optimizer a loss scale, which is saved in its checkpoints.

    Args:
        optimizer: An optimizer of Keras 3 or tf_keras.
        scaling: The loss scale.
        mixin: The methods for its library.
    """
    # Past the attribute machinery of the optimizers, which would track it by this name.
    object.__setattr__(optimizer, _ATTRIBUTE, scaling)
    optimizer._track_trackable(scaling.manager, "loss_scale", overwrite=True)
    own_class: Any = type(optimizer)
    object.__setattr__(optimizer, "__class__", scaled_class(own_class, mixin))


def _new(own_class: Any, mixin: Any) -> Any:
    return object.__new__(scaled_class(own_class, mixin))


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


def takes_part() -> bool:
    """Whether steps can be skipped here: not in graphs of TensorFlow 1, nor between replicas."""
    return (
        tf.compat.v1.executing_eagerly_outside_functions()
        and not tf.distribute.in_cross_replica_context()
    )
