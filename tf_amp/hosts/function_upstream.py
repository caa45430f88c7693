"""Turns TensorFlow's own automatic mixed precision off while ours is on.

Two rewrites of one graph would leave it unclear whose lists are in force, and reports wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from tensorflow.python.eager import context as context_lib

from tf_amp.patches import Patches

_log = logging.getLogger("tf_amp")

OPTIONS = (
    "auto_mixed_precision",
    "auto_mixed_precision_cpu",
    "auto_mixed_precision_mkl",
    "auto_mixed_precision_onednn_bfloat16",
)
"""Grappler's options that ask for TensorFlow's own pass, in a context and in a session's config."""


def hold_off(patches: Patches) -> None:
    """Turns the grappler options of TensorFlow's own pass off, and refuses to turn them on.

    What was turned off stays off when the patches are undone.
    """

    def make(set_options: Callable[..., None]) -> Callable[..., None]:
        def without_upstream(self: context_lib.Context, options: Mapping[str, Any]) -> None:
            set_options(self, _held_off(options))

        return without_upstream

    # Before there is a context nothing can have been asked for, and an import must not make one.
    if (context := context_lib.context_safe()) is not None:
        # The public getter would list the devices, which must not happen during an import.
        options = dict(getattr(context, "_optimizer_experimental_options", {}))
        held_off = _held_off(options)
        if held_off != options:
            context.set_optimizer_experimental_options(held_off)
    patches.replace(context_lib.Context, "set_optimizer_experimental_options", make)


def _held_off(options: Mapping[str, Any]) -> dict[str, Any]:
    on = [name for name in OPTIONS if options.get(name)]
    if on:
        _log.warning(
            "TensorFlow's own %s was asked for as well. It is turned off while tf_amp is on: one "
            "graph cannot follow two sets of lists. Call "
            "tf_amp.disable_mixed_precision_graph_rewrite() first to use it instead.",
            " and ".join(on),
        )
    return {name: False if name in on else value for name, value in options.items()}
