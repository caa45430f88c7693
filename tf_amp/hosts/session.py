"""The session host: graphs of ``tf.compat.v1.Session`` are rewritten inside Grappler.

Grappler hands each pruned graph of a session to the graph plugin (`session_plugin`), on the
thread that runs the session, before anything of it is executed. This module decides which graphs
are ours, takes apart what the remapper has fused (`session_unfuse`), calls the pass, and gives
back the new graph or nothing. Whatever goes wrong, the session runs the graph it would have run.

Function bodies (graphs with ``_Arg`` or ``_Retval`` nodes) belong to the function host.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow
from tensorflow.core.framework import graph_pb2

import graph_passes
from graph_passes.plan_remarks import no_lines
from graph_passes.policy.config import UNKNOWN_DIMENSION
from tf_amp.compatibility import SESSION_HOST, obstacle
from tf_amp.hosts import remapper
from tf_amp.hosts.c_api import CApiError
from tf_amp.hosts.dumps import Origin
from tf_amp.hosts.function_debug_info import source_lines
from tf_amp.hosts.session_config import SessionConfigHook, float32_sessions_exist, refuse
from tf_amp.hosts.session_plugin import GraphItem, GraphPlugin, graph_plugin
from tf_amp.hosts.session_sizes import size_of
from tf_amp.hosts.session_stubs import empty_stubs, fill_stubs
from tf_amp.hosts.session_unfuse import UnfusedGraph, unfuse
from tf_amp.loss_scale.data_flow import Program
from tf_amp.patches import Patches

if TYPE_CHECKING:
    from tf_amp.installation import Installation
    from tf_amp.tally import NodeCounts

LOGGER = logging.getLogger("tf_amp.hosts.session")

_FUNCTION_BODY_OPS = frozenset({"_Arg", "_DeviceArg", "_Retval", "_DeviceRetval"})
# A session makes a graph of each set of fetches and keeps one kernel for all stateful nodes of a
# name: in all of these graphs they must be of one dtype.
_OF_ONE_KERNEL = frozenset({"CheckNumerics", "CheckNumericsV2"})
_FETCHES_NAMED = 3
_WITH_DEFAULT = "PlaceholderWithDefault"

TITLE = "session graph"
"""What the name of every graph of a session begins with, for people."""


def config_of_sessions(config: graph_passes.PrecisionConfig) -> graph_passes.PrecisionConfig:
    """The configuration without rules that make new functions: Grappler takes none of a plugin."""
    off = config.disabled_rules | {"function-signatures", "loop-hoisting"}
    return dataclasses.replace(config, disabled_rules=off)


class SessionHost:
    """Rewrites the session graphs of one installation."""

    def __init__(self, installation: Installation, plugin: GraphPlugin) -> None:
        if installation.config is None:
            raise ValueError("The installation rewrites nothing: `installation.config` is None.")
        self._installation = installation
        self._config = config_of_sessions(installation.config)
        self._plugin = plugin
        self._numbers = itertools.count(1)
        self._said_broken: set[str] = set()
        # Of each graph of a session what was said, but for the fetches.
        self._said: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
        self._sessions = SessionConfigHook(
            self._config.device, plugin.serve, installation.tally.leave_out
        )
        self._patches = Patches()

    def install(self) -> None:
        """Gives the plugin something to do, and sessions a config that calls it."""
        self._sessions.install(self._patches)
        self._plugin.handler = self.rewrite

    def uninstall(self) -> None:
        """Leaves the plugin registered, which cannot be undone, with nothing to do."""
        self._plugin.handler = None
        self._patches.undo()

    def rewrite(self, item: GraphItem) -> bytes | None:
        """Rewrites one graph of Grappler.

        Called on whatever thread builds the graph, so it runs no op and opens no session.

        Args:
            item: The graph and the names to preserve.

        Returns:
            The serialized new graph; None if the graph is not ours or nothing was changed.
        """
        # A graph with nodes on both devices reaches both registrations.
        if item.device_type != self._config.device:
            return None
        graph = graph_pb2.GraphDef.FromString(item.graph)
        if any(node.op in _FUNCTION_BODY_OPS for node in graph.node):
            return None
        if nameless := next((node.name for node in graph.node if not node.op), None):
            # MatMul + BiasAdd + AddV2 + activation on a CPU is one such case (seen in 2.21).
            made = f"remapper made node {nameless!r} without an op"
            self._say_broken(graph, made, "remapping")
            return None
        if item.shapes is not None:
            item.shapes.feeds_fit = _feeds_placeholders(graph, item)
        size, near = UNKNOWN_DIMENSION, ""
        if self._config.cost_table is not None:
            size, near = size_of(graph, item, self._built(item))
        # The trace holds what was planned, so that planning it again gives the same.
        result, planned, origin = self._result_for(graph, item, size)
        if result.failure is not None and (read := _missing(graph)) is not None:
            # The last of a stack of reshaped tensors is one such case (seen in 2.21).
            lost = f"arithmetic optimizer, it seems, took node {read!r} away, which is still read"
            self._say_broken(graph, lost, "arithmetic_optimization")
            return None
        name = f"{TITLE} {next(self._numbers)} ({_fetched(item)}){near}"
        counts = self._installation.record("session", name, result, original=planned, origin=origin)
        if result.failure is None:
            announce = self._is_news(item, counts)
            self._installation.graph_log.say(name, counts, announce=announce)
        if result.failure is not None or not result.changed:
            return None
        self._look(item, planned, result.proto)
        return result.proto.SerializeToString()

    def _result_for(
        self, graph: graph_pb2.GraphDef, item: GraphItem, size: int
    ) -> tuple[graph_passes.RewriteResult, graph_pb2.GraphDef, Origin]:
        """The rewrite; and the graph that was planned, taken apart, with what is known of it."""
        built = self._built(item)
        lines = no_lines if built is None else source_lines(built)
        planned, origin = graph, Origin(shapes=item.shapes, lines=lines, preserve=item.preserve)
        config = dataclasses.replace(self._config, unknown_dimension=size)
        try:
            filled, stubs = fill_stubs(graph)
            apart = unfuse(filled, item.preserve, item.shapes)
            own = [node.name for node in apart.graph.node if node.op in _OF_ONE_KERNEL]
            kept = (*item.preserve, *own, *(() if self._runs_fused_whole else apart.whole))
            shapes = _shapes_of(apart, item)
            planned, origin = apart.graph, Origin(shapes=shapes, lines=lines, preserve=kept)
            result = self._installation.numbers.rewrite(
                lambda config: graph_passes.rewrite_graph_def(
                    planned, config, preserve=kept, shapes=shapes, lines=lines
                ),
                config if self._sessions.remaps else remapper.without_it(config),
            )
            if result.changed:
                new = empty_stubs(apart.put_back(result.proto), stubs)
                result = dataclasses.replace(result, proto=new)
        except Exception as error:  # the session must run whatever happens here
            report = graph_passes.Report(
                target_dtype=self._config.target_dtype,
                device=self._config.device,
                total_nodes=len(graph.node),
            )
            failure = f"{type(error).__name__}: {error}"
            result = graph_passes.RewriteResult(proto=graph, report=report, failure=failure)
        return result, planned, origin

    def _look(
        self, item: GraphItem, planned: graph_pb2.GraphDef, running: graph_pb2.GraphDef
    ) -> None:
        """Looks for the loss scale of a graph that is to run."""
        self._installation.unscaled.look(
            f"{TITLE} ({_fetched(item)})",
            _program(planned),
            _program(running),
            built=self._built(item),
            kind=TITLE,
        )

    def _built(self, item: GraphItem) -> Any:
        """The graph of the session that is called, None if it is not known."""
        if item.session is not None:
            return self._sessions.graph_of(item.session)
        # A server's: the newest that has all that is fetched.
        fetched = [name.partition(":")[0] for name in item.fetches]
        for graph in reversed(self._sessions.graphs):
            if all(_has(graph, name) for name in fetched):
                return graph
        return None

    def _is_news(self, item: GraphItem, counts: NodeCounts) -> bool:
        """Whether other fetches of the same graph have not told as much."""
        if (built := self._built(item)) is None:
            return True
        said, line = self._said.setdefault(built, set()), counts.line("", self._config.target_dtype)
        if line in said:
            return False
        said.add(line)
        return True

    def _say_broken(self, graph: graph_pb2.GraphDef, what: str, option: str) -> None:
        why = (
            f"a session graph stays as it is: TensorFlow's own {what}, and TensorFlow then drops "
            "every optimization of that graph. To have it rewritten, set "
            f"`graph_options.rewrite_options.{option}` to OFF in the session's config."
        )
        self._installation.tally.leave_out(why, len(graph.node))
        if option not in self._said_broken:
            self._said_broken.add(option)
            LOGGER.warning("AMP is on, but %s", why)

    @property
    def _runs_fused_whole(self) -> bool:
        # The kernels that run every fused op they are registered for are oneDNN's for bfloat16.
        return self._config.device == "CPU" and self._config.target_dtype == "bfloat16"


def _program(graph: graph_pb2.GraphDef) -> Program:
    """A graph with its library."""
    library = {function.signature.name: function for function in graph.library.function}
    return Program(graph, library.get)


def _fetched(item: GraphItem) -> str:
    """What is fetched of a graph, the first names of it."""
    more = ", ..." if len(item.fetches) > _FETCHES_NAMED else ""
    return ", ".join(item.fetches[:_FETCHES_NAMED]) + more


def _has(graph: Any, name: str) -> bool:
    try:
        return graph.get_operation_by_name(name) is not None
    except (KeyError, ValueError):
        return False


def _feeds_placeholders(graph: graph_pb2.GraphDef, item: GraphItem) -> bool:
    """Whether all that is fed is known, and fed to placeholders.

    One with a default has the default's shape in TensorFlow's inference, which is what is fed
    where its own shape leaves nothing open, as that of a flag.
    """
    placeholders = {
        f"{node.name}:0"
        for node in graph.node
        if node.op == "Placeholder" or (node.op == _WITH_DEFAULT and _has_shape(node))
    }
    return bool(item.fed) and placeholders.issuperset(item.fed)


def _has_shape(placeholder: Any) -> bool:
    return tensorflow.TensorShape(placeholder.attr["shape"].shape).is_fully_defined()


def _missing(graph: graph_pb2.GraphDef) -> str | None:
    """The name of a node that others read and that is not there, None if all are."""
    names = {node.name for node in graph.node}
    read = (name.lstrip("^").partition(":")[0] for node in graph.node for name in node.input)
    return next((name for name in read if name not in names), None)


def _shapes_of(apart: UnfusedGraph, item: GraphItem) -> Callable[[str], Sequence[Any]] | None:
    """Returns the shapes of the graph that was taken apart."""
    if item.shapes is None:
        return None
    known = item.shapes
    constants = frozenset(node.name for node in apart.graph.node if node.op == "Const")

    def shapes(name: str) -> Sequence[Any]:
        fused = apart.fused_name(name)
        if fused == name:
            return known(name)
        return () if name in constants else known(fused)[:1]

    return shapes


_undo: Callable[[], None] | None = None


def install(installation: Installation) -> str | None:
    """Hooks the rewrite into the graphs that sessions build from now on.

    Args:
        installation: What to rewrite with, and where to report.

    Returns:
        None, or why sessions stay as they are: this TensorFlow is not as expected, which a warning
        says, or its plugin API cannot be used, which a warning says when a session is made.
    """
    global _undo
    uninstall()
    if (found := obstacle(SESSION_HOST)) is not None:
        LOGGER.warning("AMP is on without the graphs of tf.compat.v1.Session: %s.", found)
        return found
    try:
        plugin = graph_plugin(tensorflow)
    except CApiError as error:
        refusal = f"{error}; graphs of tf.compat.v1.Session stay as they are"
        patches = Patches()
        # Most programs make no session: who does is told then.
        refuse(patches, refusal, installation.tally.leave_out)
        _undo = patches.undo
        return refusal
    if float32_sessions_exist():
        LOGGER.warning(
            "AMP was switched on after a tf.compat.v1.Session had been made: what that session "
            "has run before stays as it is. Switch AMP on before the first session."
        )
    host = SessionHost(installation, plugin)
    _undo = host.uninstall
    host.install()
    return None


def uninstall() -> None:
    """Makes the plugin do nothing and gives sessions made from now on their own config."""
    global _undo
    undo, _undo = _undo, None
    if undo is not None:
        undo()
