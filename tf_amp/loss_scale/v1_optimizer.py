"""The loss-scale optimizer for `tf.compat.v1.train.Optimizer`, and the hooks that make it."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.impl.api import autograph_artifact
from tensorflow.python.training.experimental import loss_scale_optimizer

from tf_amp.compatibility import V1_OPTIMIZERS, require
from tf_amp.loss_scale.custom_loop_notice import CustomLoopNotice
from tf_amp.loss_scale.gate import apply_if_finite
from tf_amp.loss_scale.in_place import applying, is_applying
from tf_amp.loss_scale.manager import LossScaleManager
from tf_amp.loss_scale.seen_graphs import mark_scaled, mark_seen
from tf_amp.loss_scale.step_protocol import CustomLoopMethods, Phase, current_place
from tf_amp.loss_scale.v1_own_scales import OwnScales
from tf_amp.loss_scale.v1_saver import make_tolerant_restore
from tf_amp.loss_scale.wrapping import is_wrapped, mark_driven, wrap_optimizer, wrapper_of
from tf_amp.patches import Patches

_LOGGER = logging.getLogger("tf_amp.loss_scale")
_AUTOMATIC = "_tf_amp_made_by_itself"


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
        self._computed_in: weakref.WeakSet[Any] = weakref.WeakSet()
        self.applied: tf.Tensor | None = None
        optimizer._track_trackable(self.manager, "loss_scale", overwrite=True)

    def compute_gradients(self, loss: Any, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The gradients of the loss; arguments as for `tf.compat.v1.train.Optimizer`.

        Returns:
            Pairs of unscaled gradient and variable, ready to be clipped.
        """
        return self.compute_gradients_by(
            self.inner_optimizer.compute_gradients, loss, *args, **kwargs
        )

    def compute_gradients_by(
        self, compute: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any
    ) -> list[tuple[Any, Any]]:
        """As `compute_gradients`, by a method of the wrapped optimizer."""
        self._computed_in.add(current_place())
        # Another step of the session may move the scale in between.
        scale = self.manager.scale
        loss = self.manager.multiply(loss, scale)
        if tf.is_tensor(loss) and kwargs.get("grad_loss") is not None:
            # A scaled loss is float32, whatever it was before.
            kwargs["grad_loss"] = tf.cast(kwargs["grad_loss"], loss.dtype)
        with applying():
            grads_and_vars = compute(loss, *args, **kwargs)
        unscaled = self.manager.unscale([gradient for gradient, _ in grads_and_vars], scale)
        return [(g, v) for g, (_, v) in zip(unscaled, grads_and_vars, strict=True)]

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
        *,
        unscaled: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Applies gradients, and advances `global_step`, if all gradients are finite.

        Args:
            grads_and_vars: Pairs of gradient and variable.
            global_step: Variable to advance by one, or None.
            name: Name of the returned operation.
            unscaled: Whether the gradients came out of `unscale` or `compute_gradients`. Default
                None: they did if one of them was called before, in the same function.
            **kwargs: Handed to the wrapped optimizer.

        Returns:
            In a graph, the operation that does the step; afterwards the attribute `applied` is the
            scalar bool tensor that tells whether it was done or skipped. Eagerly and in a
            `tf.function`, that tensor.

        Raises:
            ValueError: If there is no gradient at all.
            LossScaleProtocolError: If `unscaled` must be said, or if the manager is strict and the
                loss was not scaled.
        """
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        if self._protocol.phase is Phase.READY and current_place() in self._computed_in:
            unscaled = unscaled is None or unscaled
        gradients = [gradient for gradient, _ in pairs]
        if self._protocol.gradients_need_unscaling(unscaled):
            gradients = self.manager.unscale(gradients)

        def apply(values: Any) -> Any:
            with applying():
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

    @autograph_artifact
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


def hook(patches: Patches, notice: CustomLoopNotice) -> None:
    """Hooks the base class of v1 optimizers, and `Saver.restore`.

    `minimize` needs no hook of its own, since it computes and applies gradients through the two
    methods that are hooked. While a wrapper runs its inner optimizer nothing is wrapped, so that
    an optimizer made of optimizers scales once. What an optimizer of the script's own has scaled
    is not scaled again.

    Args:
        patches: Collects what is replaced.
        notice: Is for loops of optimizers that have no loss scale.
    """
    require(V1_OPTIMIZERS)
    base = tf.compat.v1.train.Optimizer
    notice.begin(patches)
    scales = OwnScales(patches)
    patches.replace(base, "__init__", lambda original: _make_init(original, scales))
    patches.replace(
        base,
        "compute_gradients",
        lambda original: _make_compute_gradients(original, patches, scales),
    )
    patches.replace(
        base, "apply_gradients", lambda original: _make_apply_gradients(original, notice)
    )
    library = loss_scale_optimizer.MixedPrecisionLossScaleOptimizer
    patches.replace(library, "compute_gradients", _make_compute_gradients_of_library)
    patches.replace(tf.compat.v1.train.Saver, "restore", make_tolerant_restore)


def _make_init(original: Callable[..., Any], scales: OwnScales) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self, V1LossScaleOptimizer):
            scales.watch(type(self))
        original(self, *args, **kwargs)

    return init


def _make_compute_gradients(
    original: Callable[..., Any], patches: Patches, scales: OwnScales
) -> Callable[..., Any]:
    def compute_gradients(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        wrapper = wrapper_in_charge(self) or wrap_automatically(
            self, patches, scales.scaler_of(loss)
        )
        if wrapper is None:
            return original(self, loss, *args, **kwargs)
        # By this one: a method of its class may be the caller, and clip what comes out.
        compute = functools.partial(original, self)
        return wrapper.compute_gradients_by(compute, loss, *args, **kwargs)

    return compute_gradients


def _make_compute_gradients_of_library(original: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves the optimizer in TensorFlow's own loss-scale optimizer, which scales, as it is."""

    def compute_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        if wrapper_of(self._optimizer) is None:
            mark_driven(self._optimizer, self)
        # A scale that never moves is folded into the graph before that runs; 1 is none.
        if getattr(self._loss_scale, "_loss_scale_value", None) != 1:
            mark_seen()
            mark_scaled()
        return original(self, *args, **kwargs)

    return compute_gradients


