"""Measures what kernels and Casts cost on this machine, for `graph_passes.policy.cost_table`.

Each op runs several times within one function, one run after the other, in float32 and in the
target dtype in turns. The least time of a few rounds counts: whatever else the machine does can
only add to it (the reasoning of Python's `timeit`). Starting an op is part of its time, calling the
function is not: with 32 inputs that takes 15 to 20 us for each of 32 Casts, and a Cast of 4,096
elements takes 1. Of what XLA compiles the lower quartile counts, calls included.

The runs read different copies of their inputs in turn. In a network most tensors come from memory,
where the target dtype halves the bytes; the same few numbers over and over would come from a cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graph_passes.policy.config import Device, TargetDtype
from graph_passes.policy.cost_table import CostTable, Curve, OpCost
from tf_amp import installation
from tf_amp.hardware import processor_name
from tf_amp.tuning_probes import ELEMENTS, Case, Full, Low, Probe, compiled_probes, probes

ROUNDS = 7
"""How often each function is timed, at least."""
_TURN_S = 0.006
_TRIES = 3
_LEAST_S = 5e-7
"""What counts for an op that takes no longer than the noise of calling a function."""
_MOST_COPIES = 32
_MOST_COMPILED_COPIES = 8
"""Each copy is compiled."""
_CACHE_BYTES = 96 << 20
"""The copies of the inputs take that much in float32, where the runs are enough for it."""
_Timed = tuple[Callable[..., Any], Sequence[Any], int]
"""A function, its arguments, and how often it runs the op."""


def measure_table(
    device_class: str,
    device: Device,
    target_dtype: TargetDtype,
    *,
    only: Sequence[str] | None = None,
    rounds: int = ROUNDS,
    compiled: bool = False,
    on_probe: Callable[[str], None] = lambda _: None,
) -> CostTable:
    """Measures a table, in about a minute.

    Args:
        device_class: the name of the class of device that the table is for.
        device: the device type whose first device is measured.
        target_dtype: the dtype measured beside float32.
        only: keys of the rows to measure, as in the table; all by default.
        rounds: how often each op is timed; more help on a machine that others use as well.
        compiled: whether XLA compiles what is measured: the matrix products and convolutions.
        on_probe: called with a row's key before it is measured, and with "casts" at the end.

    Returns:
        The table. Ops without a kernel for the dtype and device have no row.

    Raises:
        ValueError: `only` names a row that does not exist.
        RuntimeError: AMP is on in this process, which would change what is measured.
    """
    if installation.current() is not None:
        raise RuntimeError(
            "Costs cannot be measured while AMP is on in the same process. Run `tf-amp tune`, or "
            "call tf_amp.disable_mixed_precision_graph_rewrite() first."
        )
    timer = _Timer(device, tf.as_dtype(target_dtype), rounds, compiled)
    rows = []
    with _without_graph_optimizers():
        for probe in chosen_probes(only, compiled=compiled):
            on_probe(probe.key)
            cost = timer.row(probe)
            if cost is not None:
                rows.append((probe.key, cost))
        on_probe("casts")
        to_low, to_float32 = timer.casts()
    return CostTable(
        device_class=device_class,
        device=device,
        target_dtype=target_dtype,
        measured_on=f"{processor_name(device)}, TensorFlow {tf.__version__}",
        to_low=to_low,
        to_float32=to_float32,
        rows=tuple(sorted(rows, key=lambda row: row[0])),
        compiled=compiled,
    )


def chosen_probes(only: Sequence[str] | None = None, *, compiled: bool = False) -> list[Probe]:
    """Returns what is measured, in that order.

    Args:
        only: keys of rows; all by default.
        compiled: whether XLA compiles what is measured.

    Raises:
        ValueError: a key is not that of a row.
    """
    known = {probe.key: probe for probe in (compiled_probes() if compiled else probes())}
    unknown = [key for key in only or () if key not in known]
    if unknown:
        raise ValueError(
            f"There is no row {unknown[0]!r} to measure. Legal: {', '.join(sorted(known))}."
        )
    return [probe for key, probe in known.items() if only is None or key in only]


class _Timer:
    """Times ops on one device, in float32 and in the target dtype."""

    def __init__(self, device: Device, target: tf.DType, rounds: int, compiled: bool) -> None:
        self._device = f"/{device}:0"
        self._target = target
        self._rounds = rounds
        self._compiled = compiled
        self._most_copies = _MOST_COMPILED_COPIES if compiled else _MOST_COPIES
        self._random = np.random.default_rng(0)

    def row(self, probe: Probe) -> OpCost | None:
        """The times of one op; None where a dtype has no kernel."""
        try:
            measured = [self._case(probe.op, case) for case in probe.cases]
        except (
            tf.errors.NotFoundError,
            tf.errors.InvalidArgumentError,
            tf.errors.UnimplementedError,
            TypeError,
        ):
            # No kernel, or a dtype that the op definition excludes: TensorFlow raises any of them,
            # the third under XLA.
            return None
        sizes = tuple(case.size for case in probe.cases)
        full, low = zip(*measured, strict=True)
        return OpCost(measure=probe.measure, float32=Curve(sizes, full), low=Curve(sizes, low))

    def casts(self) -> tuple[Curve, Curve]:
        """The times of Casts to the target dtype and back, by elements."""
        measured = []
        for size in ELEMENTS:
            calls = []
            for of, to in ((tf.float32, self._target), (self._target, tf.float32)):
                cast = functools.partial(_cast, to=to)
                calls.append((cast, [self._tensor((size,), of)]))
            measured.append(self._fastest(calls))
        to_low, to_float32 = zip(*measured, strict=True)
        return Curve(ELEMENTS, to_low), Curve(ELEMENTS, to_float32)

    def _case(self, op: str, case: Case) -> tuple[float, ...]:
        calls = []
        for dtype in (tf.float32, self._target):
            tensors: list[Any] = []
            template = {
                name: self._place(value, dtype, tensors) for name, value in case.arguments.items()
            }
            calls.append((_raw_call(op, template), tensors))
        return self._fastest(calls)

    def _fastest(self, calls: Sequence[tuple[Callable[..., Any], list[Any]]]) -> tuple[float, ...]:
        """The time of one run of each of the calls."""
        timed = []
        for call, tensors in calls:
            once = self._repeated(call, [tensors], 1)
            # The first functions of a process take far longer than they do from then on.
            runs = max(1, round(_TURN_S / min(_run(once) for _ in range(_TRIES))))
            copies = min(runs, self._most_copies)
            # Few copies alone would make a turn that is too short for a fair comparison.
            repeats = -(-runs // copies) if self._compiled else 1
            elements = sum(int(np.prod(tensor.shape)) for tensor in tensors)
            sets = max(1, min(copies, _CACHE_BYTES // (4 * max(1, elements))))
            inputs = [tensors, *(self._copied(tensors) for _ in range(sets - 1))]
            timed.append((once if copies == 1 else self._repeated(call, inputs, copies), repeats))
            if not self._compiled:
                timed.append((self._repeated(_nothing, inputs, copies), repeats))
        taken = [[_run(*one) for one in timed] for _ in range(self._rounds)]
        # What XLA makes differs by a few per cent between the dtypes: a single lucky round must
        # not decide.
        rank = self._rounds // 4 if self._compiled else 0
        times = [
            sorted(seconds)[rank] / (copies * repeats)
            for seconds, ((_, _, copies), repeats) in zip(
                zip(*taken, strict=True), timed, strict=True
            )
        ]
        if self._compiled:
            return tuple(times)
        pairs = zip(times[::2], times[1::2], strict=True)
        return tuple(max(whole - call, _LEAST_S) for whole, call in pairs)

    def _place(self, value: Any, dtype: tf.DType, tensors: list[Any]) -> Any:
        """Makes the tensors of an argument; gives their positions in their stead."""
        if isinstance(value, Low | Full):
            chosen = dtype if isinstance(value, Low) else tf.float32
            tensors.append(self._tensor(value.shape, chosen))
            return _Position(len(tensors) - 1)
        if isinstance(value, list):
            return [self._place(entry, dtype, tensors) for entry in value]
        return value

    def _tensor(self, shape: tuple[int, ...], dtype: tf.DType) -> tf.Tensor:
        # Positive and around 1: no op meets a domain error, and no value is subnormal.
        values = self._random.uniform(0.5, 1.5, shape).astype(np.float32)
        with tf.device(self._device):
            return tf.cast(tf.identity(values), dtype)

    def _copied(self, tensors: list[Any]) -> list[Any]:
        with tf.device(self._device):
            return [tensor + tf.zeros((), tensor.dtype) for tensor in tensors]

    def _repeated(self, call: Callable[..., Any], inputs: list[list[Any]], copies: int) -> _Timed:
        """A function that makes a call several times, with one list of inputs after the other."""
        every = len(inputs[0])
        tensors = [tensor for chosen in inputs for tensor in chosen]

        def repeat(*given: Any) -> Any:
            with tf.device(self._device):
                result: Any = None
                results = []
                before: list[tf.Tensor] = []
                for number in range(copies):
                    first = number % len(inputs) * every
                    # One copy after the other, as in the path through a network.
                    with tf.control_dependencies(before):
                        result = call(*given[first : first + every])
                    before = [result]
                    results.append(result)
                if self._compiled:  # XLA leaves out what gives no result
                    return results
                with tf.control_dependencies(before):
                    # A number that reaches the host ends the wait for a GPU as well.
                    return tf.constant(0) if "CPU" in self._device else tf.reshape(result, [-1])[:1]

        traced = tf.function(repeat, autograph=False, jit_compile=self._compiled or None)
        function = traced.get_concrete_function(*tensors)
        timed = (function, tensors, copies)
        _run(timed)
        return timed


@dataclasses.dataclass(frozen=True)
class _Position:
    """Stands for a tensor in a template of arguments."""

    index: int


def _cast(x: tf.Tensor, to: tf.DType) -> tf.Tensor:
    return tf.raw_ops.Cast(x=x, DstT=to)


def _nothing(first: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
    return first


def _raw_call(op: str, template: dict[str, Any]) -> Callable[..., Any]:
    raw_op = getattr(tf.raw_ops, op)

    def fill(value: Any, inputs: Sequence[Any]) -> Any:
        if isinstance(value, _Position):
            return inputs[value.index]
        if isinstance(value, list):
            return [fill(entry, inputs) for entry in value]
        return value

    def call(*inputs: Any) -> Any:
        made = raw_op(**{name: fill(value, inputs) for name, value in template.items()})
        return made if isinstance(made, tf.Tensor) else made[0]

    return call


def _run(timed: _Timed, repeats: int = 1) -> float:
    function, tensors, _ = timed
    started = time.perf_counter()
    for _ in range(repeats):
        tf.nest.flatten(function(*tensors))[-1].numpy()
    return time.perf_counter() - started


@contextlib.contextmanager
def _without_graph_optimizers() -> Iterator[None]:
    """Keeps TensorFlow from folding and merging what is measured."""
    name = "disable_meta_optimizer"
    before = tf.config.optimizer.get_experimental_options().get(name, False)
    tf.config.optimizer.set_experimental_options({name: True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({name: before})
