"""From what a user or a file says to a rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tf_amp.loss_scale.rule import DynamicLossScale, LossScale, NoLossScale, StaticLossScale

_RULES: Mapping[str, type[LossScale]] = {
    rule.__name__: rule for rule in (NoLossScale, StaticLossScale, DynamicLossScale)
}


def from_config(config: Mapping[str, Any]) -> LossScale:
    """The rule that `LossScale.get_config` described.

    Raises:
        ValueError: If `config["class_name"]` names no rule.
    """
    arguments = dict(config)
    class_name = arguments.pop("class_name", None)
    if class_name not in _RULES:
        raise ValueError(
            f"A loss-scale config needs a `class_name` out of {', '.join(_RULES)}. "
            f"Received: {class_name!r}"
        )
    return _RULES[class_name](**arguments)


def resolve(loss_scale: Any) -> LossScale:
    """The rule meant by a `loss_scale` argument.

    Args:
        loss_scale: `"dynamic"`, a positive number (a static scale), a `LossScale`, or the dict of
            `LossScale.get_config`.

    Raises:
        ValueError: If `loss_scale` is none of these, or a number that is no scale.
    """
    if isinstance(loss_scale, LossScale):
        return loss_scale
    if isinstance(loss_scale, Mapping):
        return from_config(loss_scale)
    if loss_scale == "dynamic":
        return DynamicLossScale()
    if isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool):
        return StaticLossScale(float(loss_scale))
    raise ValueError(
        '`loss_scale` must be "dynamic", a positive number, or a rule such as '
        "tf_amp.loss_scale.DynamicLossScale(initial=2.0**15). "
        f"Received: loss_scale={loss_scale!r}"
    )
