"""Scales the loss of an unchanged script: in the optimizer of `compile()` and in v1 `minimize`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tf_amp.after_import import AfterImport
from tf_amp.loss_scale.custom_loop_notice import CustomLoopNotice
from tf_amp.patches import Patches

_LOGGER = logging.getLogger("tf_amp.loss_scale")


class _Hooks:
    """The hooks of this module: none, or one set.

    Attributes:
        model_classes: Those of which `compile` hooked the step, which the next set hooks as well.
        notices: Of each library. The optimizers of `compile` have it, and ask it for the hooks.
    """

    def __init__(self) -> None:
        self.patches: Patches | None = None
        self.waiting: AfterImport | None = None
        self.model_classes: weakref.WeakSet[type] = weakref.WeakSet()
        self.notices = {name: CustomLoopNotice() for name in ("keras", "tf_keras", "v1")}


_hooks = _Hooks()


def install(*, wraps: bool, waits: bool = False) -> str | None:
    """Hooks the libraries that are imported, and the others as soon as they are.

    Installing again changes nothing.

    Args:
        wraps: Whether optimizers get a loss scale without being asked to one by one; `fit` reports
            the skipped steps of those that were wrapped by hand in any case.
        waits: Whether `UnscaledNotice` is shown what runs, so that loops need not be told earlier.

    Returns:
        None, or why a library that is imported already could not be hooked.
    """
    if _hooks.patches is not None:
        return None
    patches = Patches()
    failures: list[str] = []
    for notice in _hooks.notices.values():
        notice.waits = waits

    def hook(name: str, apply: Callable[[ModuleType | None], None]) -> Callable[[Any], None]:
        def guarded(module: ModuleType | None) -> None:
            try:
                apply(module)
            except (AttributeError, ImportError) as error:
                failures.append(f"loss scaling cannot hook {name}: {error}")
                _LOGGER.warning(
                    "Optimizers of %s get no loss scale by themselves, because this version of it "
                    "is not as expected (%s). Use tf_amp.loss_scale.wrap_optimizer(optimizer).",
                    name,
                    error,
                )

        return guarded

    def hook_keras(module: ModuleType | None) -> None:
        from tf_amp.loss_scale import auto_wrap_keras

        notice = _hooks.notices["keras"] if wraps else None
        auto_wrap_keras.hook_keras(module, patches, notice, _hooks.model_classes)

    def hook_tf_keras(module: ModuleType | None) -> None:
        from tf_amp.loss_scale import auto_wrap_keras

        notice = _hooks.notices["tf_keras"] if wraps else None
        auto_wrap_keras.hook_tf_keras(module, patches, notice)

    def hook_v1(module: ModuleType | None) -> None:
        del module
        from tf_amp.loss_scale import v1_optimizer

        v1_optimizer.hook(patches, _hooks.notices["v1"])

    _hooks.patches = patches
    _hooks.waiting = AfterImport(
        {"keras": hook("Keras", hook_keras), "tf_keras": hook("tf_keras", hook_tf_keras)}
    )
    _hooks.waiting.start()
    if wraps:
        hook("tf.compat.v1.train.Optimizer", hook_v1)(None)
    return "; ".join(failures) or None


def uninstall() -> None:
    """Takes all hooks back.

    What is traced from now on is not scaled, but by optimizers that were wrapped by hand.
    """
    if _hooks.waiting is not None:
        _hooks.waiting.stop()
        _hooks.waiting = None
    if _hooks.patches is not None:
        _hooks.patches.undo()
        _hooks.patches = None
