"""Times the steps of the program that it is in, and then ends the program.

The training function is the one whose graph holds gradients; a step is one call of it. After some
calls that warm up, steps are timed as the program makes them, further ones run under TensorFlow's
profiler, and at last the function is called again and again with one batch that is there already:
what a step of the program takes longer is the time that its input and its own Python cost it.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python.client import session
from tensorflow.python.eager import context as context_lib
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from graph_passes.ops.node_types import GRADIENT_SCOPE
from tf_amp.compatibility import STEP_WATCH, require
from tf_amp.hosts.other_workers import OF_SEVERAL, has_other_workers
from tf_amp.patches import Patches
from tf_amp.profiling.kernels import STEP
from tf_amp.whole_files import write_whole

REQUEST, RESULT, CALLS, PROFILE = "request.json", "result.json", "calls.json", "profile"
"""Files of the folder: what is asked for; what was measured, or why it cannot be; how often each
function was called, if the program ended before; and the folder of the profiler."""

_READS = frozenset(("IteratorGetNext", "QueueDequeueV2", "QueueDequeueManyV2"))


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be measured.

    Attributes:
        steps: how many calls are timed, profiled, and made with a cached batch.
        skip: how many calls come before.
        function: a part of the training function's name; "" for the first one with gradients.
    """

    steps: int
    skip: int
    function: str = ""

    @property
    def calls(self) -> int:
        """How often the program has to call its training function."""
        return self.skip + 2 * self.steps + 1


@dataclasses.dataclass
class _Calls:
    """The calls of one function.

    Attributes:
        name: for people.
        count: how many there were.
        trains: whether its graph holds gradients; None until it is known.
        starts: when the timed ones began.
        ends: and ended.
    """

    name: str
    count: int = 0
    trains: bool | None = None
    starts: list[float] = dataclasses.field(default_factory=list)
    ends: list[float] = dataclasses.field(default_factory=list)


def start(folder: Path) -> None:
    """Watches the calls of this process, as the request in a folder says.

    Raises:
        OSError: there is no request.
        AttributeError: this TensorFlow is not as expected.
    """
    require(STEP_WATCH)
    fields = json.loads((folder / REQUEST).read_text())
    watch = _StepWatch(folder, Request(**fields))
    patches = Patches()
    patches.replace(polymorphic_function.Function, "__call__", watch.around_functions)
    patches.replace(session.BaseSession, "run", watch.around_sessions)
    atexit.register(watch.program_ended)


class _StepWatch:
    """The watch of a process; the arguments are those of `start`."""

    def __init__(self, folder: Path, request: Request) -> None:
        self._folder, self._request = folder, request
        self._calls: dict[Any, _Calls] = {}
        self._chosen: _Calls | None = None
        self._inside = False
        self._others: dict[str, float] = defaultdict(float)

    def around_functions(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What takes the place of `Function.__call__`."""

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            def run(*replaced: Any) -> Any:
                return original(function, *(replaced or args), **kwargs)

            if self._inside or not tf.executing_eagerly():
                return run()
            return self._watched(
                # A bound method has a Function of its own for each instance, which lives as long.
                id(function),
                function.name,
                run,
                trains=lambda: _function_trains(function),
                cached=lambda: _with_cached_batch(run, args),
            )

        return call

    def around_sessions(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What takes the place of `BaseSession.run`."""

        def run_session(self_: Any, fetches: Any, *args: Any, **kwargs: Any) -> Any:
            def run() -> Any:
                return original(self_, fetches, *args, **kwargs)

            if self._inside:
                return run()
            names = [_name_of(fetch) for fetch in _flat(fetches)]

            def ops() -> Iterator[Any]:
                return _ancestors(self_.graph, names)

            return self._watched(
                (id(self_.graph), *names),
                f"Session.run({', '.join(names)})",
                run,
                trains=lambda: any(GRADIENT_SCOPE.search(op.name) for op in ops()),
                # What is fed is there already; what the graph reads for itself cannot be replaced.
                cached=lambda: None if any(op.type in _READS for op in ops()) else run,
            )

        return run_session

    def program_ended(self) -> None:
        """Leaves word of what there was, where the program ended before all was measured."""
        counts = Counter[str]()
        for calls in self._calls.values():
            counts[calls.name] += calls.count
        write_whole(self._folder / CALLS, json.dumps(counts).encode())

    def _watched(
        self,
        key: Any,
        name: str,
        run: Callable[[], Any],
        *,
        trains: Callable[[], bool],
        cached: Callable[[], Callable[[], Any] | None],
    ) -> Any:
        """One call from outside of a function or session."""
        calls = self._calls.setdefault(key, _Calls(name))
        calls.count += 1
        place = calls.count - self._request.skip - 1  # among the calls that are looked at
        if place >= 0 and self._chosen is None and self._is_wanted(calls, trains):
            if has_other_workers(context_lib.context()):
                self._end({"refused": OF_SEVERAL})
            self._chosen = calls
        if calls is not self._chosen:
            started = time.perf_counter()
            found = self._run(run)
            if self._chosen is not None and len(self._chosen.starts) <= self._request.steps:
                self._others[name] += time.perf_counter() - started
            return found
        if place < self._request.steps:
            return self._timed(run)
        if place == self._request.steps:
            _sync()
            calls.starts.append(time.perf_counter())
            _start_profiler(self._folder)
        if place < 2 * self._request.steps:
            with tf.profiler.experimental.Trace(STEP):
                found = self._run(run)
                _sync()
            return found
        if place == 2 * self._request.steps:
            tf.profiler.experimental.stop()
        self._finish(cached)
        return self._run(run)  # there was no batch; the next call may have one

    def _is_wanted(self, calls: _Calls, trains: Callable[[], bool]) -> bool:
        if self._request.function:
            return self._request.function in calls.name
        if calls.trains is None:
            calls.trains = trains()
        return calls.trains

    def _run(self, run: Callable[[], Any]) -> Any:
        self._inside = True
        try:
            return run()
        finally:
            self._inside = False

    def _timed(self, run: Callable[[], Any]) -> Any:
        assert self._chosen is not None
        _sync()
        self._chosen.starts.append(time.perf_counter())
        found = self._run(run)
        _sync()
        self._chosen.ends.append(time.perf_counter())
        return found

    def _finish(self, cached: Callable[[], Callable[[], Any] | None]) -> None:
        """Makes the calls with a cached batch, writes what was measured and ends the process.

        Returns where the program's iterator had no batch to cache.
        """
        calls = self._chosen
        assert calls is not None
        self._inside = True
        try:
            again = cached()
        except (StopIteration, tf.errors.OutOfRangeError):
            return
        finally:
            self._inside = False
        starts, ends = tuple(calls.starts), tuple(calls.ends)
        if again is not None:
            for _ in range(self._request.steps + 1):  # the first one makes what it needs
                self._timed(again)
        timed = calls.starts[len(starts) + 1 :], calls.ends[len(ends) + 1 :]
        result = {
            "function": calls.name,
            "periods": [b - a for a, b in itertools.pairwise(starts)],
            "inside": [b - a for a, b in zip(starts, ends, strict=False)],
            "cached": [b - a for a, b in zip(*timed, strict=True)],
            "others": {name: s / self._request.steps for name, s in self._others.items()},
        }
        self._end(result)

    def _end(self, result: dict[str, Any]) -> NoReturn:
        """Leaves a result and ends the process."""
        write_whole(self._folder / RESULT, json.dumps(result).encode())
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        # An exception might be caught, and would run what comes behind a training.
        os._exit(0)


def _sync() -> None:
    """Waits for what devices still do; a session has waited for its own."""
    if tf.executing_eagerly():
        tf.test.experimental.sync_devices()


def _start_profiler(folder: Path) -> None:
    options = tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=2, python_tracer_level=0, device_tracer_level=1
    )
    tf.profiler.experimental.start(str(folder / PROFILE), options)


