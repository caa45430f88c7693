"""The largest magnitudes of tensors, and the shares of their values that a dtype flushes to 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from tensorflow.core.framework.function_pb2 import FunctionDef

from graph_passes.ir.view import view_body
from graph_passes.ops.node_types import NodeTypeTable
from tf_amp.comparison.callables import Arrays, Signature
from tf_amp.comparison.steps import fed, step_of
from tf_amp.diagnosis.recording import Key, Turn, float32_of, traced_name

Converted: TypeAlias = Mapping[str, Set[str]]
"""Node -> its type attributes that a plan converts, as remarks name them."""


@dataclasses.dataclass
class Range:
    """What is known of a float32 tensor, over all batches and turns of loops.

    Attributes:
        largest: the largest magnitude among its finite values.
        over: how many finite values are over the largest of the target dtype.
        non_finite: how many are NaN or infinite.
        nonzero: how many are finite and not 0.
        flushed: how many of those the target dtype rounds to 0.
    """

    largest: float = 0.0
    over: int = 0
    non_finite: int = 0
    nonzero: int = 0
    flushed: int = 0

    def add(self, values: np.ndarray, dtype: Any) -> None:
        """Takes in more values.

        Args:
            values: an array of any shape, float32.
            dtype: the target dtype of NumPy.
        """
        limits = ml_dtypes.finfo(dtype)
        sizes = np.abs(np.ravel(values))
        finite = sizes[np.isfinite(sizes)]
        nonzero = finite[finite > 0]
        self.largest = max(self.largest, float(np.max(finite, initial=0)))
        self.over += int(np.count_nonzero(finite > float(limits.max)))
        self.non_finite += sizes.size - finite.size
        self.nonzero += nonzero.size
        # Half of the smallest one is a tie, which goes to 0.
        self.flushed += int(np.count_nonzero(nonzero <= float(limits.smallest_subnormal) / 2))

    @property
    def underflow(self) -> float:
        """The share of the values other than 0 that the target dtype rounds to 0."""
        return self.flushed / self.nonzero if self.nonzero else 0.0

    def severity(self) -> tuple[float, ...]:
        """What the worse one of two ranges has more of."""
        return self.over, self.non_finite, self.underflow, self.largest


def measure(
    signature: Signature,
    samples: Iterable[Arrays],
    converted: Converted,
    dtype: Any,
) -> Iterator[tuple[Range, Set[str]]]:
    """Runs a signature in float32 and measures what a plan would convert.

    Args:
        signature: of the float32 model.
        samples: the batches.
        converted: what a plan converts.
        dtype: the target dtype of NumPy.

    Yields:
        The range of each tensor, and the converted nodes that make or read it.
    """
    step = step_of(signature)
    functions = step.library()
    nodes = _tensors(functions, converted)
    ranges: dict[Key, Range] = {}

    def tell(key: Key, turn: Turn, value: np.ndarray) -> None:
        del turn
        ranges.setdefault(key, Range()).add(value, dtype)

    for sample in samples:
        fed(step, signature, sample).record(functions, float32_of(nodes), tell)
    for key, found in ranges.items():
        yield found, nodes[key]


def _tensors(functions: Mapping[str, FunctionDef], converted: Converted) -> dict[Key, set[str]]:
    """The tensors that converted nodes of functions make or read -> these nodes."""
    types = NodeTypeTable(lambda op: None if (f := functions.get(op)) is None else f.signature)
    found: dict[Key, set[str]] = {}
    for function in functions.values():
        view = view_body(function, node_types=types)
        traced = traced_name(function.signature.name)
        for node in function.node_def:
            attrs = converted.get(node.name)
            if attrs is None or node.op in ("Const", "ReadVariableOp"):
                continue  # what only brings values is cast by its readers
            layout = view.layout(view.index[node.name])
            made = [(node.name, port) for port in range(len(layout.out_slots))]
            read = [view.split(t) for t in node.input if not t.startswith("^")]
            ports = [*zip(made, layout.out_slots, strict=True)]
            ports += zip(read, layout.in_slots, strict=True)
            for (name, port), slot in ports:
                if str(layout.slots[slot]) in attrs:
                    found.setdefault((traced, name, port), set()).add(node.name)
    return found
