"""The function host: every function TensorFlow traces is rewritten before it can run.

TensorFlow makes each function of its eager runtime through one place,
`atomic_function.from_func_graph`: tf.function, Keras, gradients, loop bodies, loaded SavedModels.
It is wrapped here. After TensorFlow has made a function, its definition goes through the pass and
the runtime gets the result under the same name and with the same float32 signature. That happens
before placement, before TensorFlow's own graph optimizers and before XLA, which all then work on
the low-precision graph.
"""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow
from tensorflow.core.framework import function_pb2
from tensorflow.python.eager import context as context_lib
from tensorflow.python.eager.polymorphic_function import atomic_function, attributes
from tensorflow.python.framework import func_graph as func_graph_lib
from tensorflow.python.framework import ops
from tensorflow.python.saved_model import function_deserialization

from graph_passes import rewrite_function_def
from graph_passes.collector import collector_paused
from tf_amp.compiled import is_compiled
from tf_amp.hosts import function_originals
from tf_amp.hosts.function_redirects import called_names
from tf_amp.hosts.function_shapes import called_shapes, traced_shapes
from tf_amp.hosts.function_tf_data import PipelineMark, call_originals
from tf_amp.hosts.function_upstream import UpstreamOptions
from tf_amp.hosts.function_xla import call_compilable
from tf_amp.tally import NodeCounts

if TYPE_CHECKING:
    from graph_passes import RewriteResult
    from tf_amp.installation import Installation

_OLDEST, _NEWEST = (2, 17), (2, 21)
_PARAMETERS = ("name", "graph", "attrs", "function_type", "overwrite")
# Checkpoint reading and writing: moves variables to and from files, computes nothing.
_SKIPPED = ("_traced_save", "_traced_restore")
# What an export traces of a model: it is written as float32, so a line about it would mislead.
_EXPORTED = re.compile("signature_wrapper|_wrapped_model|_layer_call_(fn|and_return_)")


