"""Turns TensorFlow's own automatic mixed precision off while ours is on.

Two rewrites of one graph would leave it unclear whose lists are in force, and reports wrong.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from tensorflow.python.eager import context as context_lib

_log = logging.getLogger("tf_amp")

_OPTIONS = (
    "auto_mixed_precision",
    "auto_mixed_precision_cpu",
    "auto_mixed_precision_mkl",
    "auto_mixed_precision_onednn_bfloat16",
)


class UpstreamOptions:
    """The grappler options of TensorFlow's own pass, held off between install and uninstall."""

    def __init__(self) -> None:
        self._set = context_lib.Context.set_optimizer_experimental_options

    def install(self) -> None:
        """Turns the options off that are on, and refuses to turn them on."""
        set_options = self._set

        @functools.wraps(set_options)
        def without_upstream(self: context_lib.Context, options: Mapping[str, Any]) -> None:
            set_options(self, _held_off(options))

        context_lib.Context.set_optimizer_experimental_options = without_upstream
        context = context_lib.context()
        # The public getter would list the devices, which must not happen during an import.
        options = dict(getattr(context, "_optimizer_experimental_options", {}))
        held_off = _held_off(options)
        if held_off != options:
            set_options(context, held_off)

    def uninstall(self) -> None:
        """Lets the options be set again; what was turned off stays off."""
        context_lib.Context.set_optimizer_experimental_options = self._set


def _held_off(options: Mapping[str, Any]) -> dict[str, Any]:
    on = [name for name in _OPTIONS if options.get(name)]
    if on:
        _log.warning(
            "TensorFlow's own %s was asked for as well. It is turned off while tf_amp is on: one "
            "graph cannot follow two sets of lists. Call "
            "tf_amp.disable_mixed_precision_graph_rewrite() first to use it instead.",
            " and ".join(on),
        )
    return {name: False if name in on else value for name, value in options.items()}
