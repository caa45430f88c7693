"""Numbers for all conversions and units of a process, and the limit up to which they are made."""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
from collections.abc import Callable, Iterable
from typing import TypeAlias

from tensorflow.core.framework import function_pb2

from graph_passes import PrecisionConfig, Reason, RewriteResult
from graph_passes.policy.config import Selection
from graph_passes.result import numbered

_log = logging.getLogger("tf_amp")

Rewrite: TypeAlias = Callable[[PrecisionConfig], RewriteResult]

# An op of a later list is converted for the sake of one before it.
_LISTS = ("allow", "infer", "clear", "deny", "")
# They follow what reads them, and are numbered with it.
_FOLLOWING = (Reason.FOLDED_CONSTANT.name.lower(), Reason.EXISTING_CAST.name.lower())


class ConversionNumbers:
    """Gives a number to each conversion and unit when it is planned first.

    The numbers go on from graph to graph. Within a graph they follow lists and names, units first,
    not the order in which nodes happen to stand. What is planned again, for other sizes or in
    another trace of a function, keeps its number: it is known by function, without the number that
    TensorFlow adds, and node.

    Args:
        limit: what has a higher number is not made; None makes all, and numbers nothing.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._numbers: dict[tuple[str, str, str], int] = {}
        # A handler of a signal may trace a function while this thread is in here.
        self._lock = threading.RLock()

    def rewrite(self, rewrite: Rewrite, config: PrecisionConfig) -> RewriteResult:
        """Rewrites a graph up to the limit.

        Args:
            rewrite: rewrites the graph with a configuration.
            config: the configuration without a limit.

        Returns:
            The result, whose remarks have the numbers.
        """
        result = rewrite(config)
        if self._limit is None or result.failure is not None:
            return result
        proto = result.proto
        root = proto.signature.name if isinstance(proto, function_pb2.FunctionDef) else ""
        numbers = self._number(root, result)
        chosen = {key for key, number in numbers.items() if number <= self._limit}
        if len(chosen) == len(numbers):
            return dataclasses.replace(result, numbers=numbers)

        def nodes(keys: Iterable[tuple[str, str, str]]) -> frozenset[tuple[str, str]]:
            return frozenset((function or root, node) for rule, function, node in keys if not rule)

        selection = Selection(
            nodes=nodes(chosen),
            left_out=nodes(numbers.keys() - chosen),
            units=frozenset(
                (rule, function or root, node) for rule, function, node in chosen if rule
            ),
        )
        limited = rewrite(dataclasses.replace(config, selection=selection))
        return dataclasses.replace(limited, numbers=numbers)

    def _number(self, root: str, result: RewriteResult) -> dict[tuple[str, str, str], int]:
        keys = {
            numbered(remark): _LISTS.index(remark.op_list)
            for remark in result.remarks().remarks
            if remark.kind == "unit"
            or (remark.kind == "converted" and remark.rule not in _FOLLOWING)
        }
        numbers, before = {}, len(self._numbers)
        with self._lock:
            for rule, function, node in sorted(keys, key=lambda key: (not key[0], keys[key], key)):
                where = re.sub(r"_\d+$", "", function or root)
                number = self._numbers.setdefault((rule, where, node), len(self._numbers) + 1)
                numbers[rule, function, node] = number
            last = len(self._numbers)
        if last > before:
            _log.info(
                "Conversions and units %d to %d are in %s; the bisect limit is %d.",
                before + 1,
                last,
                root or "a graph",
                self._limit,
            )
        return numbers
