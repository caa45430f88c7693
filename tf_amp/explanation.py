"""What `tf_amp.explain()` gives: the state of AMP in this process as a text for people."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tf_amp.env_variables import LOG_PATH
from tf_amp.state import FunctionStatus, Status
from tf_amp.terminal import plain_table


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What AMP did in this process, and why not more; `print` it.

    Attributes:
        status: what it tells of, as `tf_amp.status()` gave it.
    """

    status: Status

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        status = self.status
        if not status.enabled:
            yield f"AMP is off: {status.why}"
            return
        if status.graph_rewrite:
            yield f"AMP is on, {status.why}: {status.reason}"
            yield f"cost table: {status.cost_table}"
            if status.cost_table_xla != status.cost_table:
                yield f"cost table under XLA: {status.cost_table_xla}"
            yield f"list edits: {', '.join(status.list_edits) or 'none'}"
            for rule, count in status.rules.items():
                yield f"rule {rule}: meets {count or 'no'} node{'s'[: count != 1]}"
        else:
            yield f"AMP is on, {status.why}, and converts nothing: {status.reason}"
        if status.fused:
            counts = (f"{rule} {count}" for rule, count in status.fused.items())
            yield f"done in float32 too: {', '.join(counts)}"
        scaling = "on" if status.loss_scaling else "off"
        yield f"loss scaling: {scaling} ({status.loss_scaling_reason})"
        scales = collections.Counter(map(_scale_line, status.loss_scale.get("loss_scales", ())))
        for line, count in scales.items():
            yield line + (f" ({count} of this name)" if count > 1 else "")
        if names := ", ".join(status.trained_unscaled):
            yield f"trained in float16 without a loss scale of tf_amp's: {names}"
        if names := ", ".join(status.traced_before):
            yield f"traced before AMP was on, so float32 until traced anew: {names}"
        if status.graph_rewrite:
            yield from self._functions()

    def _functions(self) -> Iterator[str]:
        status = self.status
        if status.functions:
            head = ("function", "products low", "casts", "stays float32")
            yield plain_table(head, map(_row, status.functions))
        else:
            yield "No function with a matrix product or convolution was traced while it was on."
        if status.log_path:
            yield f"Why not this op? tf-amp explain {status.log_path} --op MatMul --missed"
        else:
            yield f"For single nodes and their Python lines, run it with {LOG_PATH}=DIR."


def _scale_line(scale: Mapping[str, Any]) -> str:
    state = scale["state"] or {}
    told = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in state.items())
    return f"loss scale of {scale['name']}: {told or 'not known'}"


def _row(function: FunctionStatus) -> tuple[str, ...]:
    kept = "; ".join(f"{count} {what}" for what, count in function.kept.items())
    low = f"{function.products_low} of {function.products}"
    return function.name, low, str(function.casts), kept or "-"
