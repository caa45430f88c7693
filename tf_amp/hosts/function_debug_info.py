"""Python stack traces of functions that were rewritten.

The runtime keeps stack traces of functions made from a graph, and drops them for a definition that
is added as a proto. The graph that was traced still has them.
"""

from __future__ import annotations

import functools
import os
import re
import sysconfig
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, Literal

from tensorflow.core.framework import graph_debug_info_pb2
from tensorflow.python.autograph.impl import api
from tensorflow.python.util import tf_stack

from graph_passes.ops.node_types import GRADIENT_SCOPE
from graph_passes.plan_remarks import Lines
from tf_amp.compatibility import SOURCE_MAPS, obstacle

_PACKAGES = re.compile(r"[\\/](?:site|dist)-packages[\\/]")
# Folders of Keras whose frames say less than the layer that calls them.
_PLUMBING = frozenset(("activations", "backend", "ops", "utils"))
_NOT_THE_USERS = ("<", str(Path(__file__).parents[1]) + os.sep, sysconfig.get_path("stdlib"))
# What AutoGraph made of a function. TensorFlow maps its frames back in the thread that traces, and
# not in those of a strategy's replicas.
_GENERATED = "__autograph_generated_file"

_TAG = re.compile(r"\{\{function_node (\S+?)\}\}")


def rebuild(
    function: Any, fallback: Callable[[Any], graph_debug_info_pb2.GraphDebugInfo]
) -> graph_debug_info_pb2.GraphDebugInfo:
    """Builds the debug info of a rewritten function from the graph it was traced to.

    It is asked for when a step has failed or a SavedModel is written, so it is built then: doing it
    for every function costs 0.1 s for a ResNet50 training step.

    Args:
        function: the AtomicFunction.
        fallback: gives what the runtime itself has, for a function without its graph.

    Returns:
        The proto, with the stack of every node of the traced graph. A node that the rewrite made
        has that of the node that it is named after, a cast that of the node whose output it casts.
    """
    graph = function._cached_graph
    if graph is None:
        return fallback(function)
    builder = tf_stack.GraphDebugInfoBuilder()
    stacks = {op.name: _shown(op.traceback) for op in graph.get_operations() if op.traceback}
    for name, stack in stacks.items():
        builder.AccumulateStackTrace("", name, stack)
    for node in function.definition.node_def:
        if node.name in stacks:
            continue
        made_of = node.input[0].partition(":")[0].lstrip("^") if node.input else ""
        stack = stacks.get(_named_after(node.name, stacks) or made_of)
        if stack is not None:
            builder.AccumulateStackTrace("", node.name, stack)
    return _without_function_suffix(builder.Build())


def source_lines(graph: Any) -> Lines:
    """Finds the Python lines that made the nodes of a traced function, and of those it calls.

    The lines of a gradient are those of what it is the gradient of. A node that the rewrite made
    has those of the node that it is named after.

    Args:
        graph: the FuncGraph, or the graph of a session. Its stacks are read when lines are asked
            for, 30 us a node.
    """

    @functools.cache
    def stacks(function: str) -> dict[str, Any]:
        # A function of v1, as the gradient of CTC is one, has no graph to ask.
        found = graph._functions.get(function)
        of = getattr(found, "_cached_graph", None) if function else graph
        return {} if of is None else {op.name: op.traceback for op in of.get_operations()}

    @functools.cache
    def lines(function: str, node: str) -> tuple[str, ...]:
        known, name = stacks(function), node
        if (scope := GRADIENT_SCOPE.search(name)) is not None:
            forward = name[scope.end() :]
            while forward and forward.removesuffix("_grad") not in known:
                forward = forward.rpartition("/")[0]
            name = forward.removesuffix("_grad") or name
        stack = known.get(_named_after(name, known))
        return () if stack is None else user_lines(stack)

    return lines


def _named_after(name: str, known: Container[str]) -> str:
    """The longest part of a name that is the name of a known node, "" where none is."""
    while name and name not in known:
        name = name.rpartition("/")[0]
    return name


