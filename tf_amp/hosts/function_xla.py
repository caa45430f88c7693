"""What a function that XLA compiles calls must be fit for XLA as well.

A function may have been traced, and rewritten, before one that XLA compiles calls it. XLA then
compiles what it finds under that name; lists without a length, in which loops keep what they are
to add up at their end, it refuses, and what is faster without XLA need not be faster with it. The
caller gets such functions rewritten anew, as for XLA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorflow.core.framework import function_pb2

from graph_passes.functions.loop_sum_moves import has_moved_sums
from tf_amp.hosts.function_redirects import call_anew

if TYPE_CHECKING:
    from graph_passes import PrecisionConfig, RewriteResult
    from tf_amp.hosts.function_calls import TracedFunction

_SUFFIX = "__tf_amp_xla"


def call_compilable(
    traced: TracedFunction, result: RewriteResult, config: PrecisionConfig, *, all_anew: bool
) -> tuple[RewriteResult, list[RewriteResult]]:
    """Makes a function that XLA compiles call functions that were rewritten for XLA.

    Args:
        traced: the function as it was traced.
        result: the function after its rewrite.
        config: that of what XLA compiles.
        all_anew: whether every function that was rewritten is rewritten anew, and not those alone
            that XLA would refuse.

    Returns:
        The function with other calls where that is needed, and what became of the functions that
        were rewritten anew.
    """

    def wanted(name: str, _: function_pb2.FunctionDef) -> bool:
        original = traced.originals.find(traced.context, name)
        if original is None or all_anew:
            return original is not None
        parts = map(traced.context.get_function_def, (name, *original.extra_functions))
        return any(map(has_moved_sums, parts))

    return call_anew(traced, result, config, wanted, _SUFFIX)
