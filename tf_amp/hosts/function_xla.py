"""What a function that XLA compiles calls must be fit for XLA as well.

A function may have been traced, and rewritten, before one that XLA compiles calls it. XLA then
compiles what it finds under that name; lists without a length, in which loops keep what they are
to add up at their end, it refuses, and what is faster without XLA need not be faster with it. The
caller gets such functions rewritten anew, as for XLA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorflow.core.framework import function_pb2
from tensorflow.python.eager import context as context_lib

from graph_passes.functions.loop_sum_moves import has_moved_sums
from tf_amp.hosts.function_redirects import call_anew

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

    def wanted(name: str, _: function_pb2.FunctionDef) -> bool:
        original = originals.find(context, name)
        if original is None or all_anew:
            return original is not None
        parts = map(context.get_function_def, (name, *original.extra_functions))
        return any(map(has_moved_sums, parts))

    return call_anew(result, rewrite, wanted, context, originals, _SUFFIX)
