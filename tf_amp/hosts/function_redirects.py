"""Functions that call others than they were traced with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tensorflow.core.framework import function_pb2
from tensorflow.python.eager import context as context_lib

from graph_passes.ir.function_references import function_attrs, named_functions

if TYPE_CHECKING:
    from graph_passes import PrecisionConfig, RewriteResult
    from tf_amp.hosts.function_calls import TracedFunction
    from tf_amp.hosts.function_originals import Originals

Find = Callable[[str], function_pb2.FunctionDef | None]

_PLANNED_SUFFIX = "__tf_amp_planned"
_CALLED_BY_ITSELF = "__inference_"
"""How the names of functions begin that a program can call by themselves: no branches or bodies."""


def call_anew(
    traced: TracedFunction,
    result: RewriteResult,
    config: PrecisionConfig,
    wanted: Callable[[str, function_pb2.FunctionDef], bool],
    suffix: str,
    find: Find | None = None,
) -> tuple[RewriteResult, list[RewriteResult]]:
    """Makes a function call others that are rewritten anew, where they have plans of their own.

    Args:
        traced: the function as it was traced.
        result: the function after its rewrite.
        config: with which the float32 originals of the others are rewritten.
        wanted: whether a function of some name and float32 original is to be rewritten anew.
        suffix: what is added to the names of functions that are called instead.
        find: gives the definition of a function that it calls, None for what is planned apart:
            that is called as it is. By default nothing is.

    Returns:
        The function with other calls where that is needed, and what became of the functions that
        were rewritten anew.
    """
    context, originals = traced.context, traced.originals
    rewritten: list[RewriteResult] = []
    added = {function.signature.name: function for function in result.extra_functions}
    # What is float32 for speed may be faster planned by itself.
    kept = result.report.keeps_values_in

    def running(name: str) -> function_pb2.FunctionDef | None:
        if name in added:
            return added[name]
        is_apart = find is not None and find(name) is None
        return None if is_apart else definition_in(context, name)

    def replacement(name: str) -> function_pb2.FunctionDef | None:
        if name in added or name in kept:
            return None
        original = originals.find(context, name)
        float32 = running(name) if original is None else original.definition()
        if float32 is None or not wanted(name, float32):
            return None
        anew = traced.rewrite(config, float32)
        if original is None and not anew.changed:
            return None
        rewritten.append(anew)
        added.update({function.signature.name: function for function in anew.extra_functions})
        return anew.proto  # type: ignore[return-value]

    return _call_others(result, added, running, replacement, suffix), rewritten


def call_as_planned(
    result: RewriteResult,
    context: context_lib.Context,
    originals: Originals,
    waits: Callable[[str], bool],
) -> RewriteResult:
    """Makes a function call what its plan keeps float32 for its values by names of its own.

    Called by itself, such a function is planned without its caller, and runs so by its own name.

    Args:
        result: the function after its rewrite.
        context: the eager context that holds the functions that it calls.
        originals: what was rewritten.
        waits: whether a function is rewritten once it is called by itself.

    Returns:
        The function with other calls where that is needed.
    """
    planned, kept = _planned_with(result), result.report.keeps_values_in
    if not kept:
        return result
    added = {function.signature.name: function for function in result.extra_functions}

    def running(name: str) -> function_pb2.FunctionDef | None:
        if name in added or name not in planned:
            return added.get(name)
        return originals.definition(context, name)

    def replacement(name: str) -> function_pb2.FunctionDef | None:
        if name in added or name not in kept:
            return None
        may_change = name.startswith(_CALLED_BY_ITSELF) and waits(name)
        return running(name) if may_change or originals.find(context, name) else None

    return _call_others(result, added, running, replacement, _PLANNED_SUFFIX)


def _call_others(
    result: RewriteResult,
    added: Mapping[str, function_pb2.FunctionDef],
    running: Find,
    replacement: Find,
    suffix: str,
) -> RewriteResult:
    redirected = redirect_calls(result.proto, running, replacement, suffix)  # type: ignore[arg-type]
    if redirected is None:
        return result
    definition, renamed = redirected
    functions = (*added.values(), *renamed)
    return dataclasses.replace(result, proto=definition, extra_functions=functions, changed=True)


def definition_in(context: context_lib.Context, name: str) -> function_pb2.FunctionDef | None:
    """Returns a function as the runtime has it, None for a name that is no function's."""
    return context.get_function_def(name) if context.has_function(name) else None


