"""Scales the loss of an unchanged script: in the optimizer of `compile()` and in v1 `minimize`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

from tf_amp.after_import import AfterImport
from tf_amp.patches import Patches

_LOGGER = logging.getLogger("tf_amp.loss_scale")


class LossScalingChoice(Protocol):
    """What of the installed state matters here."""

    @property
    def loss_scaling(self) -> bool:
        """Whether optimizers get a loss scale without being asked to one by one."""


class _Hooks:
    """The hooks of this module: none, or one set."""

    def __init__(self) -> None:
        self.patches: Patches | None = None
        self.waiting: AfterImport | None = None


_hooks = _Hooks()


def install(installation: LossScalingChoice) -> str | None:
    """Hooks the libraries that are imported, and the others as soon as they are.

    Installing again changes nothing.

    Args:
        installation: The installed state. Where its `loss_scaling` is false, no optimizer gets a
            loss scale; `fit` still reports the skipped steps of those that were wrapped by hand.

    Returns:
        None, or why a library that is imported already could not be hooked.
    """
    if _hooks.patches is not None:
        return None
    patches = Patches()
    failures: list[str] = []

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

        auto_wrap_keras.hook_keras(module, patches, wraps=installation.loss_scaling)

    def hook_tf_keras(module: ModuleType | None) -> None:
        from tf_amp.loss_scale import auto_wrap_keras

        auto_wrap_keras.hook_tf_keras(module, patches, wraps=installation.loss_scaling)

    def hook_v1(module: ModuleType | None) -> None:
        del module
        from tf_amp.loss_scale import v1_optimizer

        v1_optimizer.hook(patches)

    _hooks.patches = patches
    _hooks.waiting = AfterImport(
        {"keras": hook("Keras", hook_keras), "tf_keras": hook("tf_keras", hook_tf_keras)}
    )
    _hooks.waiting.start()
    if installation.loss_scaling:
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
