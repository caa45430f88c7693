"""The function host: every function TensorFlow traces is rewritten before it can run.

TensorFlow makes each function of its eager runtime through one place,
`atomic_function.from_func_graph`: tf.function, Keras, gradients, loop bodies, loaded SavedModels.
It is wrapped here. After TensorFlow has made a function, its definition goes through the pass and
the runtime gets the result under the same name and with the same float32 signature. That happens
before placement, before TensorFlow's own graph optimizers and before XLA, which all then work on
the low-precision graph. What is traced inside another function is rewritten with that one.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorflow.core.framework import function_pb2
from tensorflow.python.eager import context as context_lib
from tensorflow.python.eager.polymorphic_function import atomic_function, attributes
from tensorflow.python.framework import func_graph as func_graph_lib
from tensorflow.python.framework import ops
from tensorflow.python.saved_model import function_deserialization

from graph_passes.collector import collector_paused
from graph_passes.plan_remarks import lines_within
from graph_passes.policy.config import UNKNOWN_DIMENSION
from tf_amp.compatibility import FUNCTION_HOST, obstacle
from tf_amp.compiled import is_compiled
from tf_amp.hosts import function_originals
from tf_amp.hosts.dumps import Origin
from tf_amp.hosts.function_calls import FunctionCalls, TracedFunction
from tf_amp.hosts.function_deferred import DeferredFunctions
from tf_amp.hosts.function_redirects import called_names
from tf_amp.hosts.function_tf_data import PipelineMark, call_originals
from tf_amp.hosts.function_upstream import hold_off
from tf_amp.hosts.function_xla import call_compilable
from tf_amp.patches import Patches
from tf_amp.tally import NodeCounts

if TYPE_CHECKING:
    from graph_passes import Report, RewriteResult
    from tf_amp.installation import Installation

_log = logging.getLogger("tf_amp")

# Checkpoint reading and writing: moves variables to and from files, computes nothing.
_SKIPPED = ("_traced_save", "_traced_restore")
# What an export traces of a model: it is written as float32, so a line about it would mislead.
_EXPORTED = re.compile("signature_wrapper|_wrapped_model|_layer_call_(fn|and_return_)")


_KERAS_STEPS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


class _PlanCounts(NamedTuple):
    """What is kept of a plan: its counts, and the functions that were planned with it."""

    counts: NodeCounts
    planned_with: frozenset[str]

    @classmethod
    def of(cls, report: Report) -> _PlanCounts:
        return cls(NodeCounts.of(report), report.planned_with)


class FunctionHost:
    """The hook of one installation."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._patches = Patches()
        self._originals = function_originals.installed()
        self._pipelines = PipelineMark()
        self._calls = FunctionCalls(installation, self._originals)
        self._deferred = DeferredFunctions(self._rewrite_deferred)
        self._counts: weakref.WeakKeyDictionary[Any, NodeCounts] = weakref.WeakKeyDictionary()
        # Of each function, by which plans it runs with all that it calls.
        self._plans: weakref.WeakKeyDictionary[Any, dict[str, _PlanCounts]]
        self._plans = weakref.WeakKeyDictionary()
        # Those whose counts are in no other function's, and those not rewritten whose are.
        self._uncovered: weakref.WeakSet[Any] = weakref.WeakSet()
        self._covered: weakref.WeakSet[Any] = weakref.WeakSet()

    def install(self) -> None:
        """Hooks TensorFlow."""
        self._patches.replace(atomic_function, "from_func_graph", self._make_from_func_graph)
        self._patches.replace(
            function_deserialization, "load_function_def_library", self._make_load_library
        )
        self._pipelines.install(self._patches)
        self._deferred.install(self._patches)
        self._patches.replace(context_lib.Context, "call_function", self._make_call_function)
        hold_off(self._patches)

    def uninstall(self) -> None:
        """Takes the hooks off and makes the runtime run the originals."""
        self._patches.undo()
        self._originals.restore_all(context_lib.context())
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
            try:
                with collector_paused():
                    self._after_tracing(function, graph, attrs or {})
            except Exception as error:  # a fault of ours must not stop the user's program
                self._installation.record_fault("function", function.name.decode(), error)
            return function

        return from_func_graph

    def _make_call_function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call_function(
            context: context_lib.Context, name: bytes, tensor_inputs: list[Any], num_outputs: int
        ) -> Any:
            self._deferred.rewrite(context, name)
            run = functools.partial(original, context)
            return self._calls.call(run, context, name, tensor_inputs, num_outputs)

        return call_function

    def _make_load_library(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the many functions of a SavedModel share one line of the log."""
        log = self._installation.graph_log

        def load_function_def_library(*args: Any, **kwargs: Any) -> Any:
            with log.one_line("loaded SavedModel"):
                return original(*args, **kwargs)

        return load_function_def_library

    def _after_tracing(self, function: Any, graph: Any, attrs: Mapping[str, Any]) -> None:
        # What is traced inside a v1 graph runs in a session, which copies the original.
        if not ops.executing_eagerly_outside_functions():
            return
        name = function.name.decode()
        if self._pipelines.covers(attrs):
            self._keep_float32(function)
        elif any(part in name for part in _SKIPPED):
            return
        elif isinstance(graph.outer_graph, func_graph_lib.FuncGraph):
            self._deferred.add(function)
        else:
            self._rewrite(function, graph)

    def _rewrite_deferred(self, function: Any) -> None:
        try:
            with collector_paused():
                self._rewrite(function, function.graph)
        except Exception as error:
            self._installation.record_fault("function", function.name.decode(), error)

    def _rewrite(self, function: Any, graph: Any) -> None:
        config, compiled = self._installation.config, self._installation.compiled
        if config is None or compiled is None:
            return
        context, definition = function._bound_context, function.cached_definition
        by_xla = is_compiled(definition)
        if by_xla:
            config = compiled.config

        def library(name: str) -> function_pb2.FunctionDef | None:
            found = self._original_definition(context, graph._functions, name)
            # What XLA compiles is planned by other costs.
            apart = found is not None and compiled.apart and is_compiled(found)
            return None if apart and not by_xla else found

        name = readable_name(definition.signature.name)
        top_level = not isinstance(graph.outer_graph, func_graph_lib.FuncGraph)
        title = f"{name} ({step})" if (step := _keras_step()) else name
        numbers = self._installation.numbers
        traced = TracedFunction(definition, graph, context, library, title, numbers)
        result = traced.rewrite(config)
        self._rewrite_called((result.proto, *result.extra_functions), graph, context)
        callees: list[RewriteResult] = []
        if config is compiled.config:
            result, callees = call_compilable(
                result,
                functools.partial(traced.rewrite, config),
                context,
                self._originals,
                all_anew=compiled.apart,
            )
            compiled.say(name, (result, *callees))
        if result.changed:
            # `cached_definition` stays: Python code reads that copy to build graphs from (the
            # gradient of a loaded `While`).
            self._originals.swap(context, result.proto, result.extra_functions)
        called = [callee for callee in graph._functions.values() if callee in self._uncovered]
        record = functools.partial(
            self._installation.record,
            "function",
            original=definition,
            origin=Origin(library, traced.shapes, traced.function_shapes, traced.lines),
            announce=top_level and not _EXPORTED.search(name),
        )
        plans = self._plans_of_callees(graph, result, callees)
        if result.failure is None:
            plan = _PlanCounts.of(result.report)
            self._plans[function] = {**plans, definition.signature.name: plan}
        counts = self._counts[function] = record(
            title,
            result,
            parts=_counts_of(plans, result),
            covered=[self._counts[callee] for callee in called],
            is_part=function in self._covered,
        )
        if counts.converted:
            self._uncovered.difference_update(called)
            self._covered.update(
                callee
                for called_name, callee in graph._functions.items()
                if self._deferred.covers(context, called_name)
            )
            if function not in self._covered:
                self._uncovered.add(function)

        def trace_anew(callees: Iterable[RewriteResult], suffix: str) -> None:
            for callee in callees:
                called_name: str = callee.proto.signature.name  # type: ignore[union-attr]
                self._installation.trace(
                    readable_name(called_name) + suffix,
                    callee,
                    library(called_name),
                    Origin(
                        library,
                        traced.function_shapes(called_name),
                        traced.function_shapes,
                        lines_within(traced.lines, called_name),
                    ),
                )

        trace_anew(callees, ", compiled by XLA")
        in_force, is_alive = UNKNOWN_DIMENSION, weakref.ref(function)
        recorded = {in_force: (counts, result.changed)}

        def record_again(planned: RewriteResult, callees: list[RewriteResult], size: int) -> None:
            nonlocal counts, in_force
            plans = self._plans_of_callees(graph, planned, callees)
            near = f", sizes near {size}"
            trace_anew(callees, near)
            again = f"{title}{near}"
            counts = record(again, planned, parts=_counts_of(plans, planned), covered=[counts])
            in_force, recorded[size] = size, (counts, planned.changed)

        def lose(size: int) -> None:
            nonlocal counts
            size = size or UNKNOWN_DIMENSION
            lost, changed = recorded[size]
            self._installation.record_loss(title, lost, changed=changed, counted=size == in_force)
            if size == in_force:
                counts = NodeCounts()
                self._uncovered.discard(is_alive())

        if counts.products:
            tried = bool(counts.converted)
            self._calls.watch(function, traced, config, result, record_again, lose, tried=tried)

    def _rewrite_called(
        self, functions: Iterable[Any], graph: Any, context: context_lib.Context
    ) -> None:
        """Rewrites what functions still call by the names under which it was traced."""
        names = dict.fromkeys(name for function in functions for name in called_names(function))
        for name in filter(graph._functions.__contains__, names):
            self._deferred.rewrite(context, name)

    def _keep_float32(self, function: Any) -> None:
        context, definition = function._bound_context, function.cached_definition
        for callee in function.children:  # they may yet be called by themselves
            self._deferred.rewrite(context, callee.name)
        redirected = call_originals(definition, context, self._originals)
        if redirected is not None:
            self._originals.swap(context, *redirected)

    def _original_definition(
        self, context: context_lib.Context, known: Mapping[str, Any], name: str
    ) -> function_pb2.FunctionDef | None:
        if isinstance(known.get(name), atomic_function.AtomicFunction):
            return known[name].cached_definition
        original = self._originals.find(context, name)
        if original is not None:
            return original.definition()
        return context.get_function_def(name) if context.has_function(name) else None

    def _plans_of_callees(
        self, graph: Any, result: RewriteResult, anew: Iterable[RewriteResult]
    ) -> dict[str, _PlanCounts]:
        """The plans by which a rewritten function runs what it still calls by the traced names.

        Args:
            graph: the FuncGraph.
            result: the function after its rewrite.
            anew: functions that were rewritten once more for it.

        Returns:
            Function name -> the counts of its plan, also of what is called further down.
        """
        if not graph._functions and not anew:
            return {}
        running = (result.proto, *result.extra_functions)
        names = {name for function in running for name in called_names(function)}
        found: dict[str, _PlanCounts] = {}
        for name in names & graph._functions.keys():
            found.update(self._plans.get(graph._functions[name], {}))
        found.update((one.proto.signature.name, _PlanCounts.of(one.report)) for one in anew)  # type: ignore[union-attr]
        return found


def _counts_of(plans: Mapping[str, _PlanCounts], result: RewriteResult) -> Iterator[NodeCounts]:
    """Yields the counts of plans beside that of `result`, each node once."""
    together = result.report.planned_with.union(*(plan.planned_with for plan in plans.values()))
    for name, plan in plans.items():
        # A function that was planned together with what it calls reports all those nodes itself;
        # what was converted in a callee that kept its name is in the callee's report alone.
        yield plan.counts.converted_alone() if name in together else plan.counts


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


def traced_function_names() -> list[str]:
    """Returns the readable names of live functions that were traced before now.

    Left out are functions of tf.data, and parts of functions such as loop bodies.
    """
    names = set()
    context = context_lib.context()
    for scope, name in list(atomic_function.RUNTIME_FUNCTION_REFS):
        if not name.startswith(b"__inference_") or scope != context.function_scope_id:
            continue
        if context.has_function(name):
            definition = context.get_function_def(name)
            if attributes.TF_DATA_FUNCTION not in definition.attr:
                names.add(readable_name(name.decode()))
    return sorted(names)


def _keras_step() -> str:
    """Which method of a Keras model is tracing, "" if none is: its functions share one name."""
    frame: Any = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name in _KERAS_STEPS and "keras" in code.co_filename:
            return code.co_name
        frame = frame.f_back
    return ""


def readable_name(name: str) -> str:
    """Returns the name the user gave to a function.

    Args:
        name: the runtime's name, like "__inference_train_step_118".

    Returns:
        For example "train_step", or "backward of train_step" for its gradient.
    """
    inner = re.sub(r"_\d+$", "", re.sub("^__(inference|forward)_", "", name))
    backward = re.sub(r"^__backward_(.+?)(_\d+)?$", r"backward of \1", inner)
    return backward or name
