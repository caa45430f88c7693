"""Loss scaling in the optimizers of tf_keras, the new ones and the legacy ones."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras.src.mixed_precision import loss_scale_optimizer as tf_keras_loss_scale

from tf_amp.loss_scale.gate import apply_if_finite
from tf_amp.loss_scale.in_place import ByHand, InPlace, applying


class _TfKeras(InPlace):
    """The methods of an optimizer of tf_keras that has a loss scale; a mixin.

    Attributes:
        sums_only_itself: the strategies under which it refuses gradients that are summed already.
    """

    sums_only_itself: tuple[type, ...] = ()

    def minimize(self, *args: Any, **kwargs: Any) -> Any:
        """As for the optimizer's own class, with a scaled loss."""
        scaling = self._tf_amp_loss_scaling
        with scaling.step() if scaling.begins_step else contextlib.nullcontext():
            return super().minimize(*args, **kwargs)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        *args: Any,
        unscaled: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Unscales and checks gradients, and applies them if all are finite.

        Args:
            grads_and_vars: Pairs of gradient and variable.
            *args: As for the optimizer's own class.
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
        scaling = self._tf_amp_loss_scaling
        apply = super().apply_gradients
        pairs = list(grads_and_vars)
        present = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        if not scaling.is_in_charge(self) or not (present or scaling.by_hand):
            return apply(pairs, *args, **kwargs)
        # A step of `compile` unscales where it takes the gradients.
        unscaled = unscaled if scaling.by_hand else True
        values = scaling.unscale([gradient for gradient, _ in pairs], unscaled)
        pairs = [(value, variable) for value, (_, variable) in zip(values, pairs, strict=True)]
        _, *names = inspect.signature(apply).parameters
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        applied = self._apply_if_finite(pairs, options)
        return applied if scaling.by_hand else self.iterations

    def _apply_if_finite(
        self, pairs: list[tuple[Any, Any]], options: Mapping[str, Any]
    ) -> tf.Tensor:
        """Applies unscaled gradients if all are finite; returns whether they were."""
        scaling = self._tf_amp_loss_scaling
        apply = super().apply_gradients
        present = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        # Variables are made outside the branch, and get the names they have in float32.
        with tf.name_scope(self._scope(options)), tf.init_scope():
            self._create_variables([variable for _, variable in pairs], present)
            scaling.manager.create_variables()
        sums = options.get("experimental_aggregate_gradients", True)
        sums = sums and not options.get("skip_gradients_aggregation", False)
        refuses = isinstance(tf.distribute.get_strategy(), self.sums_only_itself)
        if present and sums and tf.distribute.has_strategy() and not refuses:
            # The gradients of all replicas are summed first, as tf_keras does before it clips.
            pairs = list(self._sum_over_replicas(pairs))
            options = {**options, "experimental_aggregate_gradients": False}
        variables = [variable for _, variable in pairs]

        def run(values: Sequence[Any]) -> Any:
            with applying():
                return apply(list(zip(values, variables, strict=True)), **options)

        return apply_if_finite(
            scaling.manager,
            [gradient for gradient, _ in pairs],
            variables,
            run,
            step=self.iterations,
            horovod=scaling.horovod,
        )

    def _as_in_float32(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """What the library's own method computed, unscaled if it was of a scaled loss.

        So whatever looks at gradients before they are applied, such as clipping by the optimizer's
        own class, finds what it finds in float32.
        """
        scaling = self._tf_amp_loss_scaling
        if not scaling.in_step:
            return gradients
        unscale = self.unscale if scaling.by_hand else scaling.manager.unscale
        return list(unscale(gradients))


class _Gradients(tf_keras.optimizers.Optimizer):
    """Scales around the one method that takes gradients; it stands behind the own classes."""

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """As for the optimizer's own class, with a scaled loss."""
        scaling = self._tf_amp_loss_scaling
        if callable(loss):
            scaled = lambda: scaling.scale_loss(loss())  # noqa: E731
        elif tape is not None:
            with tape._ensure_recording():  # the call may be inside of its block
                scaled = scaling.scale_loss(loss)
        else:
            scaled = loss
        gradients, variables = _parted(super().compute_gradients(scaled, var_list, tape))
        return list(zip(self._as_in_float32(gradients), variables, strict=True))


class _LegacyGradients(tf_keras.optimizers.legacy.Optimizer):
    """As `_Gradients`, for `tf_keras.optimizers.legacy`."""

    def _get_gradients(
        self, tape: Any, loss: Any, var_list: Sequence[Any], grad_loss: Any = None
    ) -> Any:
        with tape:
            scaled = self._tf_amp_loss_scaling.scale_loss(loss)
        pairs = super()._get_gradients(tape, scaled, var_list, grad_loss)
        gradients, variables = _parted(pairs)
        return list(zip(self._as_in_float32(gradients), variables, strict=True))

    def get_gradients(self, loss: Any, params: Any) -> Any:
        """As for the optimizer's own class, of the scaled loss and unscaled again."""
        scaled = self._tf_amp_loss_scaling.scale_loss(loss)
        return self._as_in_float32(super().get_gradients(scaled, params))

    def get_updates(self, loss: Any, params: Any) -> list[Any]:
        """As for the optimizer's own class: the step of `fit` in a graph of TensorFlow 1.

        What the classes in between add to the updates runs where a step is skipped, too.
        """
        scaling = self._tf_amp_loss_scaling
        if not scaling.is_on:
            return list(super().get_updates(loss, params))
        variables = tf.nest.flatten(params)
        with scaling.step():
            gradients = self.get_gradients(loss, variables)
            scaling.is_in_charge(self)
        values = scaling.unscale(gradients, None if scaling.by_hand else True)
        applied = self._apply_if_finite(list(zip(values, variables, strict=True)), {})
        return [applied]


def _parted(pairs: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    pairs = list(pairs)
    return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]


class TfKerasInPlace(_TfKeras):
    """The methods for `tf_keras.optimizers`; a mixin."""

    behind = _Gradients

    def _scope(self, options: Mapping[str, Any]) -> str:
        return options.get("name") or self.name or "optimizer"

    def _create_variables(self, variables: Sequence[Any], present: Sequence[Any]) -> None:
        del present
        self.build(variables)

    def _sum_over_replicas(self, pairs: Sequence[tuple[Any, Any]]) -> Any:
        return self.aggregate_gradients(pairs)


class LegacyInPlace(_TfKeras):
    """The methods for `tf_keras.optimizers.legacy`; a mixin."""

    behind = _LegacyGradients
    sums_only_itself = (
        tf.distribute.experimental.ParameterServerStrategy,
        tf.distribute.experimental.CentralStorageStrategy,
    )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The own class makes a copy of what `__class__` says.
        copied = copy.deepcopy(self._plain(), memo)
        object.__setattr__(copied, "__class__", type(self))
        return copied

    def _scope(self, options: Mapping[str, Any]) -> str:
        del options
        return self._name

    def _create_variables(self, variables: Sequence[Any], present: Sequence[Any]) -> None:
        del variables
        self._create_all_weights([variable for _, variable in present])

    def _sum_over_replicas(self, pairs: Sequence[tuple[Any, Any]]) -> Any:
        present = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        return self._aggregate_gradients(self._transform_unaggregated_gradients(present))


class _FromConfig:
    own_class: Any

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> Any:
        """Makes an optimizer of its own class."""
        return cls.own_class.from_config(config, custom_objects)


class TfKerasLossScaleOptimizer(_FromConfig, tf_keras_loss_scale.LossScaleOptimizerV3):
    """What an optimizer that a custom loop gave a loss scale is for tf_keras.

    So `compile` does not scale again. There are no instances of its own.
    """


class LegacyLossScaleOptimizer(_FromConfig, tf_keras_loss_scale.LossScaleOptimizer):
    """As `TfKerasLossScaleOptimizer`, for `tf_keras.optimizers.legacy`."""


class _TfKerasByHand(ByHand):
    """What tf_keras's own loss-scale optimizers have besides; a mixin."""

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return self.dynamic_growth_steps is not None

    @property
    def initial_scale(self) -> float:
        """The scale of the first step."""
        return self.manager.rule.initial_scale

    @property
    def dynamic_growth_steps(self) -> int | None:
        """Finite steps after which the scale grows, or None if it does not."""
        return getattr(self.manager.rule, "growth_interval", None)


class TfKerasByHand(_TfKerasByHand, TfKerasInPlace):
    """The methods of a `tf_keras.optimizers` one that a custom loop gave a scale; a mixin."""

    shown = TfKerasLossScaleOptimizer


class LegacyByHand(_TfKerasByHand, LegacyInPlace):
    """As `TfKerasByHand`, for `tf_keras.optimizers.legacy`; a mixin."""

    shown = LegacyLossScaleOptimizer
