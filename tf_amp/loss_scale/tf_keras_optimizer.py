"""The loss-scale optimizers for tf_keras: one for its new optimizers, one for its legacy ones.

Both are subclasses of tf_keras's own, so that `compile` does not wrap them again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras.src.mixed_precision import loss_scale_optimizer as tf_keras_loss_scale

from tf_amp.loss_scale.gate import apply_if_finite
from tf_amp.loss_scale.manager import LossScaleManager
from tf_amp.loss_scale.step_protocol import CustomLoopMethods

_untracked = tf.__internal__.tracking.no_automatic_dependency_tracking


class _Wrapper(CustomLoopMethods):
    """What the two classes share. In a checkpoint both look like the wrapped optimizer."""

    _optimizer: Any

    def _set_manager(self, manager: LossScaleManager | None, horovod: bool) -> None:
        self.manager = manager if manager is not None else LossScaleManager()
        self._protocol = self.manager.new_protocol()
        self._horovod = horovod
        self._optimizer._track_trackable(self.manager, "loss_scale", overwrite=True)

    @property
    def loss_scale(self) -> tf.Tensor:
        """The current loss scale, a scalar float32 tensor."""
        return self.manager.scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return hasattr(self.manager.rule, "growth_interval")

    @property
    def initial_scale(self) -> float:
        """The scale of the first step."""
        return self.manager.rule.initial_scale

    @property
    def dynamic_growth_steps(self) -> int | None:
        """Finite steps after which the scale grows, or None if it does not."""
        return getattr(self.manager.rule, "growth_interval", None)

    def get_config(self) -> dict[str, Any]:
        """The config from which `from_config` makes an equal optimizer with a scale of its own."""
        return {
            "inner_optimizer": tf_keras.optimizers.serialize(self._optimizer),
            "manager": self.manager.get_config(),
            "horovod": self._horovod,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> Any:
        """Makes the optimizer that `get_config` described."""
        arguments = dict(config)
        inner_optimizer = tf_keras.optimizers.deserialize(
            arguments.pop("inner_optimizer"),
            custom_objects=custom_objects,
            use_legacy_optimizer=issubclass(cls, tf_keras_loss_scale.LossScaleOptimizer),
        )
        manager = LossScaleManager.from_config(arguments.pop("manager"))
        return cls(inner_optimizer, manager, **arguments)  # type: ignore[call-arg]

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        *args: Any,
        unscaled: bool | None = None,
        **kwargs: Any,
    ) -> tf.Tensor:
        """Unscales and checks gradients, and applies them if all are finite.

        Args:
            grads_and_vars: Pairs of gradient and variable.
            *args: As for the wrapped optimizer.
            unscaled: Whether the gradients came out of `unscale`. Default None: they did if it was
                called just before, in the same function.
            **kwargs: As for the wrapped optimizer.

        Returns:
            Scalar bool tensor: whether they were applied; False means that the step was skipped.

        Raises:
            ValueError: If there is no gradient at all.
            LossScaleProtocolError: If `unscaled` must be said, or if the manager is strict and the
                loss was not scaled.
        """
        pairs = list(grads_and_vars)
        gradients = self._unscaled([gradient for gradient, _ in pairs], unscaled)
        return gated_apply_gradients(
            self.manager,
            self._optimizer,
            [(g, variable) for g, (_, variable) in zip(gradients, pairs, strict=True)],
            self._optimizer.apply_gradients,
            options_of(self._optimizer.apply_gradients, args, kwargs),
            horovod=self._horovod,
        )


@tf_keras.saving.register_keras_serializable(package="tf_amp")
class TfKerasLossScaleOptimizer(_Wrapper, tf_keras_loss_scale.LossScaleOptimizerV3):
    """Scales the loss of a tf_keras optimizer and skips steps with non-finite gradients.

    Args:
        inner_optimizer: The optimizer that does the updates.
        manager: The loss scale; default a new dynamic one.
        horovod: Whether `inner_optimizer` is Horovod's `DistributedOptimizer`.
    """

    @_untracked
    def __init__(
        self,
        inner_optimizer: tf_keras.optimizers.Optimizer,
        manager: LossScaleManager | None = None,
        *,
        horovod: bool = False,
    ) -> None:
        super().__init__(inner_optimizer, dynamic=False, initial_scale=1.0)
        self._set_manager(manager, horovod)


@tf_keras.saving.register_keras_serializable(package="tf_amp")
class LegacyLossScaleOptimizer(_Wrapper, tf_keras_loss_scale.LossScaleOptimizer):
    """As `TfKerasLossScaleOptimizer`, for `tf_keras.optimizers.legacy`.

    Args:
        inner_optimizer: The optimizer that does the updates.
        manager: The loss scale; default a new dynamic one.
        horovod: Whether `inner_optimizer` is Horovod's `DistributedOptimizer`.
    """

    def __init__(
        self,
        inner_optimizer: tf_keras.optimizers.legacy.Optimizer,
        manager: LossScaleManager | None = None,
        *,
        horovod: bool = False,
    ) -> None:
        super().__init__(inner_optimizer, dynamic=False, initial_scale=1.0)
        self._set_manager(manager, horovod)


def options_of(
    apply_gradients: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a bound `apply_gradients` behind its first one, all by their names."""
    _, *names = inspect.signature(apply_gradients).parameters
    return {**dict(zip(names, args, strict=False)), **kwargs}


def gated_apply_gradients(
    manager: LossScaleManager,
    optimizer: Any,
    pairs: list[tuple[Any, Any]],
    apply: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    horovod: bool,
) -> tf.Tensor:
    """Lets an optimizer of tf_keras, new or legacy, apply gradients if all are finite.

    Args:
        manager: The loss scale.
        optimizer: The optimizer.
        pairs: Pairs of unscaled gradient and variable.
        apply: The optimizer's `apply_gradients`.
        options: The further arguments of `apply`.
        horovod: Whether `optimizer` is Horovod's.

    Returns:
        As `apply_if_finite`.
    """
    legacy = isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer)
    present = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
    name = optimizer._name if legacy else options.get("name") or optimizer.name or "optimizer"
    # Variables are made outside the branch, and get the names they have in float32.
    with tf.name_scope(name), tf.init_scope():
        if legacy:
            optimizer._create_all_weights([variable for _, variable in present])
        else:
            optimizer.build([variable for _, variable in pairs])
        manager.create_variables()
    sums = options.get("experimental_aggregate_gradients", True)
    sums = sums and not options.get("skip_gradients_aggregation", False)
    if present and sums and tf.distribute.has_strategy():
        # The gradients of all replicas are summed first, as tf_keras does before it clips.
        if legacy:
            present = optimizer._transform_unaggregated_gradients(present)
            pairs = list(optimizer._aggregate_gradients(present))
        else:
            pairs = list(optimizer.aggregate_gradients(pairs))
        options = {**options, "experimental_aggregate_gradients": False}
    variables = [variable for _, variable in pairs]
    return apply_if_finite(
        manager,
        [gradient for gradient, _ in pairs],
        variables,
        lambda values: apply(list(zip(values, variables, strict=True)), **options),
        step=optimizer.iterations,
        horovod=horovod,
    )