def user_lines(stack: Any) -> tuple[str, ...]:
    """The innermost line of the user's, and the innermost one of a package if that is deeper.

    In the threads of a strategy's replicas, what Keras itself makes has no line of the user's, and
    may have none of a package but those that say less than others.
    """
    package = plumbing = ""
    for frame in reversed(list(stack.get_user_frames())):
        file, number = frame.filename, frame.lineno
        if Path(file).name.startswith(_GENERATED):
            file, number = _origins(file).get(number, ("", 0))
        kind, shown = _place(file)
        if kind == "user":
            return (f"{shown}:{number}", *filter(None, (package,)))
        if kind == "package":
            package = package or f"{shown}:{number}"
        elif kind == "plumbing":
            plumbing = plumbing or f"{shown}:{number}"
    return tuple(filter(None, (package or plumbing,)))


@functools.lru_cache(maxsize=256)
def _origins(generated: str) -> Mapping[int, tuple[str, int]]:
    """The lines of a file that AutoGraph made -> file and line of what they were made of."""
    if obstacle(SOURCE_MAPS) is not None:
        return {}
    factories = (
        factory
        for by_options in list(api._TRANSPILER._cache._cache.values())
        for factory in list(by_options.values())
        if factory.module is not None and factory.module.__file__ == generated
    )
    return {
        place.lineno: (origin.loc.filename, origin.loc.lineno)
        for factory in factories
        for place, origin in factory.source_map.items()
    }


@functools.lru_cache(maxsize=1024)
def _place(file: str) -> tuple[Literal["user", "package", "plumbing", ""], str]:
    """Whose a file is, and how it is shown; "" if its frames say nothing."""
    in_package = _PACKAGES.split(file)[1:]
    if in_package:
        tells = _PLUMBING.isdisjoint(Path(in_package[-1]).parts)
        return "package" if tells else "plumbing", in_package[-1]
    if not file or file.startswith(_NOT_THE_USERS):
        return "", ""
    try:
        near = os.path.relpath(file)
    except OSError:  # the directory in which the program works was removed
        return "user", file
    return "user", file if near.startswith(os.pardir) else near


def name_originals(message: str, function: Any) -> str:
    """Makes an error message name traced functions in place of the copies that ran.

    A rewritten function may call private copies of the functions that the traced one called.
    TensorFlow finds stack traces by the names in the message, and knows the traced ones alone.

    Args:
        message: the runtime's message, with tags like "{{function_node name}}".
        function: the AtomicFunction that was called.

    Returns:
        The message with the name of a copy, which begins with the name of what it copies, replaced
        by that name.
    """
    if _TAG.search(message) is None:
        return message
    known = _names_below(function)

    def traced(tag: re.Match[str]) -> str:
        name = tag[1]
        if name in known:
            return tag[0]
        copied = max((n for n in known if name.startswith(f"{n}_")), key=len, default=name)
        return f"{{{{function_node {copied}}}}}"

    return _TAG.sub(traced, message)


def _names_below(function: Any) -> set[str]:
    names: set[str] = set()
    waiting = [function]
    while waiting:
        current = waiting.pop()
        name = current.name.decode()
        if name not in names:
            names.add(name)
            waiting += [child for child in current.children if isinstance(child, type(function))]
    return names


def _shown(stack: Any) -> Any:
    """Returns the user's frames, as the runtime shows them; all frames where there are none."""
    user_frames = stack.get_user_frames()
    return user_frames if len(user_frames) else stack


def _without_function_suffix(
    info: graph_debug_info_pb2.GraphDebugInfo,
) -> graph_debug_info_pb2.GraphDebugInfo:
    """Renames the keys "node@function" to "node", which is how the runtime's own info has them."""
    ids = {key.partition("@")[0]: trace for key, trace in info.name_to_trace_id.items()}
    info.name_to_trace_id.clear()
    info.name_to_trace_id.update(ids)
    return info
