"""Loss scaling for every optimizer a TensorFlow user has.

The rules (`NoLossScale`, `StaticLossScale`, `DynamicLossScale`) need no TensorFlow; everything
else is imported on first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from tf_amp.loss_scale.rule import (
    DynamicLossScale,
    LossScale,
    LossScaleState,
    NoLossScale,
    StaticLossScale,
)

if TYPE_CHECKING:
    from tf_amp.loss_scale.floor import LossScaleAtFloorError
    from tf_amp.loss_scale.gradients import VariableUnderflow, measure_underflow
    from tf_amp.loss_scale.manager import LossScaleManager
    from tf_amp.loss_scale.step_protocol import LossScaleProtocolError
    from tf_amp.loss_scale.telemetry import loss_scale_callback
    from tf_amp.loss_scale.wrapping import is_wrapped, manager_of, wrap_optimizer

_LAZY = {
    "LossScaleAtFloorError": "floor",
    "LossScaleManager": "manager",
    "LossScaleProtocolError": "step_protocol",
    "VariableUnderflow": "gradients",
    "is_wrapped": "wrapping",
    "loss_scale_callback": "telemetry",
    "manager_of": "wrapping",
    "measure_underflow": "gradients",
    "wrap_optimizer": "wrapping",
}

__all__ = [
    "NoLossScale",
    "StaticLossScale",
    "DynamicLossScale",
    "LossScale",
    "LossScaleState",
    "LossScaleManager",
    "wrap_optimizer",
    "is_wrapped",
    "manager_of",
    "measure_underflow",
    "VariableUnderflow",
    "loss_scale_callback",
    "LossScaleAtFloorError",
    "LossScaleProtocolError",
    "counters",
]


def counters() -> dict[str, Any]:
    """The loss scales of this process and how many steps they skipped; see `telemetry.counters`.

    Imports nothing: where no manager was ever made, there is nothing to count.
    """
    telemetry = sys.modules.get("tf_amp.loss_scale.telemetry")
    if telemetry is None:
        return {"managers": 0, "skipped_steps": 0, "loss_scales": []}
    found: dict[str, Any] = telemetry.counters()
    return found


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
