"""`wrap_optimizer`: one entry point for the optimizers of TensorFlow, tf_keras and Keras 3."""

from __future__ import annotations

import enum
import sys
from typing import Any

import tensorflow as tf

from tf_amp.loss_scale.in_place import LoopScaling, Scaling, give_scaling, scaling_of
from tf_amp.loss_scale.manager import LossScaleManager

# Marks an optimizer that a wrapper drives; the value is the wrapper.
_MARK = "_tf_amp_loss_scale_optimizer"


class Family(enum.Enum):
    """Which library an optimizer comes from."""

    V1 = "tf.compat.v1.train.Optimizer"
    KERAS = "keras.optimizers.Optimizer (Keras 3)"
    TF_KERAS = "tf_keras.optimizers.Optimizer"
    TF_KERAS_LEGACY = "tf_keras.optimizers.legacy.Optimizer"


def wrap_optimizer(opt: Any, loss_scale: Any = "dynamic", *, strict: bool = False) -> Any:
    """Gives an optimizer a loss scale.

    An optimizer of Keras 3 or tf_keras stays the object that it is; one of `tf.compat.v1.train`
    gets a wrapper around it.

    Under Horovod the order is `wrap_optimizer(hvd.DistributedOptimizer(opt))`: gradients are
    reduced before they are checked, so that all processes skip the same steps.

    Args:
        opt: An optimizer of one of the kinds in `Family`.
        loss_scale: `"dynamic"` (default), a positive number (a static scale), a rule such as
            `DynamicLossScale(initial=2.0**10)`, or a `LossScaleManager` to share.
        strict: Whether a step whose loss was not scaled is an error instead of one warning.

    Returns:
        The optimizer, which has `scale_loss`, `unscale` and `manager` besides.

    Raises:
        ValueError: If `opt` is wrapped already, by this function or by the loss-scale optimizer
            of its own library, or if `loss_scale` is not legal.
        TypeError: If `opt` is no optimizer of a known kind.
    """
    family = find_family(opt)
    require_not_wrapped(opt)
    window = getattr(opt, "gradient_accumulation_steps", None) or 1
    if not isinstance(loss_scale, LossScaleManager):
        loss_scale = LossScaleManager(loss_scale, window=window, strict=strict)
    elif window > 1 and loss_scale.window != window:
        raise ValueError(
            "One scale must hold for a whole window of accumulated gradients. Received: "
            f"gradient_accumulation_steps={window} and a manager with "
            f"window={loss_scale.window}. Make the manager with window={window}."
        )
    if family is Family.V1:
        from tf_amp.loss_scale.v1_optimizer import V1LossScaleOptimizer

        # Horovod's v1 optimizer reduces in compute_gradients, before the check.
        wrapper = V1LossScaleOptimizer(opt, loss_scale)
        mark_driven(opt, wrapper)
        return wrapper
    return scale_by_hand(opt, loss_scale, horovod=is_of_horovod(opt))


def scale_by_hand(opt: Any, manager: LossScaleManager, *, horovod: bool) -> Any:
    """Gives an optimizer of Keras 3 or tf_keras a loss scale for a custom loop; returns it."""
    scale_in_place(opt, LoopScaling(manager, horovod))
    return opt


def scale_in_place(opt: Any, scaling: Scaling | LoopScaling) -> None:
    """Gives an optimizer of Keras 3 or tf_keras a loss scale.

    Raises:
        ValueError: If the backend of Keras is not TensorFlow.
    """
    family = find_family(opt)
    if family is not Family.KERAS:
        from tf_amp.loss_scale import tf_keras_optimizer as methods

        by_hand, of_compile = (
            (methods.TfKerasByHand, methods.TfKerasInPlace)
            if family is Family.TF_KERAS
            else (methods.LegacyByHand, methods.LegacyInPlace)
        )
        give_scaling(opt, scaling, by_hand if scaling.by_hand else of_compile)
        return
    backend = sys.modules["keras"].backend.backend()
    if backend != "tensorflow":
        raise ValueError(
            f"tf_amp scales losses of TensorFlow programs; the backend of Keras is {backend!r}. "
            "Set KERAS_BACKEND=tensorflow before importing keras."
        )
    from tf_amp.loss_scale.keras_optimizer import KerasByHand, KerasInPlace, LossScaleStore

    give_scaling(opt, scaling, KerasByHand if scaling.by_hand else KerasInPlace)
    object.__setattr__(opt, "loss_scale_store", LossScaleStore(scaling.manager))


