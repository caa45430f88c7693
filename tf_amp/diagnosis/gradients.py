"""The gradients of a step: what float16 loses of them, and with which loss scale it loses least."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import backprop

from tf_amp.diagnosis.recording import Key
from tf_amp.loss_scale.gradients import LARGEST_FLUSHED, variable_name
from tf_amp.loss_scale.rule import DynamicLossScale
from tf_amp.loss_scale.telemetry import scale_variables
from tf_amp.patches import Patches

_FIRST_INFINITE = 65520.0
"""From here on float16 rounds to infinity: half a step over its largest, 65,504."""
_SHOWN = 5
_OF_LIBRARIES = frozenset(("dynamic_scale", "current_loss_scale"))
"""The variables of the loss scale optimizers of Keras 3 and of tf_keras."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradient:
    """What float16 loses of the gradient of one variable, at one loss scale.

    Attributes:
        variable: the variable's name.
        node: the node that makes the gradient.
        elements: how many elements it has (of a sparse one: those that are stored).
        zero: how many of them are 0 in float32 already.
        flushed: how many are not 0, and are in float16 at the scale.
        overflowed: how many are finite, and are not in float16 at the scale.
        non_finite: how many are NaN or infinite in float32.
        largest: the largest magnitude among the finite ones, without a loss scale.
        exponents: e -> how many elements have a magnitude over 2^(e-1) and up to 2^e, without a
            loss scale.
    """

    variable: str
    node: str
    elements: int
    zero: int
    flushed: int
    overflowed: int
    non_finite: int
    largest: float
    exponents: Mapping[int, int]

    @property
    def share(self) -> float:
        """The share of the elements other than 0 that are flushed."""
        return self.flushed / max(self.elements - self.zero, 1)

    def __str__(self) -> str:
        told = f"{self.variable}: {self.share:.1%} of {self.elements:,} flushed to 0"
        if self.overflowed:
            told += f", {self.overflowed:,} overflow"
        if self.non_finite:
            told += f", {self.non_finite:,} not finite in float32 either"
        return f"{told}; largest {self.largest:.3g} ({self.node})"


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients of a step in float16.

    Attributes:
        loss_scale: what they are judged at.
        of_variables: each gradient, the one that loses the largest share first.
    """

    loss_scale: float
    of_variables: tuple[Gradient, ...]

    @property
    def exponents(self) -> Counter[int]:
        """Those of all gradients, see `Gradient.exponents`."""
        total: Counter[int] = Counter()
        for gradient in self.of_variables:
            total.update(gradient.exponents)
        return total

    def share(self, loss_scale: float) -> float:
        """The share of all elements other than 0 that a power of two as loss scale flushes to 0."""
        exponents = self.exponents
        least = math.log2(LARGEST_FLUSHED) - math.log2(loss_scale)
        lost = sum(count for exponent, count in exponents.items() if exponent <= least)
        return lost / max(exponents.total(), 1)

    @property
    def best_loss_scale(self) -> float | None:
        """The power of two that loses least, within the bounds of the dynamic loss scale.

        With an element that overflows the whole step is skipped, so it is none with which there is
        one, if it can be helped. Among those that lose equally little it is the one in the middle:
        gradients inside the network, which are not measured, then have room in both directions.
        None where all elements are 0.
        """
        largest = max((g.largest for g in self.of_variables), default=0.0)
        if not largest:
            return None
        low, high = (int(math.log2(n)) for n in (DynamicLossScale.floor, DynamicLossScale.ceiling))
        fitting = [n for n in range(low, high + 1) if largest * 2.0**n < _FIRST_INFINITE] or [low]
        shares = {n: self.share(2.0**n) for n in fitting}
        best = [n for n in fitting if shares[n] == min(shares.values())]
        return 2.0 ** best[len(best) // 2]

    def __str__(self) -> str:
        worst = [g for g in self.of_variables if g.flushed or g.overflowed or g.non_finite]
        share = sum(g.flushed for g in worst) / max(self.exponents.total(), 1)
        over = sum(g.overflowed for g in worst)
        number = len(self.of_variables)
        lines = [f"Gradients of {number} variables in float16 at a loss scale of "]
        lines[0] += f"{self.loss_scale:,g}: {share:.1%} of what is not 0 is flushed to 0"
        lines[0] += f", {over:,} overflow" if over else ""
        best = self.best_loss_scale
        if best is not None:
            power, left = int(math.log2(best)), self.share(best)
            lines.append(f"  loses least: a loss scale of 2^{power} = {best:,.0f}: {left:.1%}")
        lines.extend(f"  {gradient}" for gradient in worst[:_SHOWN])
        if len(worst) > _SHOWN:
            lines.append(f"  and {len(worst) - _SHOWN} more")
        return "\n".join(lines)


@contextlib.contextmanager
def watched_tapes() -> Iterator[list[tuple[str, tf.Tensor]]]:
    """Notes the gradients that tapes give meanwhile: the variable's name and the tensor."""
    found: list[tuple[str, tf.Tensor]] = []

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            given = original(tape, target, sources, *args, **kwargs)
            pairs = zip(tf.nest.flatten(sources), tf.nest.flatten(given), strict=True)
            for source, made in pairs:
                values = made.values if isinstance(made, tf.IndexedSlices) else made
                if hasattr(source, "handle") and values is not None:
                    found.append((variable_name(source), values))
            return given

        return gradient

    patches = Patches()
    patches.replace(backprop.GradientTape, "gradient", noting)
    try:
        yield found
    finally:
        patches.undo()


