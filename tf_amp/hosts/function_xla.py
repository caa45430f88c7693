"""What a function that XLA compiles calls must be fit for XLA as well.

A function may have been traced, and rewritten, before one that XLA compiles calls it. XLA then
compiles what it finds under that name; lists without a length, in which loops keep what they are
to add up at their end, it refuses, and what is faster without XLA need not be faster with it. The
caller gets such functions rewritten anew, as for XLA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorflow.core.framework import function_pb2
from tensorflow.python.eager import context as context_lib

from graph_passes.functions.loop_sum_edits import has_moved_sums
from tf_amp.hosts.function_redirects import redirect_calls

if TYPE_CHECKING:
    from graph_passes import RewriteResult
    from tf_amp.hosts.function_originals import Originals

_SUFFIX = "__tf_amp_xla"

Rewrite = Callable[[function_pb2.FunctionDef], "RewriteResult"]


def call_compilable(
    result: RewriteResult,
    rewrite: Rewrite,
    context: context_lib.Context,
    originals: Originals,
    *,
    all_anew: bool,
) -> tuple[RewriteResult, list[RewriteResult]]:
    """Makes a function that XLA compiles call functions that were rewritten for XLA.

    Args:
        result: the function after its rewrite.
        rewrite: rewrites the float32 original of a function as for XLA.
        context: the eager context that holds the functions it calls.
        originals: what was rewritten.
        all_anew: whether every function that was rewritten is rewritten anew, and not those alone
            that XLA would refuse.

    Returns:
        The function with other calls where that is needed, and what became of the functions that
        were rewritten anew.
    """
    rewritten: list[RewriteResult] = []
    added = {function.signature.name: function for function in result.extra_functions}

    def running(name: str) -> function_pb2.FunctionDef | None:
        if name in added:
            return added[name]
        return context.get_function_def(name) if context.has_function(name) else None

    def replacement(name: str) -> function_pb2.FunctionDef | None:
        original = None if name in added else originals.find(context, name)
        if original is None:
            return None
        parts = (name, *original.extra_functions)
        if not all_anew and not any(
            has_moved_sums(context.get_function_def(part)) for part in parts
        ):
            return None
        anew = rewrite(original.definition())
        rewritten.append(anew)
        added.update({function.signature.name: function for function in anew.extra_functions})
        return anew.proto  # type: ignore[return-value]

    redirected = redirect_calls(result.proto, running, replacement, _SUFFIX)  # type: ignore[arg-type]
    if redirected is None:
        return result, rewritten
    definition, renamed = redirected
    functions = (*added.values(), *renamed)
    anew = dataclasses.replace(result, proto=definition, extra_functions=functions, changed=True)
    return anew, rewritten
