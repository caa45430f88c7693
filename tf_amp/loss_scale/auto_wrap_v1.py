"""The hooks in `tf.compat.v1.train.Optimizer`: gradients are computed and applied by a wrapper."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_amp.loss_scale.notices import CustomLoopNotice
from tf_amp.loss_scale.patching import Patches
from tf_amp.loss_scale.v1_optimizer import V1LossScaleOptimizer, inner_is_running
from tf_amp.loss_scale.v1_saver import make_tolerant_restore
from tf_amp.loss_scale.wrapping import is_wrapped, wrap_optimizer, wrapper_of

_LOGGER = logging.getLogger("tf_amp.loss_scale")
_AUTOMATIC = "_tf_amp_made_by_itself"


def hook(patches: Patches) -> None:
    """Hooks the base class of v1 optimizers, and `Saver.restore`.

    `minimize` needs no hook of its own, since it computes and applies gradients through the two
    methods that are hooked. While a wrapper runs its inner optimizer nothing is wrapped, so that
    an optimizer made of optimizers scales once.

    Args:
        patches: Collects what is replaced.
    """
    base = tf.compat.v1.train.Optimizer
    notice = CustomLoopNotice()
    patches.replace(
        base, "compute_gradients", lambda original: _make_compute_gradients(original, patches)
    )
    patches.replace(
        base, "apply_gradients", lambda original: _make_apply_gradients(original, notice)
    )
    patches.replace(tf.compat.v1.train.Saver, "restore", make_tolerant_restore)


def _make_compute_gradients(original: Callable[..., Any], patches: Patches) -> Callable[..., Any]:
    def compute_gradients(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        wrapper = _wrapper_in_charge(self) or _wrap(self, patches)
        if wrapper is None:
            return original(self, loss, *args, **kwargs)
        return wrapper.compute_gradients(loss, *args, **kwargs)

    return compute_gradients


def _make_apply_gradients(
    original: Callable[..., Any], notice: CustomLoopNotice
) -> Callable[..., Any]:
    def apply_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        wrapper = _wrapper_in_charge(self)
        if wrapper is not None:
            return wrapper.apply_gradients(*args, **kwargs)
        if not inner_is_running() and not is_wrapped(self) and wrapper_of(self) is None:
            notice.give(self)
        return original(self, *args, **kwargs)

    return apply_gradients


def _wrapper_in_charge(optimizer: Any) -> V1LossScaleOptimizer | None:
    """The wrapper that was made here for an optimizer, unless it is the one calling."""
    wrapper = wrapper_of(optimizer)
    if wrapper is None or inner_is_running() or not wrapper.__dict__.get(_AUTOMATIC):
        return None
    found: V1LossScaleOptimizer = wrapper
    return found


def _wrap(optimizer: Any, patches: Patches) -> V1LossScaleOptimizer | None:
    if inner_is_running() or is_wrapped(optimizer) or wrapper_of(optimizer) is not None:
        return None
    wrapper: V1LossScaleOptimizer = wrap_optimizer(optimizer)
    wrapper.__dict__[_AUTOMATIC] = True
    _LOGGER.info(
        "Loss scaling: the optimizer %s is wrapped, %r.",
        type(optimizer).__name__,
        wrapper.manager.rule,
    )
    if type(optimizer).apply_gradients is not tf.compat.v1.train.Optimizer.apply_gradients:
        _take_over_apply_gradients(optimizer, wrapper, patches)
    return wrapper


def _take_over_apply_gradients(
    optimizer: Any, wrapper: V1LossScaleOptimizer, patches: Patches
) -> None:
    """Leads a class's own `apply_gradients`, which the hook on the base does not reach."""
    own = optimizer.apply_gradients

    def apply_gradients(*args: Any, **kwargs: Any) -> Any:
        if inner_is_running() or not patches.active:
            return own(*args, **kwargs)
        return wrapper.apply_gradients(*args, **kwargs)

    optimizer.apply_gradients = apply_gradients
