"""What is decided about functions that XLA compiles, and the one line that says it.

XLA makes other code than TensorFlow's own kernels: on a CPU it may compute in float32 whatever the
dtype is, and convert before and after. So these functions have a cost table of their own where one
was measured.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from graph_passes import PrecisionConfig
from graph_passes.functions.call_tree import MUST_COMPILE, is_set
from graph_passes.ops.reasons import Reason
from tf_amp.cost_tables import TableChoice
from tf_amp.env_variables import COST_TABLE

if TYPE_CHECKING:
    from tensorflow.core.framework import function_pb2

    from graph_passes import RewriteResult
    from graph_passes.policy.cost_table import CostTable

_log = logging.getLogger("tf_amp")

# From here on it is worth the words that something is faster without XLA.
_FASTER = 1.1
_OPS_NAMED = 3
# What Keras and tf_keras compile on a CPU, where TensorFlow has no convolution of groups.
_OF_KERAS = ("_conv_xla", "_jit_compiled_convolution_op")
_OF_KERAS_SAID = " Keras itself has it compiled, for its groups."


def is_compiled(definition: function_pb2.FunctionDef) -> bool:
    """Whether XLA compiles a function as a whole (`jit_compile=True`)."""
    return is_set(definition.attr, MUST_COMPILE)


class CompiledFunctions:
    """How functions that XLA compiles are rewritten.

    Attributes:
        costs: their own cost table, and where it comes from or why there is none.
        config: what they are rewritten with.
    """

    def __init__(self, costs: TableChoice, config: PrecisionConfig) -> None:
        self.costs = costs
        self._without_xla = config.cost_table
        self.config = dataclasses.replace(
            config, fused=True, cost_table=self.costs.table or config.cost_table
        )
        # A handler of a signal may trace a function while this thread is in here.
        self._lock = threading.RLock()
        self._said = False

    @property
    def apart(self) -> bool:
        """Whether what is good for these functions may be bad for others, and the reverse."""
        return self.costs.table is not None or not self.config.converts

    def say(self, name: str, results: Sequence[RewriteResult]) -> None:
        """Warns, once, of a function that stays float32 because XLA gains nothing.

        Args:
            name: the function's name, for people.
            results: what became of it and of the functions that it calls.
        """
        table = self.costs.table
        converted = any(result.report.converted_nodes for result in results)
        if table is None or self._said or converted:
            return
        slower = _slower_products(results, table)
        with self._lock:
            if not slower or self._said:
                return
            self._said = True
        _log.warning(
            "%r stays float32: it is compiled by XLA (jit_compile=True), which computes %s no "
            "faster than float32 here (cost table: %s).%s %s=off converts it all the same. "
            "Further functions like it are not named.",
            name,
            table.target_dtype,
            self.costs.reason,
            _OF_KERAS_SAID if name in _OF_KERAS else self._faster_without(slower, table),
            COST_TABLE,
        )

    def _faster_without(self, ops: Iterable[str], table: CostTable) -> str:
        times = ", ".join(f"{op} {ratio:.1f} times" for op, ratio in self._ratios(ops, table))
        if not times:
            return ""
        return (
            f" By the cost tables, float32 under XLA takes longer than {table.target_dtype} "
            f"without it: {times} as long. Set jit_compile=False to gain that."
        )

    def _ratios(self, ops: Iterable[str], table: CostTable) -> Iterator[tuple[str, float]]:
        """How many times longer an op takes compiled, for large sizes."""
        found = []
        for op in ops:
            compiled = table.cost_of(op)
            plain = self._without_xla.cost_of(op) if self._without_xla else None
            if compiled and plain:
                size = min(compiled.float32.sizes[-1], plain.low.sizes[-1])
                found.append((op, compiled.float32.at(size) / plain.low.at(size)))
        return ((op, ratio) for op, ratio in found[:_OPS_NAMED] if ratio >= _FASTER)


def _slower_products(results: Sequence[RewriteResult], table: CostTable) -> list[str]:
    """The op types with a row in the table that stay float32 for it, the most frequent first."""
    counts: Counter[str] = Counter()
    for result in results:
        for (op, reason), count in result.report.attributes.items():
            if reason is Reason.SLOWER_UNDER_XLA and table.cost_of(op):
                counts[op] += count
    return [op for op, _ in counts.most_common()]
