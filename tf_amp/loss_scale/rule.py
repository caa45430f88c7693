"""The rule that moves a loss scale: pure functions of a state, without TensorFlow.

A rule answers one question: given the state before a step and whether all gradients of the step
were finite, what is the state after it? The same code runs on Python numbers (in tests and on
the host) and on scalar tensors (inside a training step): every choice goes through `where`, which
is a conditional expression for the former and a select operation for the latter.

The algorithm is dynamic loss scaling as described by Micikevicius et al., "Mixed Precision
Training" (ICLR 2018), section 3.2, with a floor, a ceiling and hysteresis added.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

FLOAT32_MAX = 3.4028234663852886e38
AT_FLOOR_CHOICES = ("warn", "raise", "continue")

# Anything that behaves like a number: a Python number or a scalar tensor.
Number = Any
Where = Callable[[Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class LossScaleState:
    """The state of a loss scale between two steps.

    Attributes:
        scale: The factor the next loss is multiplied by, float32, no unit.
        good_steps: Finite steps since the scale last changed or a step was last skipped.
        skipped_steps: Skipped steps in total.
        skipped_in_a_row: Skipped steps since the last finite one.
    """

    scale: Number
    good_steps: Number = 0
    skipped_steps: Number = 0
    skipped_in_a_row: Number = 0


def choose(condition: Any, if_true: Any, if_false: Any) -> Any:
    """The `where` of Python numbers: `if_true` when `condition` holds, else `if_false`."""
    return if_true if condition else if_false


@dataclasses.dataclass(frozen=True)
class LossScale:
    """What all rules have in common.

    Attributes:
        at_floor: What happens when steps are skipped again and again although the scale cannot
            fall any further: `"warn"` once, `"raise"` a `LossScaleAtFloorError`, or `"continue"`
            in silence.
        floor_patience: Skipped steps in a row after which `at_floor` takes effect.
    """

    at_floor: Literal["warn", "raise", "continue"] = dataclasses.field(default="warn", kw_only=True)
    floor_patience: int = dataclasses.field(default=50, kw_only=True)

    # Whether the loss is multiplied at all; False lets adapters leave the graph as it is.
    scales_loss: ClassVar[bool] = True
    # Whether gradients are checked and a step with a non-finite one is skipped.
    checks_gradients: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.at_floor not in AT_FLOOR_CHOICES:
            raise ValueError(
                f"`at_floor` must be one of {', '.join(AT_FLOOR_CHOICES)}. "
                f"Received: at_floor={self.at_floor!r}"
            )
        _take(self, require_count, "floor_patience")

    @property
    def initial_scale(self) -> float:
        """The scale of the first step."""
        raise NotImplementedError

    @property
    def lowest_scale(self) -> float:
        """The scale below which the rule never goes."""
        return self.initial_scale

    def initial_state(self) -> LossScaleState:
        """The state before the first step."""
        return LossScaleState(scale=self.initial_scale)

    def update(self, state: LossScaleState, finite: Any, where: Where = choose) -> LossScaleState:
        """The state after a step.

        Args:
            state: The state before the step; Python numbers or scalar tensors.
            finite: Whether every gradient of the step was finite; bool or scalar bool tensor.
            where: Chooses between two values; a select on tensors when the state holds tensors.

        Returns:
            The new state; `state` itself is not changed.
        """
        return LossScaleState(
            scale=state.scale,
            good_steps=where(finite, state.good_steps + 1, 0),
            skipped_steps=where(finite, state.skipped_steps, state.skipped_steps + 1),
            skipped_in_a_row=where(finite, 0, state.skipped_in_a_row + 1),
        )

    def is_at_floor(self, state: LossScaleState) -> bool:
        """Whether `at_floor` takes effect in `state` (Python numbers)."""
        return bool(
            state.scale <= self.lowest_scale and state.skipped_in_a_row >= self.floor_patience
        )

    def get_config(self) -> dict[str, Any]:
        """A JSON-able description from which `from_config` makes an equal rule."""
        return {"class_name": type(self).__name__, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class NoLossScale(LossScale):
    """No loss scaling: the loss is not multiplied and no gradient is checked."""

    scales_loss: ClassVar[bool] = False
    checks_gradients: ClassVar[bool] = False

    @property
    def initial_scale(self) -> float:
        """Always 1."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class StaticLossScale(LossScale):
    """A loss scale that never changes.

    A step with a non-finite gradient is skipped, as under a dynamic scale; with
    `skip_non_finite=False` it is applied as it is, which is what
    `tf.compat.v1.mixed_precision.FixedLossScale` does.

    Attributes:
        scale: The scale; positive and finite.
        skip_non_finite: Whether a step with a non-finite gradient is skipped.

    Raises:
        ValueError: If `scale` is not positive and finite.
    """

    scale: float = 2.0**15
    skip_non_finite: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _take(self, _require_scale, "scale")

    @property
    def initial_scale(self) -> float:
        """The one scale."""
        return self.scale

    @property
    def checks_gradients(self) -> bool:  # type: ignore[override]
        """Whether gradients are checked and a step with a non-finite one is skipped."""
        return self.skip_non_finite


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """A loss scale that grows while gradients are finite and backs off when they are not.

    The defaults equal those of TensorFlow's and Keras's dynamic scales as long as the scale stays
    between floor and ceiling.

    Attributes:
        initial: The scale of the first step.
        growth: The factor of a growth; above 1.
        growth_interval: Finite steps without a skipped one after which the scale grows.
        backoff: The factor of a backoff; between 0 and 1.
        hysteresis: Skipped steps in a row that make one backoff.
        floor: The scale never falls below it; may be below 1.
        ceiling: The scale never rises above it; at most the largest float32.

    Raises:
        ValueError: If a value is out of its range; the message says which and the legal ones.
    """

    initial: float = 2.0**15
    growth: float = 2.0
    growth_interval: int = 2000
    backoff: float = 0.5
    hysteresis: int = 1
    floor: float = 1.0
    ceiling: float = 2.0**24

    def __post_init__(self) -> None:
        super().__post_init__()
        _take(self, _require_scale, "initial", "floor", "ceiling")
        _take(self, require_count, "growth_interval", "hysteresis")
        _take(self, _require_number, "growth", "backoff")
        if not (math.isfinite(self.growth) and self.growth > 1):
            raise ValueError(
                "`growth` must be a finite number above 1: it multiplies the scale when it "
                f"grows. Received: growth={self.growth!r}"
            )
        if not 0 < self.backoff < 1:
            raise ValueError(
                "`backoff` must lie between 0 and 1: it multiplies the scale after a skipped "
                f"step. Received: backoff={self.backoff!r}"
            )
        if not self.floor <= self.initial <= self.ceiling:
            raise ValueError(
                "`initial` must lie between `floor` and `ceiling`. Received: "
                f"floor={self.floor!r}, initial={self.initial!r}, ceiling={self.ceiling!r}. "
                "Widen the bounds or choose another start."
            )

    def __str__(self) -> str:
        """The rule in words, for a line of the log."""
        words = {2.0: "doubled", 0.5: "halved"}
        grows = words.get(self.growth, f"times {self.growth:g}")
        falls = words.get(self.backoff, f"times {self.backoff:g}")
        skipped = "one that is" if self.hysteresis == 1 else f"{self.hysteresis} in a row that are"
        return (
            f"a dynamic loss scale ({self.initial:g} at first, {grows} after "
            f"{self.growth_interval} finite steps, {falls} after {skipped} not)"
        )

    @property
    def initial_scale(self) -> float:
        """The scale of the first step."""
        return self.initial

    @property
    def lowest_scale(self) -> float:
        """The floor."""
        return self.floor

    def update(self, state: LossScaleState, finite: Any, where: Where = choose) -> LossScaleState:
        """The state after a step; see `LossScale.update`."""
        good_steps = state.good_steps + 1
        skipped_in_a_row = state.skipped_in_a_row + 1
        grows = good_steps >= self.growth_interval
        # `< 1` and not `== 0`: a tensor's `==` compares identity when v2 behaviour is disabled.
        backs_off = skipped_in_a_row % self.hysteresis < 1

        grown = state.scale * self.growth
        grown = where(grown < self.ceiling, grown, self.ceiling)
        reduced = state.scale * self.backoff
        reduced = where(reduced > self.floor, reduced, self.floor)
        return LossScaleState(
            scale=where(
                finite,
                where(grows, grown, state.scale),
                where(backs_off, reduced, state.scale),
            ),
            good_steps=where(finite, where(grows, 0, good_steps), 0),
            skipped_steps=where(finite, state.skipped_steps, state.skipped_steps + 1),
            skipped_in_a_row=where(finite, 0, skipped_in_a_row),
        )


