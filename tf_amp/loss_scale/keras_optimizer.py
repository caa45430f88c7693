"""The loss-scale optimizer for Keras 3.

It is a `keras.optimizers.LossScaleOptimizer`, so that everything in Keras that looks for one
(`compile`, callbacks, `train_step`) treats it as such and does not wrap it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.saving.keras_saveable import KerasSaveable

from tf_amp.loss_scale.gate import apply_if_finite
from tf_amp.loss_scale.in_place import applying
from tf_amp.loss_scale.manager import LossScaleManager
from tf_amp.loss_scale.rule import DynamicLossScale
from tf_amp.loss_scale.step_protocol import CustomLoopMethods

# Settings of the wrapped optimizer that are read and written through the wrapper.
_DELEGATED = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "gradient_accumulation_steps",
)


@keras.saving.register_keras_serializable(package="tf_amp")
class KerasLossScaleOptimizer(
    CustomLoopMethods,
    tf.__internal__.tracking.DelegatingTrackableMixin,
    keras.optimizers.LossScaleOptimizer,
):
    """Scales the loss of a Keras 3 optimizer and skips steps with non-finite gradients.

    In a checkpoint it looks like the wrapped optimizer with one more child, the scale's state. A
    float32 checkpoint therefore restores into it, and its own into a plain optimizer. Attributes it
    does not have itself are those of the wrapped optimizer.

    Args:
        inner_optimizer: The optimizer that does the updates.
        manager: The loss scale; default a new dynamic one, with the window of the optimizer's
            built-in gradient accumulation.
        name: Name; default that of Keras's class.
        horovod: Whether `inner_optimizer` is Horovod's `DistributedOptimizer`.

    Raises:
        ValueError: If the backend of Keras is not TensorFlow.
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        manager: LossScaleManager | None = None,
        name: str | None = None,
        *,
        horovod: bool = False,
    ) -> None:
        if keras.backend.backend() != "tensorflow":
            raise ValueError(
                "tf_amp scales losses of TensorFlow programs; the backend of Keras is "
                f"{keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow before importing keras."
            )
        window = inner_optimizer.gradient_accumulation_steps or 1
        manager = manager if manager is not None else LossScaleManager(window=window)
        if window > 1 and manager.window != window:
            raise ValueError(
                "One scale must hold for a whole window of accumulated gradients. Received: "
                f"gradient_accumulation_steps={window} and a manager with "
                f"window={manager.window}. Make the manager with window={window}."
            )
        # Keras's own attribute machinery needs this one before its constructor runs.
        object.__setattr__(self, "_trackable", inner_optimizer)
        rule = manager.rule
        keras.optimizers.LossScaleOptimizer.__init__(
            self,
            inner_optimizer,
            initial_scale=rule.initial_scale,
            dynamic_growth_steps=getattr(rule, "growth_interval", DynamicLossScale.growth_interval),
            name=name,
        )
        self.manager = manager
        self._protocol = manager.new_protocol()
        self._horovod = horovod
        self.loss_scale_store = LossScaleStore(manager)
        inner_optimizer._track_trackable(manager, "loss_scale", overwrite=True)

    def _track_trackable(self, trackable: Any, name: str, overwrite: bool = False) -> Any:
        # What Keras assigns to attributes of the wrapper is not part of the checkpoint; see above.
        del name, overwrite
        return trackable

    def __dir__(self) -> Iterable[str]:
        # Keras saves what it finds here. The wrapped optimizer is saved as the wrapper already.
        return [name for name in super().__dir__() if name not in ("inner_optimizer", "_trackable")]

    def __getattr__(self, name: str) -> Any:
        # Not before the wrapper is complete: Keras looks at attributes before it sets them.
        if name.startswith("_") or "manager" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._trackable, name)

    def build(self, var_list: Sequence[Any]) -> None:
        """Creates the variables of the wrapped optimizer and of the scale."""
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(var_list)
        if tf.distribute.has_strategy():
            self.manager.create_variables()
        else:
            # The strategy the optimizer was made in, even if it is first used outside its scope.
            with tf.init_scope(), self.inner_optimizer._distribution_strategy.scope():
                self.manager.create_variables()
        self.built = True

    def apply(
        self,
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None = None,
        *,
        unscaled: bool | None = None,
    ) -> Any:
        """Unscales and checks gradients, and applies them if all are finite.

        Args:
            grads: One gradient (tensor, `tf.IndexedSlices` or None) for each variable.
            trainable_variables: The variables; default those the optimizer was built with.
            unscaled: Whether the gradients came out of `unscale`. Default None: they did if it was
                called just before, in the same function.

        Returns:
            Scalar bool tensor: whether they were applied; False means that the step was skipped.

        Raises:
            ValueError: If there is no gradient at all.
            LossScaleProtocolError: If `unscaled` must be said, or if the manager is strict and the
                loss was not scaled.
        """
        grads = list(grads)
        inner = self.inner_optimizer
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if not self.built:
            if trainable_variables is None:
                raise ValueError(
                    "The first call of apply() needs the variables, or the optimizer must be "
                    "built before: optimizer.build(model.trainable_variables). Received: "
                    "trainable_variables=None"
                )
            self.build(trainable_variables)

        def run(values: Sequence[Any]) -> Any:
            with applying():
                return inner.apply(values, trainable_variables)

        return gated_apply(
            self.manager,
            inner,
            grads,
            trainable_variables or inner._trainable_variables,
            run,
            unscale=lambda: self._unscaled(grads, unscaled),
            horovod=self._horovod,
        )

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], *, unscaled: bool | None = None
    ) -> Any:
        """As `apply`, for pairs of gradient and variable."""
        grads, variables = zip(*grads_and_vars, strict=True)
        return self.apply(grads, variables, unscaled=unscaled)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """As for the wrapped optimizer; `fit` calls it at its end."""
        self.inner_optimizer.finalize_variable_values(var_list)
        if tf.executing_eagerly():
            # Where fit ran compiled by XLA, this is when its skipped steps are told.
            # The variable of a strategy has no int(), but a value.
            self.manager.check(step=int(self.inner_optimizer._iterations.value.numpy()))

    def stateless_apply(self, *args: Any, **kwargs: Any) -> Any:
        """Not available with TensorFlow, as for every Keras optimizer."""
        return self.inner_optimizer.stateless_apply(*args, **kwargs)

    @property
    def variables(self) -> list[Any]:
        """The variables of the wrapped optimizer; those of the scale are `manager.variables`."""
        return self.inner_optimizer.variables

    @property
    def dynamic_scale(self) -> tf.Tensor:
        """The name Keras has for `loss_scale`."""
        return self.manager.scale

    def save_own_variables(self, store: Any) -> None:
        """Saves what the wrapped optimizer would save."""
        self.inner_optimizer.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Loads what the wrapped optimizer would load."""
        self.inner_optimizer.load_own_variables(store)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets the variables of the wrapped optimizer."""
        self.inner_optimizer.set_weights(weights)

    def get_config(self) -> dict[str, Any]:
        """The config from which `from_config` makes an equal optimizer with a scale of its own."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "manager": self.manager.get_config(),
            "horovod": self._horovod,
        }

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> KerasLossScaleOptimizer:
        """Makes the optimizer that `get_config` described.

        Raises:
            ValueError: If a subclass calls it that Horovod made around a wrapped optimizer.
        """
        if cls.__mro__[0].__module__.startswith("horovod"):
            raise ValueError(_HOROVOD_ORDER)
        arguments = dict(config)
        inner_optimizer = keras.saving.deserialize_keras_object(
            arguments.pop("inner_optimizer"), custom_objects=custom_objects
        )
        manager = LossScaleManager.from_config(arguments.pop("manager"))
        return cls(inner_optimizer, manager, **arguments)


def gated_apply(
    manager: LossScaleManager,
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Any],
    variables: Sequence[Any],
    apply: Callable[[Sequence[Any]], Any],
    *,
    unscale: Callable[[], Sequence[Any]],
    horovod: bool,
) -> tf.Tensor:
    """Lets a Keras 3 optimizer apply gradients if all are finite.

    Args:
        manager: The loss scale.
        optimizer: The optimizer, built for these variables.
        grads: One gradient for each variable, as they came.
        variables: The variables.
        apply: Applies unscaled gradients.
        unscale: Gives `grads` unscaled. What a variable is overwritten with stays as it is.
        horovod: Whether `optimizer` is Horovod's.

    Returns:
        As `apply_if_finite`.
    """

    def drop_window() -> None:
        steps = optimizer.gradient_accumulation_steps
        optimizer._iterations.assign(optimizer._iterations // steps * steps)
        optimizer._backend_reset_gradient_accumulators()

    return apply_if_finite(
        manager,
        [
            raw if getattr(variable, "overwrite_with_gradient", False) else gradient
            for raw, gradient, variable in zip(grads, unscale(), variables, strict=True)
        ],
        variables,
        apply,
        step=optimizer.iterations,
        horovod=horovod,
        drop_window=drop_window if optimizer.gradient_accumulation_steps else None,
    )


_HOROVOD_ORDER = (
    "Horovod's DistributedOptimizer was put around the loss-scale optimizer. The order must be the "
    "other way round, so that gradients are reduced before they are checked: "
    "wrap_optimizer(hvd.DistributedOptimizer(optimizer))."
)


def _delegate(name: str) -> property:
    def read(self: KerasLossScaleOptimizer) -> Any:
        return getattr(self._trackable, name)

    def write(self: KerasLossScaleOptimizer, value: Any) -> None:
        # The base constructor sets its defaults before the wrapper is complete.
        if "manager" in self.__dict__:
            setattr(self._trackable, name, value)

    return property(read, write, doc=f"`{name}` of the wrapped optimizer.")


for _name in _DELEGATED:
    setattr(KerasLossScaleOptimizer, _name, _delegate(_name))


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
