"""Automatic mixed precision for stock TensorFlow: a graph rewrite and a loss scale.

    import tf_amp

    optimizer = tf_amp.enable_mixed_precision_graph_rewrite(optimizer)

Without a change to the program, the environment variable ``TF_ENABLE_AUTO_MIXED_PRECISION=1`` does
the same. Importing this package imports no TensorFlow and hooks nothing; names are resolved when
they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graph_passes import ListEdit, PrecisionConfig, Report, RewriteResult, Rule
    from tf_amp.api import (
        disable_mixed_precision_graph_rewrite,
        enable_mixed_precision_graph_rewrite,
        explain,
        rewrite_graph_def,
        status,
    )
    from tf_amp.loss_scale import (
        DynamicLossScale,
        LossScaleManager,
        NoLossScale,
        StaticLossScale,
    )
    from tf_amp.model_api import (
        calibrate,
        compare_models,
        convert_saved_model,
        diagnose,
        diagnose_callback,
    )
    from tf_amp.scopes import allow, keep_float32

__version__ = "0.1.0"

__all__ = [
    "enable_mixed_precision_graph_rewrite",
    "disable_mixed_precision_graph_rewrite",
    "status",
    "explain",
    "rewrite_graph_def",
    "convert_saved_model",
    "compare_models",
    "calibrate",
    "diagnose",
    "diagnose_callback",
    "keep_float32",
    "allow",
    "PrecisionConfig",
    "ListEdit",
    "Report",
    "RewriteResult",
    "Rule",
    "DynamicLossScale",
    "StaticLossScale",
    "NoLossScale",
    "LossScaleManager",
]

_MODULES = {
    "tf_amp.api": __all__[:5],
    "tf_amp.model_api": __all__[5:10],
    "tf_amp.scopes": __all__[10:12],
    "graph_passes": __all__[12:17],
    "tf_amp.loss_scale": __all__[17:],
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = getattr(importlib.import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
