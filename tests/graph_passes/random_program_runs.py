"""Runs random programs in float32, rewritten and in naive low precision, and compares."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import unittest.mock as mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf
from programs import Program, of_concrete
from random_program_routes import ROUTES, STEPS, Outcome, SkippedStepError
from random_programs import SCALED, RandomProgram, step_of
from random_steps import Scene
from rewrite_checks import (
    EXACT,
    ROUNDING,
    BrokenPromiseError,
    Rewritten,
    check_rewrite,
    rewrite_graph,
)
from rounded_graphs import rounded

from graph_passes import PrecisionConfig
from graph_passes.policy.config import TargetDtype
from tf_amp import hardware, installation
from tf_amp.conversion.convert import NothingToConvertError, convert
from tf_amp.env_config import Settings

FACTOR = 4.0
"""How many times the error of naive low precision a rewritten program may have."""
SPARE = 4.0
"""Roundings of its largest value that an output may always be off by."""
NOISY_RUNS = 8
"""Further naive runs, from inputs off by one rounding, where the first may have been lucky."""

PRODUCTS = ("MatMul", "BatchMatMulV2", "Einsum", "Conv2D", "DepthwiseConv2dNative")
COUNTING = ("cost", "cast-cut")
_CHECKED = "Tensor had "
"""What CheckNumerics says of NaN and infinities."""


class InvalidProgramError(Exception):
    """A program that does not run in float32 either."""


class Reference:
    """A program in float32: its graph, what it gives, and what naive low precision gives.

    Raises:
        InvalidProgramError: it does not run, or gives what is not finite.
    """

    def __init__(self, program: RandomProgram) -> None:
        self.program = program
        self.scene = Scene()
        function = tf.function(step_of(program, self.scene), autograph=False)
        try:
            self._concrete = function.get_concrete_function(*program.specs().values())
            values = list(program.values().values())
            self.graph = of_concrete(self._concrete, values, self.scene.variables.values())
            self.scene.log.clear()
            self.expected = self.graph.run(self.graph.graph_def, STEPS)
        except Exception as error:
            raise InvalidProgramError(f"{type(error).__name__}: {error}") from error
        self.log = sorted(self.scene.log)
        if not all(np.isfinite(v).all() for v in self.expected.values() if v.dtype.kind == "f"):
            raise InvalidProgramError("it gives what is not finite")
        self._names = {}
        self._noisy: dict[str, float] = {}
        self._errors = self._naive_errors()
        handles = {id(v.handle): w for w, v in self.scene.variables.items()}
        captured = self._concrete.captured_inputs
        for outer, inner in zip(captured, self._concrete.inputs[-len(captured) :], strict=True):
            if id(outer) in handles:
                self._names[f"variable {inner.op.name}"] = handles[id(outer)]

    def outcome(self, found: Mapping[str, np.ndarray]) -> Outcome:
        """What a run of the graph gives, by names that all routes share."""
        result = {f"output {n}": found[name] for n, name in enumerate(self.graph.fetches)}
        return result | {self._names[k]: v for k, v in found.items() if k in self._names}

    @functools.cached_property
    def naive(self) -> Mapping[str, float]:
        """The largest error of each float that the graph gives, everything rounded."""
        return next(self._errors)

    def noisy(self, name: str, enough: float) -> float:
        """An error of naive low precision that is enough, or else the largest of some runs.

        They start from inputs and weights off by one rounding. In every other run half of the
        tensors, drawn at random, is rounded, as in any graph of mixed precision.
        """
        if not self._noisy:
            self._noisy.update(self.naive)
        # Of runs that end in NaN, as Nadam's do where everything is rounded, the others tell.
        while not self._noisy[name] >= enough and (errors := next(self._errors, None)):
            for found, error in errors.items():
                self._noisy[found] = float(np.fmax(self._noisy[found], error))
        return math.inf if math.isnan(self._noisy[name]) else self._noisy[name]

    def _naive_errors(self) -> Iterator[dict[str, float]]:
        """The errors of the run where everything is rounded, then those of the noisy runs."""
        graph, dtype = self.graph, self.program.dtype
        rng = np.random.default_rng(0)

        def shaken(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: _shaken(value, ROUNDING[dtype], rng) for name, value in values.items()}

        if dtype == "float32":  # nothing is rounded
            with graph.running(graph.graph_def) as run:
                for _ in range(NOISY_RUNS):
                    yield self._errors_of(run(shaken(graph.feeds), shaken(graph.state), STEPS))
            return
        # The graphs that round everything are one graph: making a session takes longer than a run.
        with graph.running(rounded(graph.graph_def, dtype)) as run_all:
            yield self._errors_of(run_all(graph.feeds, graph.state, STEPS))
            for number in range(NOISY_RUNS):
                feeds, state = shaken(graph.feeds), shaken(graph.state)
                if number % 2 == 0:
                    found = run_all(feeds, state, STEPS)
                else:
                    with graph.running(rounded(graph.graph_def, dtype, number)) as run_half:
                        found = run_half(feeds, state, STEPS)
                yield self._errors_of(found)

    def _errors_of(self, found: Mapping[str, np.ndarray]) -> dict[str, float]:
        return {
            name: float(np.abs(found[name].astype(np.float64) - value).max(initial=0))
            for name, value in self.expected.items()
            if value.dtype.kind == "f"
        }

    def compare(self, found: Mapping[str, np.ndarray]) -> None:
        """Checks what a rewritten graph gives, by the names of the graph.

        Raises:
            BrokenPromiseError: it is not what float32 gives, but for rounding.
        """
        for name, old in self.expected.items():
            if name not in found:
                continue
            new = found[name]
            if (new.dtype, new.shape) != (old.dtype, old.shape):
                what = f"{name} is {new.dtype}{new.shape}, was {old.dtype}{old.shape}"
                raise BrokenPromiseError("dtype", what)
            if old.dtype.kind != "f" or (name.startswith("variable") and not old.ndim):
                if not np.array_equal(new, old):
                    raise BrokenPromiseError("effects", f"{name} is {new}, was {old}")
                continue
            if self.program.device == "GPU":
                continue  # kernels of the CPU stand in for those of a GPU, which add up in float32
            off = float(np.abs(new.astype(np.float64) - old).max(initial=0))
            if self._overflows and not np.isfinite(off):
                continue  # naive low precision puts the largest number where an infinity belongs
            scale = float(np.abs(old).max(initial=0))
            spare = SPARE * ROUNDING[self.program.dtype] * scale + 1e-6
            if off <= spare or off <= spare + FACTOR * self.naive[name]:
                continue
            noisy = self.noisy(name, (off - spare) / FACTOR)
            if not off <= spare + FACTOR * noisy:
                raise BrokenPromiseError(
                    "values",
                    f"{name} is off by {off:.3g} of {scale:.3g}, naive low precision by "
                    f"{self.naive[name]:.3g} to {noisy:.3g}",
                )

    @property
    def _overflows(self) -> bool:
        """Whether what the graph gives in float32 is beyond the range of the dtype."""
        largest = float(tf.as_dtype(self.program.dtype).max)
        floats = (value for value in self.expected.values() if value.dtype.kind == "f")
        return any(float(np.abs(value).max(initial=0)) > largest for value in floats)

    def compare_outcome(self, outcome: Outcome, log: Sequence[int]) -> None:
        """Checks what a route gives.

        Raises:
            BrokenPromiseError: it is not what float32 gives, but for rounding.
        """
        self.compare_log(log)
        self.compare(self.named(outcome))

    def named(self, outcome: Outcome) -> Outcome:
        """What a route gives, by the names of the graph."""
        by_name = {name: f"output {n}" for n, name in enumerate(self.graph.fetches)}
        by_name |= self._names
        return {k: outcome[v] for k, v in by_name.items() if v in outcome}

    def compare_log(self, log: Sequence[int]) -> None:
        """Checks what Python functions have seen, in whatever order.

        Raises:
            BrokenPromiseError: it is not what they see in float32.
        """
        if sorted(log) != self.log:
            raise BrokenPromiseError("effects", f"Python saw {sorted(log)}, was {self.log}")


def _shaken(value: np.ndarray, rounding: float, rng: np.random.Generator) -> np.ndarray:
    if value.dtype != np.float32:
        return value
    return (value * (1 + rng.uniform(-1, 1, value.shape) * rounding)).astype(np.float32)


def check(program: RandomProgram) -> str:
    """Runs a program by its route.

    Returns:
        "changed" where the rewrite changed the graph, else "unchanged"; "skipped" where gradients
        overflowed by the loss scale; "invalid" where the program does not run in float32, or ends
        itself where naive low precision gives NaN.

    Raises:
        BrokenPromiseError: a promise is not kept.
    """
    try:
        reference = Reference(program)
    except InvalidProgramError:
        return "invalid"
    try:
        return _check(reference)
    except BrokenPromiseError as error:
        if _CHECKED in str(error) and not all(map(np.isfinite, reference.naive.values())):
            return "invalid"
        raise


def _check(reference: Reference) -> str:
    program = reference.program
    if program.route == "offline":
        return _check_offline(reference)
    run = functools.partial(ROUTES[program.route], program)
    try:
        act = _run_converted if program.route == "converted" else _run_rewritten
        return "changed" if act(reference, run) else "unchanged"
    except SkippedStepError:
        return "skipped"
    except Exception as error:
        if not _runs(reference, run):
            return "invalid"
        if isinstance(error, BrokenPromiseError):
            raise
        raise BrokenPromiseError("raised", f"{type(error).__name__}: {error}") from error


def _run_rewritten(reference: Reference, run: Callable[[Scene], Outcome]) -> bool:
    """Whether a graph was rewritten while a route was run."""
    with _amp(reference.program) as installed, _lines() as lines:
        scene = Scene()
        outcome = run(scene)
    status = installed.status()
    if status.graphs_failed:
        raise BrokenPromiseError("given up", lines[0] if lines else "without a word")
    if lines:
        raise BrokenPromiseError("warned", lines[0])
    reference.compare_outcome(outcome, scene.log)
    return bool(status.graphs_rewritten)


def _run_converted(reference: Reference, run: Callable[..., Outcome]) -> bool:
    """Whether there was something to convert in the SavedModel of a program."""
    program, scene = reference.program, Scene()

    def change(saved: Path) -> Path:
        made = saved.with_name("converted")
        convert(saved, made, _config(program), weights=program.gradients == "none")
        return made

    try:
        with _lines() as lines:
            outcome = run(scene, change)
    except NothingToConvertError:
        return False
    if lines:
        raise BrokenPromiseError("warned", lines[0])
    reference.compare_outcome(outcome, scene.log)
    return True


def run_exact(program: RandomProgram) -> bool:
    """Runs a program in float32: as a graph, as often as a check does, and by its route.

    Returns:
        Whether each run gives what the first does: damaged memory changes values by chance.
    """
    try:
        reference = Reference(program)
    except InvalidProgramError:
        return True
    graph = reference.graph
    is_same = [_agrees(reference, graph.run(graph.graph_def, STEPS)) for _ in range(NOISY_RUNS)]
    if program.route != "offline":
        scene = Scene()
        outcome: Outcome = {}
        with contextlib.suppress(Exception):
            outcome = ROUTES[program.route](program, scene)
        is_same.append(not outcome or _agrees(reference, reference.named(outcome)))
    return all(is_same)


def _agrees(reference: Reference, found: Mapping[str, np.ndarray]) -> bool:
    """Whether floats are what they were, but for the order in which float32 adds up."""
    return all(
        np.allclose(found[name], old, rtol=EXACT, atol=EXACT * float(np.abs(old).max(initial=0)))
        for name, old in reference.expected.items()
        if old.dtype.kind == "f" and name in found
    )


def _runs(reference: Reference, run: Callable[[Scene], Outcome]) -> bool:
    """Whether the route works, and gives the same, without a rewrite."""
    try:
        scene = Scene()
        outcome = run(scene)
        exact = dataclasses.replace(reference.program, dtype="float16")
        reference.program, program = exact, reference.program
        try:
            reference.compare_outcome(outcome, scene.log)
        finally:
            reference.program = program
    except Exception:
        return False
    return True


def _check_offline(reference: Reference) -> str:
    config = _config(reference.program)

    def compare(found: Mapping[str, np.ndarray]) -> None:
        reference.compare_log(reference.scene.log)
        reference.compare(found)

    reference.scene.log.clear()
    result = check_rewrite(reference.graph, config, reference.expected, rewrite_graph, compare)
    if config.converts:
        _require_reasons(reference.graph, result)
    return "changed" if result.changed else "unchanged"


def _config(program: RandomProgram) -> PrecisionConfig:
    return PrecisionConfig(
        target_dtype=_target(program),
        device=program.device,
        converts=program.dtype != "float32",
        disabled_rules=frozenset(COUNTING if program.rules == "painted" else ()),
    )


def _require_reasons(graph: Program, result: Rewritten) -> None:
    """Requires that the report says why a product of the main graph has stayed in float32."""
    for node in result.graph_def.node:
        is_product = node.op in PRODUCTS and node.attr["T"].type == tf.float32.as_datatype_enum
        if is_product and node.name in graph.nodes and node.name not in result.kept:
            raise BrokenPromiseError("silence", f"nothing is said of {node.op} {node.name!r}")


def _target(program: RandomProgram) -> TargetDtype:
    return "float16" if program.dtype == "float16" else "bfloat16"


@contextlib.contextmanager
def _amp(program: RandomProgram) -> Iterator[installation.Installation]:
    converts = program.dtype != "float32"
    with contextlib.ExitStack() as machine:
        if not converts:  # one without fast units
            machine.enter_context(mock.patch.object(hardware, "probe_cpu_flags", frozenset))
            machine.enter_context(mock.patch.object(hardware, "probe_gpu_capabilities", list))
        installed = _installed(program, converts)
    try:
        yield installed
    finally:
        installation.uninstall()


def _installed(program: RandomProgram, converts: bool) -> installation.Installation:
    installed = installation.install(
        Settings(
            graph_rewrite=True,
            loss_scaling=program.route in SCALED,
            target_dtype=_target(program),
            ignore_performance=converts,
            cost_table="off" if program.rules == "painted" else "auto",
            disabled_rules=frozenset(COUNTING if program.rules == "painted" else ()),
            # The others train without a loss scale, and that is not to be warned of.
            decided_by={} if program.route in SCALED else {"loss_scaling": "the programs"},
        ),
        source="test",
    )
    assert installed is not None
    return installed


@contextlib.contextmanager
def _lines() -> Iterator[list[str]]:
    """What the packages warn of."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(handler.format(record))  # type: ignore
    loggers = [logging.getLogger(name) for name in ("tf_amp", "graph_passes")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield lines
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