class FunctionHost:
    """The hook of one installation.

    Attributes:
        from_func_graph: TensorFlow's own function, which the hook calls and which `uninstall`
            puts back.
    """

    def __init__(self, installation: Installation) -> None:
        self.from_func_graph: Callable[..., Any] = atomic_function.from_func_graph
        self._load_library = function_deserialization.load_function_def_library
        self._installation = installation
        self._originals = function_originals.installed()
        self._pipelines = PipelineMark()
        self._upstream = UpstreamOptions()
        self._counts: weakref.WeakKeyDictionary[Any, NodeCounts] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Hooks TensorFlow."""

        @functools.wraps(self.from_func_graph)
        def from_func_graph(
            name: str | bytes,
            graph: Any,
            attrs: Any,
            function_type: Any = None,
            overwrite: bool = False,
        ) -> Any:
            function = self.from_func_graph(name, graph, attrs, function_type, overwrite)
            try:
                with collector_paused():
                    self._after_tracing(function, graph)
            except Exception as error:  # a fault of ours must not stop the user's program
                self._installation.record_fault("function", function.name.decode(), error)
            return function

        from_func_graph.tf_amp_host = self  # type: ignore[attr-defined]
        atomic_function.from_func_graph = from_func_graph
        self._hook_loading()
        self._pipelines.install()
        self._upstream.install()

    def uninstall(self) -> None:
        """Puts TensorFlow's own functions back and makes the runtime run the originals."""
        atomic_function.from_func_graph = self.from_func_graph
        function_deserialization.load_function_def_library = self._load_library
        self._pipelines.uninstall()
        self._upstream.uninstall()
        self._originals.restore_all(context_lib.context())

    def _hook_loading(self) -> None:
        """Makes the many functions of a SavedModel share one line of the log."""
        load_library, log = self._load_library, self._installation.graph_log

        @functools.wraps(load_library)
        def load_function_def_library(*args: Any, **kwargs: Any) -> Any:
            with log.one_line("loaded SavedModel"):
                return load_library(*args, **kwargs)

        function_deserialization.load_function_def_library = load_function_def_library

    def _after_tracing(self, function: Any, graph: Any) -> None:
        # What is traced inside a v1 graph runs in a session, which copies the original.
        if not ops.executing_eagerly_outside_functions():
            return
        context = function._bound_context
        definition = context.get_function_def(function.name)
        if self._pipelines.covers(definition):
            self._keep_float32(function, definition, context)
        elif not any(part in definition.signature.name for part in _SKIPPED):
            self._rewrite(function, definition, graph, context)

    def _rewrite(
        self,
        function: Any,
        definition: function_pb2.FunctionDef,
        graph: Any,
        context: context_lib.Context,
    ) -> None:
        config, compiled = self._installation.config, self._installation.compiled
        if config is None or compiled is None:
            return
        find = self._original_definition
        if is_compiled(definition):
            config = compiled.config
        elif compiled.apart:
            find = self._original_without_xla
        shapes_of = called_shapes(graph._functions)
        rewrite = functools.partial(
            rewrite_function_def,
            config=config,
            library=functools.partial(find, context),
            function_shapes=shapes_of,
        )
        result = rewrite(definition, shapes=traced_shapes(graph, definition))
        name = readable_name(definition.signature.name)
        callees: list[RewriteResult] = []
        if config is compiled.config:
            result, callees = call_compilable(
                result,
                lambda callee: rewrite(callee, shapes=shapes_of(callee.signature.name)),
                context,
                self._originals,
                all_anew=compiled.apart,
            )
            compiled.say(name, (result, *callees))
        if result.changed:
            self._originals.swap(context, result.proto, result.extra_functions)
            # Python code reads this copy to build graphs from (the gradient of a loaded `While`).
            function._cached_definition = definition
        top_level = not isinstance(graph.outer_graph, func_graph_lib.FuncGraph)
        self._counts[function] = self._installation.record(
            "function",
            name,
            result,
            original=definition,
            parts=self._counts_of_callees(graph, definition, result, callees),
            announce=top_level and not _EXPORTED.search(name),
        )

    def _keep_float32(
        self, function: Any, definition: function_pb2.FunctionDef, context: context_lib.Context
    ) -> None:
        redirected = call_originals(definition, context, self._originals)
        if redirected is not None:
            self._originals.swap(context, *redirected)
            function._cached_definition = definition

    def _original_definition(
        self, context: context_lib.Context, name: str
    ) -> function_pb2.FunctionDef | None:
        original = self._originals.find(context, name)
        if original is not None:
            return original.definition()
        return context.get_function_def(name) if context.has_function(name) else None

    def _original_without_xla(
        self, context: context_lib.Context, name: str
    ) -> function_pb2.FunctionDef | None:
        """The same, but None for what XLA compiles: that is planned by other costs."""
        found = self._original_definition(context, name)
        return None if found is None or is_compiled(found) else found

    def _counts_of_callees(
        self,
        graph: Any,
        definition: function_pb2.FunctionDef,
        result: RewriteResult,
        anew: list[RewriteResult],
    ) -> Iterator[NodeCounts]:
        """Yields the counts of what the rewritten function still calls by the traced names."""
        if not graph._functions and not anew:
            return
        running = (result.proto, *result.extra_functions)
        names = {name for function in running for name in called_names(function)}
        # A function that was planned together with what it calls reports all those nodes itself;
        # what was converted in a callee that kept its name is in the callee's report alone.
        planned_together = result.report.total_nodes > len(definition.node_def)
        called = [self._counts.get(graph._functions[n]) for n in names & graph._functions.keys()]
        for counts in (*called, *(NodeCounts.of(callee.report) for callee in anew)):
            if counts is not None:
                yield counts.converted_alone() if planned_together else counts


def install(installation: Installation) -> str | None:
    """Hooks the tracing of functions.

    Args:
        installation: gives the configuration and is told of every function.

    Returns:
        None, or why this TensorFlow was not hooked; nothing is changed then.
    """
    refusal = _refusal(tensorflow.__version__, atomic_function.from_func_graph)
    if refusal is None:
        uninstall()
        FunctionHost(installation).install()
    return refusal


def uninstall() -> None:
    """Undoes `install`; without one it does nothing.

    Functions that are not compiled by XLA run their float32 originals from then on, and so does
    whatever a function traced later calls.
    """
    host = getattr(atomic_function.from_func_graph, "tf_amp_host", None)
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


def _refusal(version: str, from_func_graph: Callable[..., Any]) -> str | None:
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    supported = f"{'.'.join(map(str, _OLDEST))} to {'.'.join(map(str, _NEWEST))}"
    if not _OLDEST <= release <= _NEWEST:
        return (
            f"TensorFlow {version} is not supported (supported: {supported}); functions stay as "
            "they are. Install a supported version, or a newer tf-amp."
        )
    parameters = tuple(inspect.signature(from_func_graph).parameters)
    if parameters != _PARAMETERS:
        return (
            f"TensorFlow {version} makes functions by a call with the parameters {parameters}, and "
            f"{_PARAMETERS} were expected: another package may have replaced it. Functions stay "
            "as they are."
        )
    return None
