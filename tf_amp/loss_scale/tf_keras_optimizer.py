"""The loss-scale optimizers for tf_keras: one for its new optimizers, one for its legacy ones.

Both are subclasses of tf_keras's own, so that `compile` does not wrap them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras.src.mixed_precision import loss_scale_optimizer as tf_keras_loss_scale

from tf_amp.loss_scale.custom_loop import CustomLoopMethods
from tf_amp.loss_scale.gate import apply_if_finite
from tf_amp.loss_scale.manager import LossScaleManager

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
    def _from_config(
        cls, config: Mapping[str, Any], custom_objects: Any, deserialize: Callable[..., Any]
    ) -> Any:
        arguments = dict(config)
        inner_optimizer = deserialize(
            arguments.pop("inner_optimizer"), custom_objects=custom_objects
        )
        manager = LossScaleManager.from_config(arguments.pop("manager"))
        return cls(inner_optimizer, manager, **arguments)  # type: ignore[call-arg]

    def _gated(
        self, pairs: list[tuple[Any, Any]], aggregate: Callable[..., Any] | None, apply: Any
    ) -> tf.Tensor:
        variables = [variable for _, variable in pairs]
        gradients = self._unscaled([gradient for gradient, _ in pairs])
        if aggregate is not None and any(gradient is not None for gradient in gradients):
            # The gradients of all replicas are summed first, as tf_keras does before it clips.
            summed = aggregate(list(zip(gradients, variables, strict=True)))
            gradients = [gradient for gradient, _ in summed]
            variables = [variable for _, variable in summed]
        return apply_if_finite(
            self.manager,
            gradients,
            variables,
            lambda values: apply(list(zip(values, variables, strict=True))),
            step=self._optimizer.iterations,
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

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        skip_gradients_aggregation: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Unscales and checks gradients, and applies them if all are finite.

        Args:
            grads_and_vars: Pairs of gradient and variable.
            skip_gradients_aggregation: Whether the gradients are summed over replicas already.
            **kwargs: `experimental_aggregate_gradients`, its opposite by the legacy name, and
                `name`.

        Returns:
            Scalar bool tensor: whether they were applied; False means that the step was skipped.

        Raises:
            ValueError: If there is no gradient at all.
        """
        pairs = list(grads_and_vars)
        inner = self._optimizer
        with tf.init_scope():
            self.build([variable for _, variable in pairs])
            self.manager.create_variables()
        aggregates = kwargs.pop("experimental_aggregate_gradients", True)
        sums = aggregates and not (
            skip_gradients_aggregation or inner._run_with_dtensor or inner._mesh
        )
        return self._gated(
            pairs,
            inner.aggregate_gradients if sums else None,
            lambda applied: inner.apply_gradients(
                applied, skip_gradients_aggregation=True, **kwargs
            ),
        )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Any = None
    ) -> TfKerasLossScaleOptimizer:
        """Makes the optimizer that `get_config` described."""
        made: TfKerasLossScaleOptimizer = cls._from_config(
            config, custom_objects, tf_keras.optimizers.deserialize
        )
        return made


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

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Unscales and checks gradients, and applies them if all are finite.

        Args:
            grads_and_vars: Pairs of gradient and variable.
            name: Name of the operation.
            experimental_aggregate_gradients: Whether to sum the gradients over replicas.

        Returns:
            Scalar bool tensor: whether they were applied; False means that the step was skipped.

        Raises:
            ValueError: If there is no gradient at all.
        """
        pairs = list(grads_and_vars)
        inner = self._optimizer
        present = [variable for gradient, variable in pairs if gradient is not None]
        with tf.init_scope():
            _ = inner.iterations
            inner._create_all_weights(present)
            self.manager.create_variables()

        def aggregate(unscaled: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
            present = [(g, v) for g, v in unscaled if g is not None]
            return list(
                inner._aggregate_gradients(inner._transform_unaggregated_gradients(present))
            )

        return self._gated(
            pairs,
            aggregate if experimental_aggregate_gradients else None,
            lambda applied: inner.apply_gradients(
                applied, name=name, experimental_aggregate_gradients=False
            ),
        )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Any = None
    ) -> LegacyLossScaleOptimizer:
        """Makes the optimizer that `get_config` described."""

        def deserialize(inner_config: Any, custom_objects: Any) -> Any:
            return tf_keras.optimizers.deserialize(
                inner_config, custom_objects=custom_objects, use_legacy_optimizer=True
            )

        made: LegacyLossScaleOptimizer = cls._from_config(config, custom_objects, deserialize)
        return made