def _function_trains(function: Any) -> bool:
    waiting = [concrete.graph for concrete in function._list_all_concrete_functions()]
    seen: set[int] = set()
    while waiting:
        graph = waiting.pop()
        if graph is None or id(graph) in seen:
            continue
        seen.add(id(graph))
        if any(GRADIENT_SCOPE.search(op.name) for op in graph.get_operations()):
            return True
        # A function of v1 has no graph to ask.
        waiting += [getattr(f, "_cached_graph", None) for f in graph._functions.values()]
    return False


def _flat(fetches: Any) -> Iterator[Any]:
    """What a session fetches, without the structure that it is in."""
    if isinstance(fetches, (dict, list, tuple)):
        for part in fetches.values() if isinstance(fetches, dict) else fetches:
            yield from _flat(part)
    elif fetches is not None:
        yield fetches


def _name_of(fetch: Any) -> str:
    return fetch if isinstance(fetch, str) else str(getattr(fetch, "name", "?"))


def _ancestors(graph: Any, names: list[str]) -> Iterator[Any]:
    """The ops that what is fetched depends on."""
    waiting = []
    for name in names:
        try:
            found = graph.as_graph_element(name)
        except (KeyError, ValueError):
            continue
        waiting.append(getattr(found, "op", found))
    seen = set(waiting)
    while waiting:
        op = waiting.pop()
        yield op
        for needed in (*(tensor.op for tensor in op.inputs), *op.control_inputs):
            if needed not in seen:
                seen.add(needed)
                waiting.append(needed)


def _with_cached_batch(run: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any] | None:
    """The call with iterators that always have the same batch; None where none can take its place.

    Raises:
        StopIteration: an iterator has no batch at the moment.
    """
    replaced = []
    for arg in args:
        made = _repeating(arg) if isinstance(arg, tf.data.Iterator) else arg
        # The iterator of a strategy has one for each worker, in which nothing can be replaced.
        if (made is None and arg is not None) or hasattr(arg, "_iterators"):
            return None
        replaced.append(made)
    return lambda: run(*replaced)


def _repeating(iterator: Any) -> Any:
    """An iterator of the same type that gives the next batch of another one for ever."""
    batch, spec = next(iterator), iterator.element_spec

    def as_unknown(*parts: Any) -> Any:
        """The batch with the static shapes that the program's own iterator promises."""
        found = parts[0] if len(parts) == 1 else parts
        tensors = tf.nest.flatten(found, expand_composites=True)
        specs = tf.nest.flatten(spec, expand_composites=True)
        loose = [
            tf.compat.v1.placeholder_with_default(tensor, of.shape)
            for tensor, of in zip(tensors, specs, strict=True)
        ]
        return tf.nest.pack_sequence_as(spec, loose, expand_composites=True)

    made = tf.data.Dataset.from_tensors(batch).repeat().map(as_unknown).prefetch(2)
    return iter(made) if made.element_spec == spec else None
