"""`wrap_optimizer`: one entry point for the optimizers of TensorFlow, tf_keras and Keras 3."""

from __future__ import annotations

import enum
import sys
from typing import Any

import tensorflow as tf

from tf_amp.loss_scale.in_place import scaling_of
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
    """Puts a loss scale around an optimizer.

    Under Horovod the order is `wrap_optimizer(hvd.DistributedOptimizer(opt))`: gradients are
    reduced before they are checked, so that all processes skip the same steps.

    Args:
        opt: An optimizer of one of the kinds in `Family`.
        loss_scale: `"dynamic"` (default), a positive number (a static scale), a rule such as
            `DynamicLossScale(initial=2.0**10)`, or a `LossScaleManager` to share.
        strict: Whether a step whose loss was not scaled is an error instead of one warning.

    Returns:
        An optimizer of the same kind, with `scale_loss`, `unscale` and `manager` besides.

    Raises:
        ValueError: If `opt` is wrapped already, by this function or by the loss-scale optimizer
            of its own library, or if `loss_scale` is not legal.
        TypeError: If `opt` is no optimizer of a known kind.
    """
    family = find_family(opt)
    require_not_wrapped(opt)
    if isinstance(loss_scale, LossScaleManager):
        manager = loss_scale
    else:
        window = getattr(opt, "gradient_accumulation_steps", None) or 1
        manager = LossScaleManager(loss_scale, window=window, strict=strict)
    horovod = type(opt).__module__.startswith("horovod")
    wrapper: Any
    if family is Family.V1:
        from tf_amp.loss_scale.v1_optimizer import V1LossScaleOptimizer

        # Horovod's v1 optimizer reduces in compute_gradients, before the check.
        wrapper = V1LossScaleOptimizer(opt, manager)
    elif family is Family.KERAS:
        from tf_amp.loss_scale.keras_optimizer import KerasLossScaleOptimizer

        wrapper = KerasLossScaleOptimizer(opt, manager, horovod=horovod)
    elif family is Family.TF_KERAS:
        from tf_amp.loss_scale.tf_keras_optimizer import TfKerasLossScaleOptimizer

        wrapper = TfKerasLossScaleOptimizer(opt, manager, horovod=horovod)
    else:
        from tf_amp.loss_scale.tf_keras_optimizer import LegacyLossScaleOptimizer

        wrapper = LegacyLossScaleOptimizer(opt, manager, horovod=horovod)
    mark_wrapped(opt, wrapper)
    return wrapper


def is_wrapped(opt: Any, *, in_place: bool = True) -> bool:
    """Whether `opt` scales the loss.

    Args:
        opt: An optimizer.
        in_place: Whether one counts that `compile` gave a loss scale, and not only those made by
            `wrap_optimizer` or by the class of its own library.
    """
    if isinstance(getattr(opt, "manager", None), LossScaleManager):
        return True
    return (in_place and scaling_of(opt) is not None) or _is_loss_scale_optimizer_of_library(opt)


def manager_of(opt: Any) -> LossScaleManager | None:
    """The loss scale of an optimizer, however it came by it; None if it has none of ours."""
    scaling = scaling_of(opt)
    manager = getattr(opt, "manager", None) if scaling is None else scaling.manager
    return manager if isinstance(manager, LossScaleManager) else None


def wrapper_of(opt: Any) -> Any:
    """The wrapper that drives `opt`, or None."""
    return getattr(opt, "__dict__", {}).get(_MARK)


def mark_wrapped(opt: Any, wrapper: Any) -> None:
    """Records that `wrapper` drives `opt`."""
    # Past the attribute machinery of the optimizers, which would track the wrapper.
    object.__setattr__(opt, _MARK, wrapper)


def require_not_wrapped(opt: Any) -> None:
    """Refuses an optimizer that would scale the loss twice.

    Raises:
        ValueError: If `opt` is a loss-scale optimizer, or is driven by one.
    """
    if is_wrapped(opt):
        raise ValueError(
            "The optimizer scales the loss already; wrapping it again would scale twice. "
            f"Received: opt={type(opt).__name__}. Use it as it is, or wrap its inner optimizer."
        )
    wrapper = wrapper_of(opt)
    if wrapper is not None:
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


def _is_loss_scale_optimizer_of_library(opt: Any) -> bool:
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(opt, keras.optimizers.LossScaleOptimizer):
        return True
    tf_keras = sys.modules.get("tf_keras")
    if tf_keras is not None and isinstance(opt, tf_keras.mixed_precision.LossScaleOptimizer):
        return True
    from tensorflow.python.training.experimental import loss_scale_optimizer

    return isinstance(opt, loss_scale_optimizer.MixedPrecisionLossScaleOptimizer)
