"""The hooks in Keras 3 and tf_keras: `compile`, `fit` and the start of a custom loop."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tf_amp.loss_scale.callbacks import LOSS_SCALE_CALLBACK, loss_scale_callback
from tf_amp.loss_scale.manager import LossScaleManager
from tf_amp.loss_scale.notices import CustomLoopNotice
from tf_amp.loss_scale.patching import Patches
from tf_amp.loss_scale.wrapping import is_wrapped, mark_wrapped, wrap_optimizer, wrapper_of

_LOGGER = logging.getLogger("tf_amp.loss_scale")


def hook_keras(keras: ModuleType | None, patches: Patches, *, wraps: bool) -> None:
    """Hooks Keras 3; Keras 2, and a backend other than TensorFlow, are left alone.

    Args:
        keras: The imported module.
        patches: Collects what is replaced.
        wraps: Whether `compile` wraps optimizers.
    """
    if keras is None or not hasattr(keras, "backend") or not hasattr(keras, "ops"):
        return
    if keras.backend.backend() != "tensorflow":
        return
    patches.replace(keras.Model, "fit", _make_fit)
    if not wraps:
        return
    library_class = keras.optimizers.LossScaleOptimizer
    patches.replace(keras.Model, "compile", lambda original: _make_compile(original, library_class))
    patches.replace(library_class, "__init__", _make_marking_constructor)
    notice = CustomLoopNotice()
    patches.replace(
        keras.optimizers.Optimizer, "apply", lambda original: _make_noticing(original, notice)
    )


def hook_tf_keras(tf_keras: ModuleType | None, patches: Patches, *, wraps: bool) -> None:
    """Hooks tf_keras; arguments as for `hook_keras`."""
    if tf_keras is None:
        return
    patches.replace(tf_keras.Model, "fit", _make_fit)
    if not wraps:
        return
    library_class = tf_keras.mixed_precision.LossScaleOptimizer
    patches.replace(
        tf_keras.Model, "compile", lambda original: _make_compile(original, library_class)
    )
    notice = CustomLoopNotice()
    for optimizer_class in (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer):
        patches.replace(
            optimizer_class,
            "apply_gradients",
            lambda original: _make_noticing(original, notice),
        )


def _make_compile(original: Callable[..., Any], library_class: type) -> Callable[..., Any]:
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        try:
            asked_for = (
                inspect.signature(original).bind(self, *args, **kwargs).arguments.get("optimizer")
            )
            _wrap_model_optimizer(self, asked_for, library_class)
        except Exception:
            _LOGGER.warning(
                "The optimizer of compile() could not be wrapped; the model trains without loss "
                "scaling.",
                exc_info=True,
            )
        return result

    return compile


def _wrap_model_optimizer(model: Any, asked_for: Any, library_class: Any) -> None:
    """Replaces the optimizer of a model that was just compiled.

    After `compile` and not before: the optimizer that Keras writes into the compile config of a
    `.keras` file stays the plain one, so that the file loads where tf_amp is not installed.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or isinstance(getattr(optimizer, "manager", None), LossScaleManager):
        return
    if isinstance(optimizer, library_class):
        if isinstance(asked_for, library_class):
            _LOGGER.info(
                "compile() was given a %s; it scales the loss, and tf_amp leaves it alone.",
                type(optimizer).__name__,
            )
            return
        # Made by compile() for a mixed_float16 policy. One of the two must scale.
        optimizer = optimizer.inner_optimizer
        optimizer.__dict__.pop("_is_wrapped_by_loss_scale_optimizer", None)
        mark_wrapped(optimizer, None)
        _LOGGER.info(
            "The policy mixed_float16 asks for loss scaling: tf_amp's optimizer does it, in place "
            "of the library's LossScaleOptimizer."
        )
    wrapper = wrapper_of(optimizer)
    if wrapper is None:
        wrapper = wrap_optimizer(optimizer)
        _LOGGER.info(
            "Loss scaling: the optimizer %s of compile() is wrapped, %r.",
            type(optimizer).__name__,
            wrapper.manager.rule,
        )
    model.optimizer = wrapper


def _make_fit(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        manager = getattr(getattr(self, "optimizer", None), "manager", None)
        if not isinstance(manager, LossScaleManager):
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


def _make_marking_constructor(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, inner_optimizer, *args, **kwargs)
        if wrapper_of(inner_optimizer) is None:
            mark_wrapped(inner_optimizer, self)

    return __init__


def _make_noticing(original: Callable[..., Any], notice: CustomLoopNotice) -> Callable[..., Any]:
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        driven = wrapper_of(self) is not None or getattr(
            self, "_is_wrapped_by_loss_scale_optimizer", False
        )
        if not driven and not is_wrapped(self):
            notice.give(self)
        return original(self, *args, **kwargs)

    return apply