def redirect_calls(
    definition: function_pb2.FunctionDef, running: Find, replacement: Find, suffix: str
) -> tuple[function_pb2.FunctionDef, tuple[function_pb2.FunctionDef, ...]] | None:
    """Makes a function call replacements, in place and behind other functions that it calls.

    Args:
        definition: the function; it is not changed.
        running: gives a function as the runtime has it, None for a name that is no function's.
        replacement: gives what is to be called instead of a function, None for that function.
        suffix: what is added to the names of functions that are called instead.

    Returns:
        The function with other calls, and the functions that it then calls under their new names,
        each behind those it calls itself; None if nothing that it calls is replaced.
    """
    redirection = _Redirection(running, replacement, suffix)
    changed = redirection.of(definition)
    return None if changed is None else (changed, tuple(redirection.renamed))


class _Redirection:
    """What is called instead of the functions that were met so far.

    Functions that call one another would be a cycle, which keeps the whole plan of the caller
    alive until the collector runs.
    """

    def __init__(self, running: Find, replacement: Find, suffix: str) -> None:
        self.renamed: list[function_pb2.FunctionDef] = []
        self._running, self._replacement, self._suffix = running, replacement, suffix
        self._targets: dict[str, str | None] = {}

    def of(self, caller: function_pb2.FunctionDef) -> function_pb2.FunctionDef | None:
        """The function with other calls, None if it calls nothing that is replaced."""
        changed = None
        for name in sorted(set(called_names(caller))):
            target = self._target(name)
            if target is not None:
                if changed is None:
                    changed = function_pb2.FunctionDef()
                    changed.CopyFrom(caller)
                _rename_calls(changed, name, target)
        return changed

    def _target(self, name: str) -> str | None:
        if name not in self._targets:
            self._targets[name] = None  # what a recursive function finds of itself
            self._targets[name] = self._renamed_copy(name)
        return self._targets[name]

    def _renamed_copy(self, name: str) -> str | None:
        found = self._running(name)
        if found is None:
            return None
        other = self._replacement(name)
        body = self.of(other or found)
        if other is None and body is None:
            return None
        copy = function_pb2.FunctionDef()
        copy.CopyFrom(body or other or found)
        copy.signature.name = name + self._suffix
        self.renamed.append(copy)
        return copy.signature.name


def with_callees(
    functions: Iterable[function_pb2.FunctionDef], find: Find
) -> Iterator[function_pb2.FunctionDef]:
    """Yields functions and those that they call, directly or not, each once.

    Args:
        functions: where to begin.
        find: gives the definition of a function by its name, None for what is not to be looked at.
    """
    pending = list(functions)
    seen = {function.signature.name for function in pending}
    for function in pending:  # which grows
        yield function
        for name in called_names(function):
            callee = None if name in seen else find(name)
            seen.add(name)
            if callee is not None:
                pending.append(callee)


def called_apart(result: RewriteResult, find: Find) -> list[str]:
    """The names by which a rewritten function calls what has no part in its plan.

    A function that the plan left as it is keeps its name, and is done with; what that calls may
    have been left out of the plan.

    Args:
        result: the function after its rewrite.
        find: gives the definition of a function that was planned with it.

    Returns:
        The names, each once; those of ops are among them.
    """
    planned = _planned_with(result)
    functions: Any = (result.proto, *result.extra_functions)
    bodies = with_callees(functions, lambda name: find(name) if name in planned else None)
    names = dict.fromkeys(name for body in bodies for name in called_names(body))
    return [name for name in names if name not in planned]


def _planned_with(result: RewriteResult) -> frozenset[str]:
    return frozenset() if result.failure else result.report.planned_with


def called_names(definition: function_pb2.FunctionDef) -> Iterator[str]:
    """Yields the names that a function may call by; those of some ops are among them."""
    return (name for _, name in named_functions(definition.node_def))


def _rename_calls(definition: function_pb2.FunctionDef, old: str, new: str) -> None:
    for node, name in [*named_functions(definition.node_def)]:
        if name == old:
            node.op = new if node.op == old else node.op
            for function in function_attrs(node):
                if function.name == old:
                    function.name = new
