"""Loss scaling in the optimizers of Keras 3."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf
from keras.src.saving.keras_saveable import KerasSaveable

from tf_amp.loss_scale.gate import apply_if_finite
from tf_amp.loss_scale.in_place import ByHand, InPlace, applying
from tf_amp.loss_scale.manager import LossScaleManager


class KerasInPlace(InPlace):
    """The methods of an optimizer of Keras 3 that has a loss scale; a mixin."""

    built: bool

    def scale_loss(self, loss: Any) -> Any:
        """Multiplies a loss by the scale where its gradients will be unscaled again."""
        return self._tf_amp_loss_scaling.scale_loss(super().scale_loss(loss))

    def apply(
        self,
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None = None,
        *,
        unscaled: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Unscales and checks gradients, and applies them if all are finite.

        Args:
            grads: One gradient (tensor, `tf.IndexedSlices` or None) for each variable.
            trainable_variables: The variables; default those the optimizer was built with.
            unscaled: Whether the gradients came out of `unscale`. Default None: they did if it was
                called just before, in the same function.
            **kwargs: As for the optimizer's own class.

        Returns:
            In a custom loop, scalar bool tensor: whether they were applied; False means that the
            step was skipped.

        Raises:
            ValueError: If there is no gradient at all.
            LossScaleProtocolError: If `unscaled` must be said, or if the manager is strict and the
                loss was not scaled.
        """
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        apply = super().apply
        return self._apply_scaled(
            grads,
            self._trainable_variables if trainable_variables is None else trainable_variables,
            lambda values: apply(values, trainable_variables, **kwargs),
            unscaled,
        )

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        *args: Any,
        unscaled: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `apply`, for pairs of gradient and variable."""
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        apply_gradients = super().apply_gradients

        def run(values: Sequence[Any]) -> Any:
            return apply_gradients(list(zip(values, variables, strict=True)), *args, **kwargs)

        return self._apply_scaled([gradient for gradient, _ in pairs], variables, run, unscaled)

    def _apply_scaled(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        apply: Callable[[Sequence[Any]], Any],
        unscaled: bool | None,
    ) -> Any:
        scaling = self._tf_amp_loss_scaling
        if not scaling.is_in_charge(self):
            return apply(gradients)
        values = scaling.unscale(gradients, unscaled)
        legal = len(gradients) == len(variables) and any(one is not None for one in gradients)
        if not legal and not (scaling.by_hand and variables):
            # Whatever is wrong with these, the optimizer itself says it.
            return apply(values)
        if not self.built:
            # A step that makes variables is traced once more, into a branch; there a gate of
            # several replicas reads what has no value when it runs. Of one replica's step they are
            # made within it, as Keras does: outside, a model that it builds has no values yet.
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            with tf.init_scope() if replicas > 1 else contextlib.nullcontext():
                self.build(variables)
            self.built = True

        def run(values: Sequence[Any]) -> Any:
            with applying():
                return apply(values)

        def drop_window() -> None:
            steps = self.gradient_accumulation_steps
            calls = calls_of(self)
            calls.assign(calls // steps * steps)
            self._backend_reset_gradient_accumulators()

        applied = apply_if_finite(
            scaling.manager,
            [
                # What a variable is overwritten with was never scaled.
                raw if getattr(variable, "overwrite_with_gradient", False) else value
                for raw, value, variable in zip(gradients, values, variables, strict=True)
            ],
            variables,
            run,
            step=self.iterations,
            horovod=scaling.horovod,
            drop_window=drop_window if self.gradient_accumulation_steps else None,
        )
        return applied if scaling.by_hand else calls_of(self)


def calls_of(optimizer: Any) -> Any:
    """The variable of an optimizer that counts calls, not the steps that they accumulate to.

    Keras 3.4 has one for both.
    """
    found = getattr(optimizer, "_iterations", None)
    return optimizer.iterations if found is None else found


class KerasLossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """What an optimizer that a custom loop gave a loss scale is for Keras.

    Everything in Keras that looks for a `LossScaleOptimizer`, such as `compile`, takes it for one
    and does not scale again. There are no instances of its own.
    """

    own_class: ClassVar[Any]

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """Makes an optimizer of its own class.

        Raises:
            ValueError: If a subclass calls it that Horovod made around a wrapped optimizer.
        """
        if cls.__module__.startswith("horovod"):
            raise ValueError(_HOROVOD_ORDER)
        return cls.own_class.from_config(config, custom_objects)


class KerasByHand(ByHand, KerasInPlace):
    """The methods of an optimizer of Keras 3 that a custom loop gave a loss scale; a mixin."""

    shown = KerasLossScaleOptimizer
    # Not the one of `CustomLoopMethods`: the optimizer's own class may have a factor of its own.
    scale_loss = KerasInPlace.scale_loss

    def __reduce_ex__(self, protocol: Any) -> Any:
        made, arguments, *state = super().__reduce_ex__(protocol)
        if state:
            return made, arguments, *state
        # Keras copies an optimizer by a file, in which it has no scale.
        return _copied, (made, arguments, self.manager, self._tf_amp_loss_scaling.horovod)

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the variables of the optimizer and of the scale."""
        super().build(variables)
        if tf.distribute.has_strategy():
            self.manager.create_variables()
        else:
            # The strategy the optimizer was made in, even if it is first used outside its scope.
            with tf.init_scope(), self._distribution_strategy.scope():
                self.manager.create_variables()

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """As for the optimizer's own class; `fit` calls it at its end."""
        super().finalize_variable_values(var_list)
        if tf.executing_eagerly():
            # Where fit ran compiled by XLA, this is when its skipped steps are told.
            # The variable of a strategy has no int(), but a value.
            self.manager.check(step=int(calls_of(self).value.numpy()))


def _copied(
    made: Callable[..., Any], arguments: Any, manager: LossScaleManager, horovod: bool
) -> Any:
    from tf_amp.loss_scale.wrapping import scale_by_hand

    return scale_by_hand(made(*arguments), manager, horovod=horovod)


_HOROVOD_ORDER = (
    "Horovod's DistributedOptimizer was put around the loss-scale optimizer. The order must be the "
    "other way round, so that gradients are reduced before they are checked: "
    "wrap_optimizer(hvd.DistributedOptimizer(optimizer))."
)


class LossScaleStore(KerasSaveable):
    """The state of the scale as a `.keras` file knows it: an object beside the optimizer's own."""

    def __init__(self, manager: LossScaleManager) -> None:
        self._manager = manager

    def _obj_type(self) -> str:
        # Keras asks for one of its own kinds, to know which attributes to leave out.
        return "Optimizer"

    def save_own_variables(self, store: Any) -> None:
        """Saves the state of the scale."""
        for field, value in self._manager.export_state().items():
            store[field] = value

    def load_own_variables(self, store: Any) -> None:
        """Loads what of the state is there."""
        self._manager.import_state({field: store[field] for field in store.keys()})  # noqa: SIM118
