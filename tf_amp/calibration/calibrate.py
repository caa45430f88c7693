"""Rules that keep float32 what a dtype cannot hold, and what a tolerance needs besides."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from graph_passes import FunctionRemarks, PrecisionConfig, Rule, format_rules
from tf_amp.calibration.ranges import Range, measure
from tf_amp.comparison.callables import Arrays, Signature, load_signatures
from tf_amp.comparison.compare import differences, results_of
from tf_amp.comparison.samples import Samples, samples_for
from tf_amp.comparison.steps import fed, step_of, warn_of_random_numbers
from tf_amp.conversion.convert import NothingToConvertError, as_saved_model, convert
from tf_amp.conversion.progress import Progress, Say
from tf_amp.diagnosis.distances import errors
from tf_amp.diagnosis.recording import DiagnosisError
from tf_amp.diagnosis.step import record_float32, record_low, rewritten
from tf_amp.model_files import ModelError
from tf_amp.tracing.figures import figures_of
from tf_amp.tracing.keep_rule import keep_rule
from tf_amp.tracing.text import percent

UNDERFLOW = 0.5
"""The share of its values other than 0 from which on a tensor that is flushed stays float32."""
RUNS = 40
"""How many conversions are tried before products are given back no more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """What came of it.

    Attributes:
        rules: the rules to add: of nodes out of range first, then those that the tolerance needs.
        target_dtype: what the model is converted to.
        batches: how many batches were run.
        tensors: how many tensors were measured.
        flops_share: the share of the known arithmetic of products that is in the target dtype with
            the rules, None where no shapes are known.
        flops_share_before: that without the rules.
        runs: how many conversions were compared with float32; 0 without a tolerance.
        tolerance: the tolerance asked for.
        holds: whether it holds with the rules, None where none was asked for.
    """

    rules: tuple[Rule, ...]
    target_dtype: str
    batches: int
    tensors: int
    flops_share: float | None
    flops_share_before: float | None
    runs: int
    tolerance: float | None
    holds: bool | None

    @property
    def text(self) -> str:
        """The rules as TOML for a file, below comments on what they cost."""
        return "".join(f"# {line}\n" for line in str(self).splitlines()) + format_rules(self.rules)

    def __str__(self) -> str:
        before, after = (percent(s) for s in (self.flops_share_before, self.flops_share))
        batches = _count(self.batches, "batch", "es")
        lines = [
            f"{_count(len(self.rules), 'rule')} from {self.tensors} tensors over {batches}",
            f"FLOPs in {self.target_dtype}: {before} without the rules, {after} with them",
        ]
        if self.tolerance is not None:
            verb = "holds" if self.holds else "does not hold"
            lines.append(
                f"the tolerance of {self.tolerance:g} {verb} after {_count(self.runs, 'run')}"
            )
        return "\n".join(lines)


def calibrate(
    model: Path,
    samples: Samples,
    config: PrecisionConfig,
    *,
    batches: int | None = None,
    tolerance: float | None = None,
    underflow: float = UNDERFLOW,
    say: Say = lambda _: None,
) -> Calibration:
    """Finds the rules with which a model can be converted.

    Args:
        model: a SavedModel's directory, a frozen GraphDef or a `.keras` file.
        samples: dicts from names of inputs to arrays, one for a batch.
        config: what to convert to; its rules hold anyway.
        batches: how many samples are taken; by default all.
        tolerance: see `OutputFigures.within`; None to go by ranges alone.
        underflow: from which share of values on that the dtype flushes to 0 a node stays float32.
        say: takes lines on the progress of what takes long.

    Raises:
        ModelError: the model cannot be read, run or converted, or no sample has a row.
    """
    if batches is not None and batches < 1:
        raise ModelError(f"`batches` must be at least 1. Received: batches={batches}.")
    given = list(itertools.islice(samples, batches)) if isinstance(samples, Iterable) else samples
    with (
        Progress(say) as progress,
        tempfile.TemporaryDirectory(prefix="tf-amp-") as folder,
        as_saved_model(model, Path(folder), progress) as source,
    ):
        signatures = load_signatures(source)
        if tolerance is not None:
            warn_of_random_numbers(signatures)
        of_key = {
            key: list(samples_for(given, signature.inputs, batches))
            for key, signature in signatures.items()
        }
        job = _Job(source, signatures, of_key, config, tolerance, Path(folder), progress)
        try:
            return job.calibrate(underflow)
        except DiagnosisError as error:
            raise ModelError(f"{str(model)!r} cannot be run: {error}") from error


