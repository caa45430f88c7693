"""The hooks in Keras 3 and tf_keras: `compile`, `fit`, `train_step`, and loops of their own."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, MutableSet
from types import ModuleType
from typing import Any

import tensorflow as tf

from tf_amp.compatibility import KERAS, TF_KERAS, require
from tf_amp.loss_scale.custom_loop_notice import (
    NOT_WRAPPED,
    OWN_GRADIENTS_IN_A_LOOP,
    CustomLoopNotice,
)
from tf_amp.loss_scale.in_place import Scaling, applying, is_applying, scaling_of, takes_part
from tf_amp.loss_scale.manager import LossScaleManager
from tf_amp.loss_scale.seen_graphs import mark_scaled
from tf_amp.loss_scale.telemetry import LOSS_SCALE_CALLBACK, loss_scale_callback
from tf_amp.loss_scale.wrapping import (
    is_of_horovod,
    is_wrapped,
    manager_of,
    scale_in_place,
)
from tf_amp.patches import Patches

_LOGGER = logging.getLogger("tf_amp.loss_scale")
_Method = Callable[..., Any]


def hook_keras(
    keras: ModuleType | None,
    patches: Patches,
    notice: CustomLoopNotice | None,
    model_classes: MutableSet[type],
) -> None:
    """Hooks Keras 3; Keras 2, and a backend other than TensorFlow, are left alone.

    Args:
        keras: The imported module.
        patches: Collects what is replaced.
        notice: Is for loops of optimizers that have no loss scale; None if `compile` gives none.
        model_classes: Those of which the steps are hooked; `compile` adds others.
    """
    if keras is None or not hasattr(keras, "backend") or not hasattr(keras, "ops"):
        return
    if keras.backend.backend() != "tensorflow":
        return
    require(KERAS)
    patches.replace(keras.Model, "fit", _make_fit)
    if notice is None:
        return
    notice.begin(patches)
    make_seen = functools.partial(_make_seen, notice=notice)

    def prepare(model_class: type) -> None:
        model_classes.add(model_class)
        for owner in model_class.__mro__:
            # One that is a tf.function is traced once, and its first trace may see no scale.
            if inspect.isfunction(owner.__dict__.get("train_step")):
                patches.replace(owner, "train_step", _make_train_step)

    for one in list(model_classes):
        prepare(one)
    patches.replace(
        keras.Model,
        "compile",
        functools.partial(_make_compile, notice=notice, prepare=prepare),
    )
    patches.replace(keras.optimizers.LossScaleOptimizer, "apply", _make_applying)
    patches.replace(keras.optimizers.LossScaleOptimizer, "scale_loss", _make_scaling)
    patches.replace(keras.optimizers.Optimizer, "apply", make_seen)
    patches.replace(keras.optimizers.Optimizer, "scale_loss", _make_scaling)


def hook_tf_keras(
    tf_keras: ModuleType | None, patches: Patches, notice: CustomLoopNotice | None
) -> None:
    """Hooks tf_keras; arguments as for `hook_keras`."""
    if tf_keras is None:
        return
    require(TF_KERAS)
    from tf_amp.loss_scale import v1_in_tf_keras

    patches.replace(tf_keras.Model, "fit", _make_fit)
    v1_in_tf_keras.hook(patches, wraps=notice is not None)
    if notice is None:
        return
    notice.begin(patches)
    from tf_keras.src.engine import training_v1
    from tf_keras.src.mixed_precision import loss_scale_optimizer as theirs

    for model_class in (tf_keras.Model, training_v1.Model):
        patches.replace(model_class, "compile", functools.partial(_make_compile, notice=notice))
    make_seen = functools.partial(_make_seen, notice=notice)
    for optimizer_class in (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer):
        patches.replace(optimizer_class, "apply_gradients", make_seen)
    make_step = functools.partial(_make_get_updates, notice=notice)
    patches.replace(tf_keras.optimizers.legacy.Optimizer, "get_updates", make_step)
    for scaling_class in (theirs.LossScaleOptimizer, theirs.LossScaleOptimizerV3):
        patches.replace(scaling_class, "get_scaled_loss", _make_scaling)


def _make_sayer() -> Callable[[str], None]:
    said: set[str] = set()

    def say(line: str) -> None:
        # A program of many models compiles as often, and one line tells as much as twenty.
        _LOGGER.log(logging.DEBUG if line in said else logging.INFO, "%s", line)
        said.add(line)

    return say


def _make_compile(
    original: _Method, notice: CustomLoopNotice, prepare: Callable[[type], None] | None = None
) -> _Method:
    say = _make_sayer()

    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        with _warning_of_faults("compile()"):
            found = getattr(self, "optimizer", None)
            # TensorFlow keeps for good the class of what it finds to be no structure.
            is_one = not isinstance(found, (list, tuple, dict))
            for optimizer in [found] if is_one else tf.nest.flatten(found):
                if optimizer is None:
                    continue
                with self.distribute_strategy.scope():
                    scales = _scale(optimizer, notice, say, "compile()")
                if scales and prepare is not None:
                    prepare(type(self))
        return result

    return compile


@contextlib.contextmanager
def _warning_of_faults(where: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        _LOGGER.warning(
            "The optimizer of %s could not be given a loss scale, and trains without one.",
            where,
            exc_info=True,
        )


def _make_get_updates(original: _Method, notice: CustomLoopNotice) -> _Method:
    """The step of a graph of TensorFlow 1, by an optimizer that was given to no `compile`."""
    say = _make_sayer()

    def get_updates(self: Any, loss: Any, params: Any) -> Any:
        scales = False
        with _warning_of_faults("get_updates()"):
            scales = not is_wrapped(self) and _scale(self, notice, say, "get_updates()")
        step = functools.partial(self.behind.get_updates if scales else original, self)
        return step(loss, params)

    return get_updates


def _scale(
    optimizer: Any, notice: CustomLoopNotice, say: Callable[[str], None], where: str
) -> bool:
    """Gives an optimizer a loss scale; returns whether it has one of this kind."""
    name = type(optimizer).__name__
    scaling = scaling_of(optimizer)
    if not isinstance(scaling, Scaling):
        if is_wrapped(optimizer):
            if scaling is None and manager_of(optimizer) is None:
                say(f"The {name} of {where} scales the loss, and tf_amp leaves it alone.")
            return False
        window = getattr(optimizer, "gradient_accumulation_steps", None) or 1
        scaling = Scaling(LossScaleManager(window=window), is_of_horovod(optimizer), notice)
        scale_in_place(optimizer, scaling)
        scaling.manager.create_variables()
    scaling.notice = notice  # a copy has none
    line = f"Loss scaling: the optimizer {name} of {where} scales its loss by"
    scaling.announce = functools.partial(say, f"{line} {scaling.manager.rule}.")
    return True


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
        if scaling is None or not takes_part():
            return original(self, *args, **kwargs)
        with scaling.step():
            return original(self, *args, **kwargs)

    return train_step


def _make_seen(original: _Method, notice: CustomLoopNotice) -> _Method:
    """`apply` or `apply_gradients` of a class: of an optimizer that nobody gave a loss scale."""

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        driven = getattr(self, "_is_wrapped_by_loss_scale_optimizer", False)
        if not driven and not is_applying() and not is_wrapped(self):
            own = _has_own_gradients(self)
            notice.give(self, OWN_GRADIENTS_IN_A_LOOP if own else NOT_WRAPPED)
        return original(self, *args, **kwargs)

    return apply


def _has_own_gradients(optimizer: Any) -> bool:
    """Whether the class of an optimizer has its own of the method by which tf_keras takes them."""
    return any(
        name in vars(owner) and not owner.__module__.startswith("tf_keras.")
        for owner in type(optimizer).__mro__
        for name in ("compute_gradients", "_compute_gradients")
    )


def _make_scaling(original: _Method) -> _Method:
    """The method that multiplies a loss: of an optimizer that may have a scale of its library's."""

    def scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        if manager_of(self) is None and is_wrapped(self):
            mark_scaled()
        return original(self, *args, **kwargs)

    return scale


def _make_applying(original: _Method) -> _Method:
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        with applying():
            return original(self, *args, **kwargs)

    return apply