def scale_of(variables: Sequence[tf.Variable], values: Mapping[int, tf.Tensor]) -> float:
    """By what a step multiplies its loss: the loss scale among the variables that it uses, else 1.

    Args:
        variables: those that the step uses.
        values: what variables held, by the id of the variable, in place of what they hold now.
    """
    ours = {id(variable) for variable in scale_variables()}
    for variable in variables:
        name = variable.name.rpartition("/")[2].removesuffix(":0")
        if id(variable) in ours or name in _OF_LIBRARIES:
            value = values.get(id(variable))
            return float(variable.read_value() if value is None else value)
    return 1.0


class GradientMeter:
    """Counts the values of gradients as they are told.

    Args:
        names: the tensor of each gradient -> the variable.
        present: what the gradients that are told are multiplied by.
        loss_scale: what they are judged at.
    """

    def __init__(self, names: Mapping[Key, str], present: float, loss_scale: float) -> None:
        self._names, self._present, self._loss_scale = names, present, loss_scale
        self._found: dict[Key, Gradient] = {}

    def tell(self, key: Key, values: np.ndarray) -> None:
        """Takes in the values of one; those of a loop are added up."""
        # In float64 the products are exact, so that what is counted is what float16 rounds to 0.
        sizes = np.abs(np.ravel(values).astype(np.float64)) / self._present
        finite = sizes[np.isfinite(sizes)]
        kept = finite[finite > 0]
        scaled = kept * self._loss_scale
        fractions, exponents = np.frexp(kept)
        exponents = exponents - (fractions == 0.5)
        counts = Counter(dict(zip(*np.unique(exponents, return_counts=True), strict=True)))
        before = self._found.get(key)
        new = Gradient(
            variable=self._names[key],
            node=key[1],
            elements=sizes.size,
            zero=finite.size - kept.size,
            flushed=int(np.count_nonzero(scaled <= LARGEST_FLUSHED)),
            overflowed=int(np.count_nonzero(scaled >= _FIRST_INFINITE)),
            non_finite=sizes.size - finite.size,
            largest=float(np.max(kept, initial=0)),
            exponents={int(exponent): int(count) for exponent, count in counts.items()},
        )
        self._found[key] = new if before is None else _sum(before, new)

    def gradients(self) -> Gradients:
        """What was told."""
        worst = sorted(self._found.values(), key=lambda g: (-g.overflowed, -g.share, g.variable))
        return Gradients(self._loss_scale, tuple(worst))


def _sum(one: Gradient, other: Gradient) -> Gradient:
    counted = ("elements", "zero", "flushed", "overflowed", "non_finite")
    return dataclasses.replace(
        one,
        largest=max(one.largest, other.largest),
        exponents=Counter(one.exponents) + Counter(other.exponents),
        **{name: getattr(one, name) + getattr(other, name) for name in counted},
    )