def _make_apply_gradients(
    original: Callable[..., Any], notice: CustomLoopNotice
) -> Callable[..., Any]:
    def apply_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        wrapper = wrapper_in_charge(self)
        if wrapper is not None:
            return wrapper.apply_gradients(*args, **kwargs)
        if not is_applying() and not is_wrapped(self) and wrapper_of(self) is None:
            notice.give(self)
        return original(self, *args, **kwargs)

    return apply_gradients


def wrapper_in_charge(optimizer: Any) -> V1LossScaleOptimizer | None:
    """The wrapper that was made here for an optimizer, unless it is the one calling."""
    wrapper = wrapper_of(optimizer)
    if wrapper is None or is_applying() or not wrapper.__dict__.get(_AUTOMATIC):
        return None
    found: V1LossScaleOptimizer = wrapper
    return found


def wrap_automatically(
    optimizer: Any, patches: Patches, scaler: Any = None
) -> V1LossScaleOptimizer | None:
    """Wraps an optimizer that nobody has wrapped.

    Args:
        optimizer: One of `tf.compat.v1.train`.
        patches: What is patched; with it the wrapper ends.
        scaler: The optimizer that scales its loss by itself, None if none does.

    Returns:
        The wrapper; None for an optimizer that has one or a scale of its own.
    """
    if is_applying() or is_wrapped(optimizer):
        return None
    if scaler is not None:
        mark_seen()
        mark_scaled()
    if wrapper_of(optimizer) is not None:
        return None
    if scaler is not None:
        mark_driven(optimizer, scaler)
        mark_driven(scaler, scaler)
        _LOGGER.info(
            "The optimizer %s scales the loss by itself, and tf_amp leaves it alone.",
            type(scaler).__name__,
        )
        return None
    wrapper: V1LossScaleOptimizer = wrap_optimizer(optimizer)
    wrapper.__dict__[_AUTOMATIC] = True
    _LOGGER.info(
        "Loss scaling: the optimizer %s is wrapped with %s.",
        type(optimizer).__name__,
        wrapper.manager.rule,
    )
    if type(optimizer).apply_gradients is not tf.compat.v1.train.Optimizer.apply_gradients:
        _take_over_apply_gradients(optimizer, wrapper, patches)
    return wrapper


def _take_over_apply_gradients(
    optimizer: Any, wrapper: V1LossScaleOptimizer, patches: Patches
) -> None:
    """Leads a class's own `apply_gradients`, which the hook on the base does not reach."""
    own = optimizer.apply_gradients

    def apply_gradients(*args: Any, **kwargs: Any) -> Any:
        if is_applying() or not patches.active:
            return own(*args, **kwargs)
        return wrapper.apply_gradients(*args, **kwargs)

    optimizer.apply_gradients = apply_gradients
