"""What is said about skipped steps, and what happens when skipping does not stop."""

from __future__ import annotations

import dataclasses
import logging
import threading

from tf_amp.loss_scale.rule import LossScale, LossScaleState

_LOGGER = logging.getLogger("tf_amp.loss_scale")

_REMEDIES = (
    "What to try: (1) train a few steps in float32: if the loss is not finite there either, the "
    "model or the learning rate is at fault, not the precision; (2) keep the layer of that "
    "variable in float32 (TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DENYLIST_ADD=<op type>); "
    "(3) clip gradients or lower the learning rate; (4) allow a smaller scale with "
    "DynamicLossScale(floor=...)."
)


class LossScaleAtFloorError(FloatingPointError):
    """Steps are skipped again and again although the loss scale cannot fall any further."""


@dataclasses.dataclass(frozen=True)
class SkippedStep:
    """One skipped step, as Python numbers.

    Attributes:
        step: The optimizer's iteration, or None where it has no counter.
        before: The scale the step was taken with, or None where only the new one is known.
        state: The state after the step.
        culprit: Name and kind ("inf" or "NaN") of the first gradient that is not finite, or None
            where it is not known, for example because it is on another replica.
    """

    step: int | None
    before: float | None
    state: LossScaleState
    culprit: tuple[str, str] | None

    def describe(self) -> str:
        """For example `step 12: the gradient of dense/kernel has inf`."""
        step = "a step" if self.step is None else f"step {self.step}"
        if self.step is not None and self.before is None:
            step = f"a step up to step {self.step}"  # nobody saw it
        if self.culprit is None:
            return f"{step}: a gradient is not finite"
        name, kind = self.culprit
        return f"{step}: the gradient of {name} has {kind}"

    def describe_scale(self) -> str:
        """For example `32768 -> 16384`."""
        now = f"{self.state.scale:g}"
        return f"is now {now}" if self.before is None else f"{self.before:g} -> {now}"


class SkipReporter:
    """Logs skipped steps at a falling rate and carries out `at_floor`.

    The first, second, fourth, eighth ... skipped step is logged. At the floor there is one
    warning, or one error, for each uninterrupted run of skipped steps.

    Args:
        rule: The rule, whose `at_floor` and `floor_patience` apply.
    """

    def __init__(self, rule: LossScale) -> None:
        self._rule = rule
        self._next_notice = 1
        self._floor_reported = False
        self._lock = threading.Lock()

    def know(self, skipped_steps: int) -> None:
        """Takes steps that were skipped before, in another run, as reported."""
        with self._lock:
            self._next_notice = 1 << skipped_steps.bit_length()

    def report(self, skipped: SkippedStep) -> None:
        """Logs `skipped` if its turn has come.

        Raises:
            LossScaleAtFloorError: If the rule says `at_floor="raise"` and its patience is over.
        """
        state = skipped.state
        with self._lock:
            notice_is_due = state.skipped_steps >= self._next_notice
            if notice_is_due:
                self._next_notice = 1 << int(state.skipped_steps).bit_length()
            at_floor = self._rule.is_at_floor(state)
            floor_is_news = at_floor and not self._floor_reported
            self._floor_reported = at_floor
        if at_floor and self._rule.at_floor == "raise":
            raise LossScaleAtFloorError(self._floor_message(skipped))
        if floor_is_news and self._rule.at_floor == "warn":
            _LOGGER.warning("%s", self._floor_message(skipped))
        elif notice_is_due:
            taken_with = state.scale if skipped.before is None else skipped.before
            if taken_with <= self._rule.lowest_scale:
                scale = f"the loss scale stays at {state.scale:g}, its lowest"
                hint = f"Skipped in a row: {state.skipped_in_a_row}."
            else:
                scale = f"loss scale {skipped.describe_scale()}"
                hint = "This is normal in the first steps of training and now and then later."
            _LOGGER.info(
                "Skipped %s; %s (%d skipped so far). %s",
                skipped.describe(),
                scale,
                state.skipped_steps,
                hint,
            )

    def _floor_message(self, skipped: SkippedStep) -> str:
        return (
            f"{skipped.state.skipped_in_a_row} steps in a row were skipped although the loss "
            f"scale is at its floor, {skipped.state.scale:g}: nothing is being learnt. Last, "
            f"{skipped.describe()}. {_REMEDIES}"
        )
