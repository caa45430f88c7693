"""The hooks in Keras 3 and tf_keras: `compile`, `fit`, and the methods of compiled optimizers."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf

from tf_amp.compatibility import KERAS, TF_KERAS, require
from tf_amp.loss_scale.in_place import (
    CustomLoopNotice,
    Scaling,
    applying,
    give_scaling,
    is_applying,
    scaling_of,
)
from tf_amp.loss_scale.telemetry import LOSS_SCALE_CALLBACK, loss_scale_callback
from tf_amp.loss_scale.wrapping import Family, find_family, is_wrapped, manager_of, wrapper_of
from tf_amp.patches import Patches

_LOGGER = logging.getLogger("tf_amp.loss_scale")
_Method = Callable[..., Any]


def hook_keras(keras: ModuleType | None, patches: Patches, *, wraps: bool) -> None:
    """Hooks Keras 3; Keras 2, and a backend other than TensorFlow, are left alone.

    Args:
        keras: The imported module.
        patches: Collects what is replaced.
        wraps: Whether `compile` gives optimizers a loss scale.
    """
    if keras is None or not hasattr(keras, "backend") or not hasattr(keras, "ops"):
        return
    if keras.backend.backend() != "tensorflow":
        return
    require(KERAS)
    patches.replace(keras.Model, "fit", _make_fit)
    if not wraps:
        return
    notice = CustomLoopNotice()
    base = keras.optimizers.Optimizer
    make_apply = functools.partial(_make_apply, notice=notice)

    make_apply_pairs = functools.partial(_make_apply_pairs, notice=notice)

    def prepare(model: Any, optimizer: Any) -> None:
        patches.replace_all(type(optimizer), "scale_loss", _make_scale_loss)
        patches.replace_all(type(optimizer), "apply", make_apply)
        # The base class's own leads to `apply`, that of a subclass need not.
        for owner in type(optimizer).__mro__:
            if "apply_gradients" in owner.__dict__ and not issubclass(base, owner):
                patches.replace(owner, "apply_gradients", make_apply_pairs)
        for owner in type(model).__mro__:
            # One that is a tf.function is traced once, and its first trace may see no scale.
            if inspect.isfunction(owner.__dict__.get("train_step")):
                patches.replace(owner, "train_step", _make_train_step)

    patches.replace(keras.Model, "compile", functools.partial(_make_compile, prepare=prepare))
    patches.replace(keras.optimizers.LossScaleOptimizer, "apply", _make_applying)
    patches.replace(base, "apply", make_apply)


def hook_tf_keras(tf_keras: ModuleType | None, patches: Patches, *, wraps: bool) -> None:
    """Hooks tf_keras; arguments as for `hook_keras`."""
    if tf_keras is None:
        return
    require(TF_KERAS)
    patches.replace(tf_keras.Model, "fit", _make_fit)
    if not wraps:
        return
    make_apply = functools.partial(_make_apply_gradients, notice=CustomLoopNotice())

    def prepare(model: Any, optimizer: Any) -> None:
        del model
        patches.replace_all(type(optimizer), "minimize", _make_minimize)
        patches.replace_all(type(optimizer), "apply_gradients", make_apply)

    patches.replace(tf_keras.Model, "compile", functools.partial(_make_compile, prepare=prepare))
    for optimizer_class in (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer):
        patches.replace(optimizer_class, "apply_gradients", make_apply)


def _make_compile(original: _Method, prepare: Callable[[Any, Any], None]) -> _Method:
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        try:
            for optimizer in tf.nest.flatten(getattr(self, "optimizer", None)):
                _scale_in_place(self, optimizer, prepare)
        except Exception:
            _LOGGER.warning(
                "The optimizer of compile() could not be given a loss scale; the model trains "
                "without loss scaling.",
                exc_info=True,
            )
        return result

    return compile


def _scale_in_place(model: Any, optimizer: Any, prepare: Callable[[Any, Any], None]) -> None:
    name = type(optimizer).__name__
    if optimizer is None:
        return
    if scaling_of(optimizer) is not None:
        prepare(model, optimizer)
        return
    if is_wrapped(optimizer) or wrapper_of(optimizer) is not None:
        if manager_of(optimizer) is None:
            _LOGGER.info("The %s of compile() scales the loss, and tf_amp leaves it alone.", name)
        return
    family = find_family(optimizer)
    prepare(model, optimizer)
    scaling = give_scaling(optimizer)
    if family is Family.KERAS:
        from tf_amp.loss_scale.keras_optimizer import LossScaleStore

        object.__setattr__(optimizer, "loss_scale_store", LossScaleStore(scaling.manager))
    with model.distribute_strategy.scope():
        scaling.manager.create_variables()
    _LOGGER.info(
        "Loss scaling: the optimizer %s of compile() scales its loss by %r.",
        name,
        scaling.manager.rule,
    )


def _make_fit(original: _Method) -> _Method:
    signature = inspect.signature(original)

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if manager_of(getattr(self, "optimizer", None)) is None:
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        callbacks = bound.arguments.get("callbacks")
        callbacks = (
            [callbacks]
            if callbacks is not None and not isinstance(callbacks, (list, tuple))
            else list(callbacks or [])
        )
        # A ready-made CallbackList takes no further callback; its owner runs the loop.
        ready_made = any(type(one).__name__ == "CallbackList" for one in callbacks)
        if not ready_made and not any(hasattr(one, LOSS_SCALE_CALLBACK) for one in callbacks):
            bound.arguments["callbacks"] = [*callbacks, loss_scale_callback(self, log=False)]
        return original(*bound.args, **bound.kwargs)

    return fit


def _make_train_step(original: _Method) -> _Method:
    def train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        scaling = scaling_of(getattr(self, "optimizer", None))
        if scaling is None or not _takes_part():
            return original(self, *args, **kwargs)
        with scaling.step():
            return original(self, *args, **kwargs)

    return train_step


def _make_scale_loss(original: _Method) -> _Method:
    def scale_loss(self: Any, loss: Any) -> Any:
        scaling = scaling_of(self)
        if scaling is None or is_applying():
            return original(self, loss)
        with applying():
            loss = original(self, loss)
        return scaling.scale_loss(loss)

    return scale_loss


def _make_minimize(original: _Method) -> _Method:
    signature = inspect.signature(original)

    def minimize(self: Any, *args: Any, **kwargs: Any) -> Any:
        scaling = scaling_of(self)
        if scaling is None or scaling.in_step or not _takes_part():
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        if "loss" not in bound.arguments:  # (*args, **kwargs): it hands them to one that has it.
            return original(self, *args, **kwargs)
        loss, tape = bound.arguments["loss"], bound.arguments.get("tape")
        with scaling.step():
            if callable(loss):
                bound.arguments["loss"] = lambda: scaling.scale_loss(loss())
            elif tape is not None:
                with tape:
                    bound.arguments["loss"] = scaling.scale_loss(loss)
            return original(*bound.args, **bound.kwargs)

    return minimize


def _make_apply(original: _Method, notice: CustomLoopNotice) -> _Method:
    """`apply` of an optimizer of Keras 3."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None, **kwargs: Any) -> Any:
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        _apply_in_place(
            self,
            grads,
            self._trainable_variables if trainable_variables is None else trainable_variables,
            lambda values: original(self, values, trainable_variables, **kwargs),
            notice,
        )

    return apply


