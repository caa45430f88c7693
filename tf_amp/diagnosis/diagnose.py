"""The first converted node that loses its values, found by running both graphs on one batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from graph_passes import PrecisionConfig, Remark, Rule, format_rules
from tf_amp.diagnosis.distances import Error, errors
from tf_amp.diagnosis.gradients import Gradients
from tf_amp.diagnosis.recording import Key, Record, Turn
from tf_amp.diagnosis.step import (
    Low,
    Step,
    record_float32,
    record_low,
    rewritten,
)
from tf_amp.tracing.keep_rule import keep_rule

_ROUNDS = 16
"""How many nodes are kept float32, one after another, until all values are finite."""
_GROWTH = 8.0
"""An error that is this many times that of the inputs has jumped."""
_NOISE = 2.0**-18
"""A tensor that is no longer than this part of what it is made of is rounding in float32, 64 times
over."""
_SHOWN = 5
"""How many variables are named."""
_TOLERANCE = {"float16": 0.05, "bfloat16": 0.25}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One converted node that loses its values.

    Attributes:
        remark: the node, why it was converted, and the Python lines that made it.
        function: the function that it is in.
        why: what is wrong with its values.
        largest: the largest magnitude of the same tensor in float32, None where there is none.
        non_finite: how many values are NaN or infinite in mixed precision.
        error: the distance from float32 by its length, None where they cannot be compared.
    """

    remark: Remark
    function: str
    why: str
    largest: float | None
    non_finite: int
    error: float | None

    @property
    def rule(self) -> Rule:
        """The rule that keeps it float32."""
        return keep_rule(self.remark.node, f"tf_amp.diagnose: {self.why}")

    def __str__(self) -> str:
        remark = self.remark
        lines = [f"{remark.op} {remark.node} in {self.function}: {self.why}"]
        lines.append(f"  converted: {remark.reason}")
        lines.extend(f"  at {line}" for line in remark.lines)
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What came of a batch in mixed precision.

    Attributes:
        findings: the nodes that have to stay float32, in the order in which they were found: the
            first one is the first to run.
        finite: whether all values are finite once those stay float32, as they are in float32.
        tensors: how many tensors of converted nodes were looked at.
        float32_finite: whether all of them are finite in float32.
        gradients: what float16 loses of the gradients, None where the target is another dtype or
            the function takes none of variables.
        spoiled: the variables that held values that are not finite before it ran; empty where
            `float32_finite`.
    """

    findings: tuple[Finding, ...]
    finite: bool
    tensors: int
    float32_finite: bool = True
    gradients: Gradients | None = None
    spoiled: tuple[str, ...] = ()

    @property
    def rules(self) -> str:
        """The rules of all findings, as TOML."""
        return format_rules(finding.rule for finding in self.findings)

    def __str__(self) -> str:
        parts = [*map(str, self.findings)]
        if self.findings:
            parts += ["Rules to paste:", self.rules]
        elif not self.tensors:
            parts.append("Nothing is converted in it.")
        elif self.float32_finite:
            parts.append(f"Nothing amiss in {self.tensors} tensors of converted nodes.")
        else:
            parts.append(
                "There are values that are not finite in float32 too: no conversion made them."
                if not self.spoiled
                else "There are values that are not finite in float32 too. Variables hold some "
                f"before it runs, which an earlier step made: {', '.join(self.spoiled[:_SHOWN])}."
            )
        if not self.finite:
            parts.append("With these there are still values that are not finite.")
        if self.gradients is not None:
            parts.append(str(self.gradients))
        return "\n\n".join(parts)


def diagnose(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    config: PrecisionConfig,
    *,
    tolerance: float | None = None,
    values: Mapping[int, tf.Tensor] | None = None,
    loss_scale: float | None = None,
) -> Diagnosis:
    """Runs a function on one batch in float32 and in mixed precision, on copies of its variables.

    Args:
        function: a Python function or tf.function, such as `model.train_step`.
        inputs: its arguments.
        config: how it is converted.
        tolerance: an error over this, and over `_GROWTH` times that of the node's inputs, is a
            finding too where all is finite; by default 0.05 for float16 and 0.25 for bfloat16.
        values: what variables held, by the id of the variable, in place of what they hold now.
        loss_scale: what gradients are judged at; by default that by which the function multiplies
            its loss.

    Raises:
        DiagnosisError: the function takes its batch from an iterator, or cannot be called so.
    """
    step = Step.trace(function, inputs, values or {})
    return diagnose_step(step, config, tolerance=tolerance, loss_scale=loss_scale)


def diagnose_step(
    step: Step,
    config: PrecisionConfig,
    *,
    tolerance: float | None = None,
    loss_scale: float | None = None,
) -> Diagnosis:
    """As `diagnose`, of a function that was traced."""
    float32 = step.library()
    is_float16 = config.target_dtype == "float16"
    gradients = step.measured_gradients(float32, loss_scale) if is_float16 else None
    findings: list[Finding] = []
    least = _TOLERANCE[config.target_dtype] if tolerance is None else tolerance
    right: dict[tuple[Key, Turn], Record] = {}
    asked: set[Key] = set()
    count, target = 0, config.target
    for _ in range(_ROUNDS + 1):
        low = rewritten(step, float32, config)
        records, seen = record_low(step, low, target)
        count = count or len(seen)
        if not seen <= asked:
            asked |= seen
            right.update(record_float32(step, float32, seen))
        finding = _first_lost(low, records, right)
        if finding is None:
            if not findings:
                found = _first_jump(low, records, right, least)
                findings.extend(filter(None, (found,)))
            exact = not any(record.non_finite for record in right.values())
            spoiled = () if exact else step.spoiled
            return Diagnosis(tuple(findings), True, count, exact, gradients, spoiled)
        findings.append(finding)
        config = dataclasses.replace(config, rules=(*config.rules, finding.rule))
    return Diagnosis(tuple(findings[:_ROUNDS]), False, count, gradients=gradients)


def _first_lost(
    low: Low, records: Iterable[Record], right: Mapping[tuple[Key, Turn], Record]
) -> Finding | None:
    """The first tensor that is not finite, and is so in float32."""
    lost: set[tuple[str, str, str]] = set()
    for record in records:
        reference = right.get((low.origin(record.key), record.turn))
        if not record.non_finite:
            continue
        (function, node, _), (calls, _) = record.key, record.turn
        sources = {(calls, function, source) for source in low.sources.get((function, node), ())}
        # What a unit makes has no tensor like it: it is as its inputs are in float32 too.
        is_lost = bool(sources & lost) if reference is None else reference.non_finite > 0
        if is_lost:
            lost.add((calls, function, node))
            continue
        remark = low.remark(record.key)
        if remark is None:
            continue
        why = f"{record.non_finite} values are not finite"
        if reference is not None:
            why += f", of which the largest in float32 is {reference.largest:.4g}"
        return _finding(record, reference, remark, low, why)
    return None


def _first_jump(
    low: Low,
    records: Iterable[Record],
    right: Mapping[tuple[Key, Turn], Record],
    tolerance: float,
) -> Finding | None:
    """The first tensor that is far from float32, and farther than what it is made of."""
    for each in errors(low, records, right):
        remark, error, before = low.remark(each.record.key), each.error, each.before
        if error > tolerance and error > _GROWTH * before and remark and not _is_noise(each):
            why = f"it is {error:.2g} of its length away from float32, its inputs {before:.2g}"
            return _finding(each.record, each.reference, remark, low, why)
    return None


def _is_noise(each: Error) -> bool:
    """Whether float32 has nothing but rounding there either, where all that is added cancels.

    As the gradient of a bias before a batch normalization does.
    """
    right = 0.0 if each.reference is None else each.reference.length
    return right < _NOISE * each.length and right < each.record.length


def _finding(
    record: Record, reference: Record | None, remark: Remark, low: Low, why: str
) -> Finding:
    return Finding(
        remark=remark,
        function=remark.function or low.main,
        why=why,
        largest=None if reference is None else reference.largest,
        non_finite=record.non_finite,
        error=None if reference is None else record.error(reference),
    )
