"""Flags for training programs that use absl: ``import tf_amp.flags`` defines ``--amp`` and more.

    from absl import app
    import tf_amp.flags

    app.run(main)    # python train.py --amp --amp_dtype=bfloat16 --amp_log_path=trace

They are read when `absl.app.run` has parsed the command line, and take effect before ``main``: they
set the variables of ``env_config.md``, over what the environment says. absl comes with TensorFlow.
Once `absl.app.run` has set absl's logging up, the lines of this package go there, and absl's own
``--verbosity`` says which: 0 for all, -1 for warnings alone.
"""

from __future__ import annotations

import os
from typing import Any

from absl import app, flags

from tf_amp import autoload
from tf_amp.api import disable_mixed_precision_graph_rewrite
from tf_amp.cli.options import CHOICES
from tf_amp.env_config import check_environment
from tf_amp.env_variables import (
    DTYPE,
    ENABLE,
    ENABLE_GRAPH_REWRITE,
    ENABLE_LOSS_SCALING,
    ENABLING_VARIABLES,
    IGNORE_PERFORMANCE,
    LEVEL,
    LOG_PATH,
    RULES,
)

_SWITCH = flags.DEFINE_boolean("amp", None, "Automatic mixed precision: on, or off with --noamp.")
_VALUES: dict[str, Any] = {
    DTYPE: flags.DEFINE_enum("amp_dtype", None, CHOICES[DTYPE], "The target dtype."),
    LEVEL: flags.DEFINE_enum("amp_level", None, CHOICES[LEVEL], "How far to go."),
    RULES: flags.DEFINE_string("amp_rules", None, "A TOML file of rules on single nodes."),
    LOG_PATH: flags.DEFINE_string("amp_log_path", None, "A directory for `tf-amp explain`."),
    ENABLE_LOSS_SCALING: flags.DEFINE_boolean("amp_loss_scaling", None, "The loss scale alone."),
    IGNORE_PERFORMANCE: flags.DEFINE_boolean(
        "amp_ignore_performance", None, "On hardware without fast units too."
    ),
}
"""Variable -> the flag that sets it."""


@flags.multi_flags_validator(
    ["amp", *(flag.name for flag in _VALUES.values())],
    message="--amp_... says how, and does nothing without --amp",
)
def _are_legal(values: dict[str, Any]) -> bool:
    return bool(values.pop("amp")) or all(value is None for value in values.values())


def _apply() -> None:
    """Switches AMP on or off as the flags say; without --amp and --noamp the environment counts."""
    if _SWITCH.value is None:
        return
    if not _SWITCH.value:
        os.environ.update(dict.fromkeys(ENABLING_VARIABLES, "0"))
        from tf_amp import installation

        if installation.current() is not None:
            disable_mixed_precision_graph_rewrite()
        return
    given = {name: flag.value for name, flag in _VALUES.items() if flag.value is not None}
    texts = {name: str(int(v)) if isinstance(v, bool) else v for name, v in given.items()}
    os.environ.update({ENABLE: "1", ENABLE_GRAPH_REWRITE: "1", **texts})
    check_environment()
    autoload.activate()


app.call_after_init(_apply)