def _make_apply_pairs(original: _Method, notice: CustomLoopNotice) -> _Method:
    """`apply_gradients` of a subclass of Keras 3's optimizers that has one of its own."""

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]

        def run(values: Sequence[Any]) -> Any:
            return original(self, list(zip(values, variables, strict=True)), *args, **kwargs)

        _apply_in_place(self, [gradient for gradient, _ in pairs], variables, run, notice)
        return self._iterations

    return apply_gradients


def _apply_in_place(
    optimizer: Any,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    run: Callable[[Sequence[Any]], Any],
    notice: CustomLoopNotice,
) -> None:
    scaling = _scaling_in_charge(optimizer, notice)
    # Whatever is wrong with these, the optimizer itself says it.
    legal = len(gradients) == len(variables) and any(one is not None for one in gradients)
    if scaling is None or not legal:
        run(gradients if scaling is None else scaling.unscale(gradients))
        return
    from tf_amp.loss_scale.keras_optimizer import gated_apply

    if not optimizer.built:
        optimizer.build(variables)
        optimizer.built = True

    def run_inside(values: Sequence[Any]) -> Any:
        with applying():
            return run(values)

    gated_apply(
        scaling.manager,
        optimizer,
        gradients,
        variables,
        run_inside,
        unscale=lambda: scaling.unscale(gradients),
        horovod=scaling.horovod,
    )


def _make_apply_gradients(original: _Method, notice: CustomLoopNotice) -> _Method:
    """`apply_gradients` of an optimizer of tf_keras."""

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        scaling = _scaling_in_charge(self, notice)
        pairs = list(grads_and_vars)
        gradients = [gradient for gradient, _ in pairs]
        if scaling is None or not any(gradient is not None for gradient in gradients):
            return original(self, pairs, *args, **kwargs)
        from tf_amp.loss_scale.tf_keras_optimizer import gated_apply_gradients, options_of

        def run(values: Any, **options: Any) -> Any:
            with applying():
                return original(self, values, **options)

        method = functools.partial(original, self)
        gated_apply_gradients(
            scaling.manager,
            self,
            [(g, v) for g, (_, v) in zip(scaling.unscale(gradients), pairs, strict=True)],
            run,
            options_of(method, args, kwargs),
            horovod=scaling.horovod,
        )
        return self.iterations

    return apply_gradients


def _make_applying(original: _Method) -> _Method:
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        with applying():
            return original(self, *args, **kwargs)

    return apply


def _scaling_in_charge(optimizer: Any, notice: CustomLoopNotice) -> Scaling | None:
    """The loss scale that a call of `apply` has to heed; gives the notice where there is none."""
    if is_applying():
        return None
    scaling = scaling_of(optimizer)
    driven = wrapper_of(optimizer) is not None or is_wrapped(optimizer, in_place=False)
    driven = driven or getattr(optimizer, "_is_wrapped_by_loss_scale_optimizer", False)
    if not driven and not (scaling is not None and scaling.loss_was_scaled):
        notice.give(optimizer)
    return scaling if _takes_part() else None


def _takes_part() -> bool:
    """Whether steps can be skipped here: not in graphs of TensorFlow 1, nor between replicas."""
    return (
        tf.compat.v1.executing_eagerly_outside_functions()
        and not tf.distribute.in_cross_replica_context()
    )
