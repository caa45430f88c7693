"""The loss-scale optimizer for `tf.compat.v1.train.Optimizer`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tf_amp.loss_scale.custom_loop import CustomLoopMethods
from tf_amp.loss_scale.gate import apply_if_finite
from tf_amp.loss_scale.manager import LossScaleManager

_running = threading.local()


def inner_is_running() -> bool:
    """Whether this thread is inside a call of a wrapped optimizer by its wrapper."""
    return getattr(_running, "depth", 0) > 0


@contextlib.contextmanager
def _running_inner() -> Iterator[None]:
    _running.depth = getattr(_running, "depth", 0) + 1
    try:
        yield
    finally:
        _running.depth -= 1


class V1LossScaleOptimizer(
    CustomLoopMethods,
    tf.__internal__.tracking.DelegatingTrackableMixin,
    tf.compat.v1.train.Optimizer,
):
    """Scales the loss of a v1 optimizer and skips steps with non-finite gradients.

    `global_step` is not advanced by a skipped step. Attributes it does not have itself are those
    of the wrapped optimizer.

    Args:
        optimizer: The optimizer that does the updates.
        manager: The loss scale; default a new dynamic one.
    """

    def __init__(
        self, optimizer: tf.compat.v1.train.Optimizer, manager: LossScaleManager | None = None
    ) -> None:
        tf.__internal__.tracking.DelegatingTrackableMixin.__init__(self, optimizer)
        super(tf.__internal__.tracking.DelegatingTrackableMixin, self).__init__(
            optimizer._use_locking, optimizer.get_name()
        )
        self.inner_optimizer = optimizer
        self.manager = manager if manager is not None else LossScaleManager()
        self._protocol = self.manager.new_protocol()
        self.applied: tf.Tensor | None = None
        optimizer._track_trackable(self.manager, "loss_scale", overwrite=True)

    def compute_gradients(self, loss: Any, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The gradients of the loss; arguments as for `tf.compat.v1.train.Optimizer`.

        Returns:
            Pairs of unscaled gradient and variable, ready to be clipped.
        """
        scaled = self.scale_loss(loss)
        with _running_inner():
            grads_and_vars = self.inner_optimizer.compute_gradients(scaled, *args, **kwargs)
        unscaled = self.unscale([gradient for gradient, _ in grads_and_vars])
        return [(g, v) for g, (_, v) in zip(unscaled, grads_and_vars, strict=True)]

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Applies gradients, and advances `global_step`, if all gradients are finite.

        Args:
            grads_and_vars: Pairs of gradient and variable.
            global_step: Variable to advance by one, or None.
            name: Name of the returned operation.
            **kwargs: Handed to the wrapped optimizer.

        Returns:
            In a graph, the operation that does the step; afterwards the attribute `applied` is the
            scalar bool tensor that tells whether it was done or skipped. Eagerly and in a
            `tf.function`, that tensor.

        Raises:
            ValueError: If there is no gradient at all.
        """
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        gradients = self._unscaled([gradient for gradient, _ in pairs])

        def apply(values: Any) -> Any:
            with _running_inner():
                return self.inner_optimizer.apply_gradients(
                    list(zip(values, variables, strict=True)), global_step=global_step, **kwargs
                )

        self._create_slots_first([v for g, v in pairs if g is not None])
        train_ops = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP)
        known = list(train_ops)
        self.applied = apply_if_finite(self.manager, gradients, variables, apply, step=global_step)
        if tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function:
            return self.applied
        train_op = tf.group(self.applied, name=name or self.get_name())
        # The operation inside the branch cannot be run by itself; the one to run is ours.
        train_ops[:] = [*known, train_op]
        return train_op

    def _create_slots_first(self, variables: list[Any]) -> None:
        """Creates the slots outside the branch, under the names they have in float32.

        Without this, variables such as `beta1_power` would be named after the branch, and the
        checkpoints of a v1 Saver would not be interchangeable with those of float32.
        """
        if tf.distribute.has_strategy():
            return
        with tf.init_scope():
            optimizer: Any = self.inner_optimizer
            while isinstance(optimizer, tf.compat.v1.train.Optimizer):
                optimizer._create_slots(variables)
                # The names under which optimizers made of an optimizer keep it.
                optimizer = getattr(optimizer, "_optimizer", getattr(optimizer, "_opt", None))

    def variables(self) -> list[Any]:
        """The variables of the wrapped optimizer and of the scale, for their initialization."""
        return [*self.inner_optimizer.variables(), *self.manager.variables]

    def get_name(self) -> str:
        """The name of the wrapped optimizer."""
        return str(self.inner_optimizer.get_name())

    def get_slot(self, var: Any, name: str) -> Any:
        """A slot of the wrapped optimizer."""
        return self.inner_optimizer.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """The slot names of the wrapped optimizer."""
        return list(self.inner_optimizer.get_slot_names())

    def _restore_slot_variable(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner_optimizer._restore_slot_variable(*args, **kwargs)

    def _create_or_restore_slot_variable(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner_optimizer._create_or_restore_slot_variable(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("inner_optimizer")
        if inner is None:
            raise AttributeError(name)
        return getattr(inner, name)
