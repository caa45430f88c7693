"""The comparison of two models, as figures."""

from __future__ import annotations

import dataclasses
import logging
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from tf_amp.comparison.boundaries import boundary_figures
from tf_amp.comparison.callables import Arrays, Signature, load_signatures
from tf_amp.comparison.memory import peak_memory
from tf_amp.comparison.output_figures import OutputFigures, Sums
from tf_amp.comparison.samples import Samples, random_samples, samples_for
from tf_amp.comparison.steps import warn_of_random_numbers
from tf_amp.conversion.convert import as_saved_model, size_on_disk
from tf_amp.conversion.progress import Progress
from tf_amp.diagnosis.recording import DiagnosisError
from tf_amp.model_files import ModelError

_log = logging.getLogger("tf_amp")

ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two models side by side.

    Attributes:
        outputs: the figures of each output.
        samples: on how many samples.
        seconds: signature -> the median time of a call of the first model, and of the second.
        bytes: the sizes on disk.
        memory: what loading and calling them adds to a process at the peak, in bytes; see
            `peak_memory`. None unless asked for.
        boundaries: the figures of what is in low precision inside the second: products, and what
            goes back to float32; by signature in the order of execution. Empty unless asked for.
        boundaries_alone: how many of those have no counterpart in the first.
    """

    outputs: tuple[OutputFigures, ...]
    samples: int
    seconds: Mapping[str, tuple[float, float]]
    bytes: tuple[int, int]
    memory: tuple[int | None, int | None] = (None, None)
    boundaries: tuple[OutputFigures, ...] = ()
    boundaries_alone: int = 0

    def beyond(self, tolerance: float) -> list[OutputFigures]:
        """The outputs that are further apart than a tolerance, see `OutputFigures.within`."""
        return [output for output in self.outputs if not output.within(tolerance)]


def compare(
    first: Path,
    second: Path,
    samples: Samples | None = None,
    *,
    seed: int = 0,
    batch: int = 8,
    count: int = 4,
    rounds: int = ROUNDS,
    boundaries: bool = False,
    memory: bool = False,
) -> Comparison:
    """Runs two models on the same inputs.

    Args:
        first: the model that is right.
        second: the model to judge.
        samples: dicts from names of inputs to arrays, of every signature in common, or records; by
            default random ones.
        seed: of random samples.
        batch: rows of random samples where the signature leaves that open.
        count: how many random samples.
        rounds: how often both are timed, in turns, on the first sample; 0 for not at all.
        boundaries: whether to look inside too, see `Comparison.boundaries`.
        memory: whether to measure what they take of memory, in a process for each.

    Raises:
        ModelError: a model cannot be loaded or fed, or the second lacks what the first gives.
    """
    one, other = load_signatures(first), load_signatures(second)
    if missing := sorted(one.keys() - other.keys()):
        raise ModelError(
            f"The second model lacks the signature {missing[0]!r}. It has: {', '.join(other)}."
        )
    warn_of_random_numbers(one)
    given = list(samples) if isinstance(samples, Iterable) else samples
    made: dict[str, list[Arrays]] = {}
    for key, signature in one.items():
        inputs = signature.inputs
        made[key] = (
            list(random_samples(inputs, seed=seed, batch=batch, count=count))
            if given is None
            else list(samples_for(given, inputs))
        )
        if len(inputs) == len(other[key].inputs) == 1:
            # Keras names an input anew when it loads a model.
            (name,), (theirs,) = inputs, other[key].inputs
            made[key] = [
                {theirs: sample[name], **sample} if name in sample else sample
                for sample in made[key]
            ]
    figures: list[OutputFigures] = []
    seconds = {}
    for key in one:
        figures += differences(key, one[key], other[key], made[key])
        if rounds:
            seconds[key] = _times(one[key], other[key], made[key][0], rounds)
    sizes = size_on_disk(first), size_on_disk(second)
    found = Comparison(tuple(figures), max(map(len, made.values())), seconds, sizes)
    if memory:
        fed = {key: dict(given[0]) for key, given in made.items()}
        found = dataclasses.replace(
            found, memory=(peak_memory(first, fed), peak_memory(second, fed))
        )
    return _with_boundaries(found, first, one, other, made) if boundaries else found


def _with_boundaries(
    found: Comparison,
    first: Path,
    one: Mapping[str, Signature],
    other: Mapping[str, Signature],
    samples: Mapping[str, Iterable[Arrays]],
) -> Comparison:
    inside: list[OutputFigures] = []
    alone = 0
    with (
        tempfile.TemporaryDirectory(prefix="tf-amp-") as room,
        Progress(lambda _: None) as progress,
    ):
        with as_saved_model(first, Path(room), progress) as path:
            original = one if path == first else load_signatures(path)
        for key in one:
            try:
                figures, left = boundary_figures(key, original[key], other[key], samples[key])
            except DiagnosisError as error:
                _log.warning("Nothing is told of the inside of the signature %r. %s", key, error)
                continue
            inside += figures
            alone += left
    return dataclasses.replace(found, boundaries=tuple(inside), boundaries_alone=alone)


def differences(
    key: str,
    one: Signature,
    other: Signature,
    samples: Iterable[Arrays],
    results: Iterable[Mapping[str, np.ndarray]] | None = None,
) -> list[OutputFigures]:
    """How far the outputs of a signature of two models are apart.

    Args:
        key: the signature's key.
        one: that of the model that is right.
        other: that of the model to judge.
        samples: the inputs.
        results: what `results_of` gives for `one`, where that is there already.

    Raises:
        ModelError: the second lacks an output, or gives it in another shape; or none has a value.
    """
    sums: dict[str, Sums] = {}
    fed = list(samples) if results is None else samples
    for right, sample in zip(results or results_of(one, fed), fed, strict=True):
        judged = other.run(sample)
        if lacking := sorted(right.keys() - judged.keys()):
            raise ModelError(
                f"The second model lacks the output {lacking[0]!r} of the signature {key!r}. It "
                f"has: {', '.join(sorted(judged))}."
            )
        for name, value in right.items():
            if value.shape != judged[name].shape:
                raise ModelError(
                    f"The output {name!r} of the signature {key!r} has the shape {value.shape} in "
                    f"the first model and {judged[name].shape} in the second."
                )
            added = sums.setdefault(name, Sums())
            added.add(_as_float64(value), _as_float64(judged[name]))
    found = [sums[name].figures(key, name) for name in sorted(sums)]
    if found and not any(output.values for output in found):
        raise ModelError(f"The signature {key!r} gives no value to compare for these samples.")
    return found


def results_of(
    signature: Signature, samples: Iterable[Arrays]
) -> Iterator[Mapping[str, np.ndarray]]:
    """The outputs of a signature for each sample."""
    for sample in samples:
        yield signature.run(sample)


def _as_float64(value: np.ndarray) -> np.ndarray:
    if np.iscomplexobj(value):
        value = np.stack((value.real, value.imag), -1)
    is_float = tf.as_dtype(value.dtype).is_floating
    return np.asarray(value).astype(np.float64) if is_float else np.asarray(value)


def _times(one: Signature, other: Signature, sample: Arrays, rounds: int) -> tuple[float, float]:
    """The median time of a call of each, in turns; who is first in a round is last in the next."""
    calls = [(one, one.feed(sample)), (other, other.feed(sample))]
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(-1, rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            signature, tensors = calls[which]
            start = time.perf_counter()
            for value in tf.nest.flatten(signature.call(tensors), expand_composites=True):
                value.numpy()
            if number >= 0:
                taken[which].append(time.perf_counter() - start)
    return statistics.median(taken[0]), statistics.median(taken[1])
