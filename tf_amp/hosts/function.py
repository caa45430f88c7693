"""The function host: every function that TensorFlow traces is rewritten before it runs.

TensorFlow makes each function of its eager runtime through one place,
`atomic_function.from_func_graph`: tf.function, Keras, gradients, loop bodies, loaded SavedModels.
It is wrapped here, and so is `Context.call_function`, by which functions are called. When one is
called first, its definition goes through the pass and the runtime gets the result under the same
name and with the same float32 signature. That happens before placement, before TensorFlow's own
graph optimizers and before XLA, which all then work on the low-precision graph. What a function
calls is rewritten with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tensorflow.core.framework import function_pb2
from tensorflow.python.eager import context as context_lib
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import ops

from graph_passes.collector import collector_paused
from graph_passes.functions.grouped_convolutions import (
    is_grouped_convolution,
    is_in_force,
    released,
)
from graph_passes.policy.config import UNKNOWN_DIMENSION
from tf_amp.compatibility import FUNCTION_HOST, obstacle
from tf_amp.compiled import is_compiled
from tf_amp.hosts import function_originals, remapper
from tf_amp.hosts.function_calls import FunctionCalls, TracedFunction
from tf_amp.hosts.function_counts import FunctionCounts
from tf_amp.hosts.function_deferred import DeferredFunctions
from tf_amp.hosts.function_names import SIZES_NEAR, keras_step, readable_name
from tf_amp.hosts.function_redirects import called_apart, definition_in
from tf_amp.hosts.function_shapes import called_shapes, traced_shapes
from tf_amp.hosts.function_size_sources import size_of_calls
from tf_amp.hosts.function_sizes import plan_anew
from tf_amp.hosts.function_tf_data import LoopMark, call_originals
from tf_amp.hosts.function_upstream import hold_off
from tf_amp.hosts.function_xla import call_compilable
from tf_amp.loss_scale.data_flow import Program
from tf_amp.patches import Patches

if TYPE_CHECKING:
    from graph_passes import PrecisionConfig, RewriteResult
    from graph_passes.ir.graph_view import Shapes
    from tf_amp.installation import Installation

_log = logging.getLogger("tf_amp")

# Checkpoint reading and writing: moves variables to and from files, computes nothing.
_SKIPPED = ("_traced_save", "_traced_restore")


class FunctionHost:
    """The hook of one installation."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._patches = Patches()
        self._originals = function_originals.installed()
        self._loops = LoopMark()
        self._calls = FunctionCalls(installation)
        self._deferred = DeferredFunctions(self._rewrite_called)
        self._counts = FunctionCounts(installation)

    def install(self) -> None:
        """Hooks TensorFlow."""
        self._patches.replace(atomic_function, "from_func_graph", self._make_from_func_graph)
        self._loops.install(self._patches)
        self._deferred.install(self._patches)
        self._calls.install(self._patches)
        self._patches.replace(context_lib.Context, "call_function", self._make_call_function)
        hold_off(self._patches)

    def uninstall(self) -> None:
        """Takes the hooks off and makes the runtime run the originals."""
        self._patches.undo()
        if (context := context_lib.context_safe()) is not None:
            self._originals.restore_all(context)
        self._originals.unhook_unless_needed()

    def _make_from_func_graph(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def from_func_graph(
            name: str | bytes,
            graph: Any,
            attrs: Any,
            function_type: Any = None,
            overwrite: bool = False,
        ) -> Any:
            function = original(name, graph, attrs, function_type, overwrite)
            with self._recording_faults(function):
                self._after_tracing(function, attrs or {})
            return function

        return from_func_graph

    def _make_call_function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call_function(
            context: context_lib.Context, name: bytes, tensor_inputs: list[Any], num_outputs: int
        ) -> Any:
            self._deferred.rewrite(context, name, tensor_inputs)
            run = functools.partial(original, context)
            return self._calls.call(run, name, tensor_inputs, num_outputs)

        return call_function

    def _after_tracing(self, function: Any, attrs: Mapping[str, Any]) -> None:
        # What is traced inside a v1 graph runs in a session, which copies the original.
        if not ops.executing_eagerly_outside_functions():
            return
        # What is nested in a pipeline's function is traced before it, and it calls a copy of that.
        if self._loops.is_of_pipeline(attrs):
            self._keep_float32(function)
        elif not any(part in function.name.decode() for part in _SKIPPED):
            self._deferred.add(function)

    @contextlib.contextmanager
    def _recording_faults(self, function: Any) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a fault of ours must not stop the user's program
            self._installation.record_fault("function", function.name.decode(), error)

    def _rewrite_called(self, function: Any, inputs: Sequence[Any] | None) -> Callable[[], None]:
        to_say: list[Callable[[], None]] = []
        with self._recording_faults(function), collector_paused():
            to_say += self._rewrite(function, inputs)

        def say() -> None:
            with self._recording_faults(function):
                for one in to_say:
                    one()

        return say

    def _as_traced(self, function: Any, plain: PrecisionConfig) -> TracedFunction:
        """A function as it is planned: XLA compiles it no more where oneDNN's kernels are faster.

        Args:
            function: the AtomicFunction.
            plain: the configuration of what XLA does not compile.
        """
        context, graph = function._bound_context, function.graph
        definition = function.cached_definition
        shapes_of = called_shapes(graph._functions)
        apart = self._installation.compiled.apart  # type: ignore[union-attr]  # else no host

        def is_freed(compiled: function_pb2.FunctionDef, shapes: Shapes | None) -> bool:
            return is_in_force(plain) and is_grouped_convolution(compiled, shapes)

        if is_freed(definition, traced_shapes(graph, definition)):
            definition = released(definition, plain)
        by_xla = is_compiled(definition)

        def library(name: str) -> function_pb2.FunctionDef | None:
            found = self._original_definition(context, graph._functions, name)
            if found is None or by_xla or not (apart and is_compiled(found)):
                return found
            # What XLA compiles is planned by other costs.
            return found if is_freed(found, shapes_of(name)) else None

        name = readable_name(definition.signature.name)
        title = f"{name} ({step})" if (step := keras_step()) else name
        numbers = self._installation.numbers
        covers = functools.partial(self._deferred.covers, context)
        return TracedFunction(
            definition, graph, context, library, title, numbers, self._originals, covers
        )

    def _rewrite(self, function: Any, inputs: Sequence[Any] | None) -> list[Callable[[], None]]:
        """Rewrites a function; returns what is then to be said of it."""
        config, compiled = self._installation.config, self._installation.compiled
        assert config is not None and compiled is not None  # else there is no host
        plain = config if remapper.runs_in_functions() else remapper.without_it(config)
        traced = self._as_traced(function, plain)
        context, graph, covers = traced.context, traced.graph, traced.waits
        by_xla = is_compiled(traced.definition)
        config = compiled.config if by_xla else plain
        told = size = None
        if config.cost_table is not None and not by_xla:
            told = self._calls.told(traced, inputs)
            size = told or size_of_calls(graph)
            if size and (told or traced.source is None):
                config = dataclasses.replace(config, unknown_dimension=size)
        result = traced.rewrite(config)
        callees: list[RewriteResult] = []
        if config.unknown_dimension == size:
            result, callees = plan_anew(traced, result, config, covers)
        for callee in called_apart(result, traced.find):
            self._deferred.rewrite(context, callee)
        if config is compiled.config:
            result, callees = call_compilable(traced, result, config, all_anew=compiled.apart)
            compiled.say(readable_name(traced.definition.signature.name), (result, *callees))
        if result.changed or traced.definition is not function.cached_definition:
            # `cached_definition` stays: Python code reads that copy to build graphs from (the
            # gradient of a loaded `While`).
            self._originals.swap(context, result.proto, result.extra_functions)
        # What another function calls is told of, and looked at, with that one.
        is_called = inputs is not None
        counted = self._counts.add(
            function,
            traced,
            result,
            callees,
            covers,
            of_callees=", compiled by XLA" if by_xla else f"{SIZES_NEAR}{config.unknown_dimension}",
            announce=is_called,
            size=told or UNKNOWN_DIMENSION,
        )
        look = self._look if is_called else _look_at_nothing
        waits = False
        if counted.counts.products:
            waits = self._calls.watch(
                function, traced, config, counted, functools.partial(look, traced)
            )
        to_say = [] if waits else [counted.say]
        if told or not waits:
            to_say.append(functools.partial(look, traced, result))
        return to_say

    def _look(self, traced: TracedFunction, result: RewriteResult) -> None:
        """Looks for the loss scale of a function that is to run as it was rewritten."""
        added = {function.signature.name: function for function in result.extra_functions}
        context, graph = traced.context, traced.graph
        original = functools.partial(self._original_definition, context, graph._functions)

        def running(name: str) -> function_pb2.FunctionDef | None:
            return added.get(name) or definition_in(context, name)

        self._installation.unscaled.look(
            traced.title,
            Program(traced.definition, original),
            Program(result.proto, running),
            built=graph,
        )

    def _keep_float32(self, function: Any) -> None:
        context, definition = function._bound_context, function.cached_definition
        covers = functools.partial(self._deferred.covers, context)
        redirected = call_originals(definition, context, self._originals, covers)
        if redirected is not None:
            self._originals.swap(context, *redirected)

    def _original_definition(
        self, context: context_lib.Context, known: Mapping[str, Any], name: str
    ) -> function_pb2.FunctionDef | None:
        if isinstance(known.get(name), atomic_function.AtomicFunction):
            return known[name].cached_definition
        return self._originals.definition(context, name)


def _look_at_nothing(traced: TracedFunction, result: RewriteResult) -> None:
    """Stands in for a look at a function that runs as a part of others."""


_installed: FunctionHost | None = None


def install(installation: Installation) -> str | None:
    """Hooks the tracing of functions.

    Args:
        installation: gives the configuration and is told of every function.

    Returns:
        None, or why this TensorFlow was not hooked, which a warning says; nothing is changed then.
    """
    global _installed
    found = obstacle(FUNCTION_HOST)
    if found is not None:
        refusal = f"{found}. Functions stay as they are"
        _log.warning("AMP is on without the functions of TensorFlow 2: %s.", refusal)
        return refusal
    uninstall()
    _installed = FunctionHost(installation)
    _installed.install()
    return None


def uninstall() -> None:
    """Undoes `install`, also one that ended in an exception; without one it does nothing.

    Functions that are not compiled by XLA run their float32 originals from then on, and so does
    whatever a function traced later calls.
    """
    global _installed
    host, _installed = _installed, None
    if host is not None:
        host.uninstall()