def is_of_horovod(opt: Any) -> bool:
    """Whether an optimizer is Horovod's `DistributedOptimizer`."""
    return type(opt).__module__.startswith("horovod")


def is_wrapped(opt: Any) -> bool:
    """Whether `opt` scales the loss, however it came by its scale."""
    return has_fixed_scale(opt) or _has_loss_scale(opt)


def has_fixed_scale(opt: Any) -> bool:
    """Whether an optimizer has the fixed scale of Keras 3; one asked for by hand tops it."""
    return getattr(opt, "loss_scale_factor", None) not in (None, 1)


def manager_of(opt: Any) -> LossScaleManager | None:
    """The loss scale of an optimizer, however it came by it; None if it has none of ours."""
    scaling = scaling_of(opt)
    manager = getattr(opt, "manager", None) if scaling is None else scaling.manager
    return manager if isinstance(manager, LossScaleManager) else None


def mark_driven(opt: Any, wrapper: Any) -> None:
    """Makes `wrapper_of` return the wrapper that drives `opt`."""
    # Past the attribute machinery of the optimizer, which would track the wrapper.
    object.__setattr__(opt, _MARK, wrapper)


def wrapper_of(opt: Any) -> Any:
    """The wrapper that drives `opt`, or None."""
    return getattr(opt, "__dict__", {}).get(_MARK)


def require_not_wrapped(opt: Any) -> None:
    """Refuses an optimizer that would scale the loss twice.

    Raises:
        ValueError: If `opt` scales the loss, or is driven by a wrapper that does.
    """
    if _has_loss_scale(opt):
        raise ValueError(
            "The optimizer scales the loss already; wrapping it again would scale twice. "
            f"Received: opt={type(opt).__name__}. Use it as it is, or make a new optimizer."
        )
    if wrapper_of(opt) is not None:
        raise ValueError(
            "The optimizer was wrapped before, and the wrapper that came out is in charge of it. "
            f"Received: opt={type(opt).__name__}. Use that wrapper, or make a new optimizer."
        )


def find_family(opt: Any) -> Family:
    """The kind of an optimizer.

    Raises:
        TypeError: If it is none that is known.
    """
    if isinstance(opt, tf.compat.v1.train.Optimizer):
        return Family.V1
    # An optimizer of a library that is not imported cannot exist.
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(opt, keras.optimizers.Optimizer):
        return Family.KERAS
    tf_keras = sys.modules.get("tf_keras")
    if tf_keras is not None:
        if isinstance(opt, tf_keras.optimizers.legacy.Optimizer):
            return Family.TF_KERAS_LEGACY
        if isinstance(opt, tf_keras.optimizers.Optimizer):
            return Family.TF_KERAS
    raise TypeError(
        "`opt` must be an optimizer object of one of these kinds: "
        f"{', '.join(family.value for family in Family)}. Received: opt={opt!r} of type "
        f"{type(opt).__module__}.{type(opt).__qualname__}"
    )


def _has_loss_scale(opt: Any) -> bool:
    return manager_of(opt) is not None or _is_loss_scale_optimizer_of_library(opt)


def _is_loss_scale_optimizer_of_library(opt: Any) -> bool:
    keras = sys.modules.get("keras")  # tf_keras, where a program says so for a library
    of_keras = getattr(keras, "optimizers", None)
    if isinstance(opt, getattr(of_keras, "LossScaleOptimizer", ())):
        return True
    tf_keras = sys.modules.get("tf_keras")
    if tf_keras is not None and isinstance(opt, tf_keras.mixed_precision.LossScaleOptimizer):
        return True
    from tensorflow.python.training.experimental import loss_scale_optimizer

    return isinstance(opt, loss_scale_optimizer.MixedPrecisionLossScaleOptimizer)
