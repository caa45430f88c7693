"""The comparison of two models, as figures."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from tf_amp.comparison.callables import Arrays, Signature, load_signatures
from tf_amp.comparison.samples import random_samples
from tf_amp.conversion.convert import size_on_disk
from tf_amp.model_files import ModelError

TOP_K = 5
ROUNDS = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputFigures:
    """How far one output of two models is apart, over all samples.

    Attributes:
        signature: the signature's key.
        name: the output.
        values: how many values there were.
        max_abs: the largest difference.
        max_relative: that by the largest magnitude of the output in the first model.
        cosine: between both outputs, each taken as one vector; 1 of two that are zero.
        overflowed: the share of values that are finite in the first model and not in the second.
        flushed: the share that is 0 in the second model and not in the first.
        top_1: for floating outputs of rank 2, the share of rows with the largest value at the same
            place; for integers and strings, the share of equal values. None for others.
        top_k: for floating outputs of rank 2, the share of the `TOP_K` largest of a row that both
            models have in common.
    """

    signature: str
    name: str
    values: int
    max_abs: float
    max_relative: float
    cosine: float
    overflowed: float
    flushed: float
    top_1: float | None = None
    top_k: float | None = None

    def within(self, tolerance: float) -> bool:
        """Whether nothing overflowed and no difference is larger than the tolerance.

        For integers and strings, whether no larger share than that differs.
        """
        far = self.max_relative if self.is_float else 1 - (self.top_1 or 0)
        return self.overflowed == 0 and far <= tolerance

    @property
    def is_float(self) -> bool:
        """Whether differences mean something."""
        return not math.isnan(self.max_abs)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two models side by side.

    Attributes:
        outputs: the figures of each output.
        samples: on how many samples.
        seconds: signature -> the median time of a call of the first model, and of the second.
        bytes: the sizes on disk.
    """

    outputs: tuple[OutputFigures, ...]
    samples: int
    seconds: Mapping[str, tuple[float, float]]
    bytes: tuple[int, int]

    def beyond(self, tolerance: float) -> list[OutputFigures]:
        """The outputs that are further apart than a tolerance, see `OutputFigures.within`."""
        return [output for output in self.outputs if not output.within(tolerance)]


def compare(
    first: Path,
    second: Path,
    samples: Iterable[Arrays] | None = None,
    *,
    seed: int = 0,
    batch: int = 8,
    count: int = 4,
    rounds: int = ROUNDS,
) -> Comparison:
    """Runs two models on the same inputs.

    Args:
        first: the model that is right.
        second: the model to judge.
        samples: dicts from names of inputs to arrays, of every signature in common; by default
            random ones.
        seed: of random samples.
        batch: rows of random samples where the signature leaves that open.
        count: how many random samples.
        rounds: how often both are timed, in turns, on the first sample; 0 for not at all.

    Raises:
        ModelError: a model cannot be loaded or fed, or the second lacks what the first gives.
    """
    one, other = load_signatures(first), load_signatures(second)
    if missing := sorted(one.keys() - other.keys()):
        raise ModelError(
            f"The second model lacks the signature {missing[0]!r}. It has: {', '.join(other)}."
        )
    given = None if samples is None else list(samples)
    if given is not None and not given:
        raise ModelError("There are no samples.")
    figures: list[OutputFigures] = []
    seconds, fed = {}, 0
    for key in one:
        inputs = one[key].inputs
        made = given or list(random_samples(inputs, seed=seed, batch=batch, count=count))
        fed = len(made)
        figures += _differences(key, one[key], other[key], made)
        if rounds:
            seconds[key] = _times(one[key], other[key], made[0], rounds)
    return Comparison(tuple(figures), fed, seconds, (size_on_disk(first), size_on_disk(second)))


def _differences(
    key: str, one: Signature, other: Signature, samples: Iterable[Arrays]
) -> list[OutputFigures]:
    sums: dict[str, _Sums] = {}
    for sample in samples:
        right, judged = one.call(one.feed(sample)), other.call(other.feed(sample))
        if lacking := sorted(right.keys() - judged.keys()):
            raise ModelError(
                f"The second model lacks the output {lacking[0]!r} of the signature {key!r}."
            )
        for name, value in right.items():
            sums.setdefault(name, _Sums()).add(_array(value), _array(judged[name]), key, name)
    return [sums[name].figures(key, name) for name in sorted(sums)]


def _array(value: tf.Tensor) -> np.ndarray:
    dense = tf.cast(value, tf.float64) if value.dtype.is_floating else value
    return np.asarray(dense.numpy())  # type: ignore[no-any-return]


@dataclasses.dataclass
class _Sums:
    """What is added up over the samples, for one output."""

    values: int = 0
    max_abs: float = 0.0
    largest: float = 0.0
    products: float = 0.0
    squares: tuple[float, float] = (0.0, 0.0)
    overflowed: int = 0
    flushed: int = 0
    top: list[float] = dataclasses.field(default_factory=list)
    common: list[float] = dataclasses.field(default_factory=list)
    is_float: bool = True

    def add(self, right: np.ndarray, judged: np.ndarray, key: str, name: str) -> None:
        if right.shape != judged.shape:
            raise ModelError(
                f"The output {name!r} of the signature {key!r} has the shape {right.shape} in the "
                f"first model and {judged.shape} in the second."
            )
        self.values += right.size
        self.is_float = right.dtype == np.float64
        if not self.is_float:
            self.top.append(float(np.mean(right == judged)))
            return
        finite = np.isfinite(right)
        both = finite & np.isfinite(judged)
        self.overflowed += int(np.sum(finite & ~both))
        self.flushed += int(np.sum((right != 0) & (judged == 0)))
        a, b = right[both], judged[both]
        self.max_abs = max(self.max_abs, float(np.max(np.abs(a - b), initial=0)))
        self.largest = max(self.largest, float(np.max(np.abs(right[finite]), initial=0)))
        self.products += float(a @ b)
        self.squares = (self.squares[0] + float(a @ a), self.squares[1] + float(b @ b))
        if right.ndim == 2 and right.shape[1] > 1:
            self.top.extend(np.argmax(right, 1) == np.argmax(judged, 1))
            k = min(TOP_K, right.shape[1])
            best = (np.argpartition(-x, k - 1, axis=1)[:, :k] for x in (right, judged))
            self.common.extend(
                len(set(p) & set(q)) / k for p, q in zip(*map(np.ndarray.tolist, best), strict=True)
            )

    def figures(self, signature: str, name: str) -> OutputFigures:
        lengths = math.sqrt(self.squares[0]) * math.sqrt(self.squares[1])
        values = max(self.values, 1)
        return OutputFigures(
            signature=signature,
            name=name,
            values=self.values,
            max_abs=self.max_abs if self.is_float else math.nan,
            max_relative=self.max_abs / (self.largest or 1.0) if self.is_float else math.nan,
            cosine=self.products / lengths if lengths else 1.0,
            overflowed=self.overflowed / values,
            flushed=self.flushed / values,
            top_1=float(np.mean(self.top)) if self.top else None,
            top_k=float(np.mean(self.common)) if self.common else None,
        )


def _times(one: Signature, other: Signature, sample: Arrays, rounds: int) -> tuple[float, float]:
    """The median time of a call of each, in turns; who is first in a round is last in the next."""
    calls = [(one, one.feed(sample)), (other, other.feed(sample))]
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(-1, rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            signature, tensors = calls[which]
            start = time.perf_counter()
            for value in signature.call(tensors).values():
                value.numpy()
            if number >= 0:
                taken[which].append(time.perf_counter() - start)
    return statistics.median(taken[0]), statistics.median(taken[1])