@dataclasses.dataclass
class _Job:
    """A calibration; `runs` counts the conversions that were compared, the rest is given."""

    model: Path
    signatures: Mapping[str, Signature]
    samples: Mapping[str, Sequence[Arrays]]
    config: PrecisionConfig
    tolerance: float | None
    folder: Path
    progress: Progress
    runs: int = 0

    def calibrate(self, underflow: float) -> Calibration:
        """See `calibrate`."""
        self.progress("planning")
        before = self._convert(self.config)
        ranges, tensors = self._measured(before)
        lost = {node: self._lost(found, underflow) for node, found in ranges.items()}
        rules = [_keep(node, why) for node, why in lost.items() if why]
        holds = None
        if self.tolerance is not None:
            holds = self._passes(rules)
            if not holds:
                more, holds = self._search(rules, self._suspects(rules, ranges))
                rules += more
        return Calibration(
            rules=tuple(rules),
            target_dtype=self.config.target_dtype,
            batches=self._batches,
            tensors=tensors,
            flops_share=figures_of(self._graphs(rules)).flops_share,
            flops_share_before=figures_of(before).flops_share,
            runs=self.runs,
            tolerance=self.tolerance,
            holds=holds,
        )

    @property
    def _batches(self) -> int:
        return max(map(len, self.samples.values()))

    @functools.cached_property
    def _results(self) -> Mapping[str, Sequence[Mapping[str, np.ndarray]]]:
        """The outputs in float32, with which those of every conversion are compared."""
        return {
            key: list(results_of(signature, self.samples[key]))
            for key, signature in self.signatures.items()
        }

    def _measured(self, graphs: Iterable[FunctionRemarks]) -> tuple[dict[str, Range], int]:
        """Node -> the range of the worst of its tensors, and how many tensors there were."""
        converted: dict[str, set[str]] = {}
        for remark in (r for graph in graphs for r in graph.remarks if r.kind == "converted"):
            converted.setdefault(remark.node, set()).add(remark.attr)
        found: dict[str, Range] = {}
        dtype, count = tf.as_dtype(self.config.target_dtype).as_numpy_dtype, 0
        for key, signature in self.signatures.items():
            for measured, nodes in measure(signature, self._counted(key), converted, dtype):
                count += 1
                for node in nodes:
                    found[node] = max(found.get(node, measured), measured, key=Range.severity)
        return found, count

    def _counted(self, key: str) -> Iterator[Arrays]:
        start, count = time.monotonic(), len(self.samples[key])
        for number, sample in enumerate(self.samples[key]):
            left = (time.monotonic() - start) * (count - number) / max(number, 1)
            rest = f", {left:.0f} s left" if number else ""
            self.progress(f"{key}: batch {number + 1} of {count}{rest}")
            yield sample

    def _lost(self, found: Range, underflow: float) -> str:
        """Why a node with such values has to stay float32; "" where it has not."""
        over = f"over {_count(self._batches, 'batch', 'es')}"
        if found.over:
            return f"max |x| {found.largest:.4g} {over}"
        if found.non_finite:
            return f"{found.non_finite} values are not finite {over}"
        if found.underflow > underflow:
            return f"{found.underflow:.0%} of the values underflow {over}"
        return ""

    def _with(self, rules: Iterable[Rule]) -> PrecisionConfig:
        return dataclasses.replace(self.config, rules=(*self.config.rules, *rules))

    @property
    def _converted(self) -> Path:
        return self.folder / f"converted{self.model.suffix if self.model.is_file() else ''}"

    def _convert(self, config: PrecisionConfig) -> tuple[FunctionRemarks, ...]:
        return convert(self.model, self._converted, config, force=True).graphs

    def _graphs(self, rules: Iterable[Rule]) -> tuple[FunctionRemarks, ...]:
        """The remarks on the conversion with rules, as they are where nothing is converted too."""
        try:
            return self._convert(self._with(rules))
        except NothingToConvertError as error:
            return error.graphs

    def _passes(self, rules: Iterable[Rule]) -> bool:
        """Whether the model that is converted with rules is as near to float32 as asked for."""
        assert self.tolerance is not None
        self.runs += 1
        self.progress(f"conversion {self.runs} of at most {RUNS}, compared with float32")
        try:
            self._convert(self._with(rules))
        except NothingToConvertError:
            return True
        converted = load_signatures(self._converted)
        return all(
            output.within(self.tolerance)
            for key, signature in self.signatures.items()
            for output in differences(
                key, signature, converted[key], self.samples[key], self._results[key]
            )
        )

    def _suspects(self, rules: Iterable[Rule], ranges: Mapping[str, Range]) -> dict[str, int]:
        """What is converted all the same, the worst first: node -> the arithmetic of it.

        The worst is what adds most to the distance from float32, on the first batch; among equals,
        what underflows most, then what is largest.
        """
        config = self._with(rules)
        added: dict[str, float] = {}
        for key, signature in self.signatures.items():
            step = fed(step_of(signature), signature, self.samples[key][0])
            float32 = step.library()
            low = rewritten(step, float32, config)
            records, seen = record_low(step, low, config.target)
            right = record_float32(step, float32, seen)
            for each in errors(low, records, right):
                if remark := low.remark(each.record.key):
                    more = each.error - each.before
                    added[remark.node] = max(added.get(remark.node, 0.0), more)
        flops: dict[str, int] = {}
        for graph in self._graphs(rules):
            for remark in graph.remarks:
                if remark.kind in ("converted", "unit") and remark.op != "Const":
                    flops[remark.node] = max(flops.get(remark.node, 0), remark.flops or 0)

        def order(node: str) -> tuple[float, ...]:
            found = ranges.get(node, Range())
            return -added.get(node, 0.0), -found.underflow, -found.largest

        return {node: flops[node] for node in sorted(flops, key=order)}

    def _search(
        self, rules: Sequence[Rule], suspects: Mapping[str, int]
    ) -> tuple[list[Rule], bool]:
        """The rules that the tolerance needs besides, and whether it holds with them.

        First the shortest start of the suspects with which it holds, and all that have no
        arithmetic; then those that were not needed are given back by halves, products first and
        those with most arithmetic first of these.
        """
        why = f"off by over {self.tolerance:g} with it in {self.config.target_dtype}"

        def passes(kept: Iterable[str]) -> bool:
            return self._passes([*rules, *(_keep(node, why) for node in kept)])

        nodes, few = list(suspects), 0
        enough = len(nodes)
        while enough - few > 1:
            middle = (few + enough) // 2
            few, enough = (few, middle) if passes(nodes[:middle]) else (middle, enough)
        kept, holds = nodes[:enough], enough < len(nodes) or passes(nodes)
        groups: list[list[str]] = []
        if holds:
            # What has no arithmetic stays until the end: without it, a product could be needed
            # in its place.
            free = [node for node in nodes if not suspects[node]]
            products = [node for node in kept if suspects[node]]
            kept = products + free
            groups = [free, sorted(products, key=lambda node: -suspects[node])]
        while groups and self.runs < RUNS:
            group = groups.pop()
            rest = [node for node in kept if node not in group]
            if group and passes(rest):
                kept = rest
            elif len(group) > 1:
                half = len(group) // 2
                groups += [group[half:], group[:half]]
        return [_keep(node, why) for node in kept], holds


def _keep(node: str, why: str) -> Rule:
    return keep_rule(node, f"tf-amp calibrate: {why}")


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"