def require_count(name: str, value: Any) -> int:
    """`value` as a Python integer.

    Raises:
        ValueError: If it is not an integer, Python's or NumPy's, of at least 1.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`{name}` must be an integer >= 1. Received: {name}={value!r}")
    return int(value)


def _require_number(name: str, value: Any) -> float:
    if not _is_number(value):
        raise ValueError(f"`{name}` must be a number. Received: {name}={value!r}")
    return float(value)


def _require_scale(name: str, value: Any) -> float:
    plain = value.item() if hasattr(value, "item") else value
    if not (_is_number(value) and 0 < plain <= FLOAT32_MAX):
        raise ValueError(
            f"`{name}` must be a number above 0 and at most {FLOAT32_MAX:.8g}, the largest "
            f"float32. Received: {name}={value!r}"
        )
    return float(plain)


def _is_number(value: Any) -> bool:
    # NumPy registers its scalars as these; bool is an integer to Python alone.
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _take(rule: LossScale, require: Callable[[str, Any], Any], *names: str) -> None:
    """Checks fields of a rule, and keeps their values as Python numbers."""
    for name in names:
        object.__setattr__(rule, name, require(name, getattr(rule, name)))


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
        loss_scale: `"dynamic"`, a positive number of Python or NumPy (a static scale), a
            `LossScale`, or the dict of `LossScale.get_config`.

    Raises:
        ValueError: If `loss_scale` is none of these, or a number that is no scale.
    """
    if isinstance(loss_scale, LossScale):
        return loss_scale
    if isinstance(loss_scale, Mapping):
        return from_config(loss_scale)
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return DynamicLossScale()
    if _is_number(loss_scale):
        return StaticLossScale(loss_scale)
    raise ValueError(
        '`loss_scale` must be "dynamic", a positive number, or a rule such as '
        "tf_amp.loss_scale.DynamicLossScale(initial=2.0**15). "
        f"Received: loss_scale={loss_scale!r}"
    )
