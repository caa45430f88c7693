"""Which tensors go low because a matrix product or a convolution reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from graph_passes.kernels import KernelSupport
from graph_passes.op_lists import OpLists
from graph_passes.patterns.matching import Matcher
from graph_passes.patterns.search import SHAPERS
from graph_passes.view import FLOAT

_MOVES = (*SHAPERS, "Transpose")


@dataclasses.dataclass(frozen=True)
class LowProducts:
    """The ops of the allow list in one graph, which take the target dtype whatever feeds them.

    Attributes:
        matcher: reads the graph.
        lists: the op lists in force.
        support: answers whether a node has a kernel in the target dtype.
        ineligible: numbers of the nodes that must stay as they are.
    """

    matcher: Matcher
    lists: OpLists
    support: KernelSupport
    ineligible: Collection[int]

    def read(self, tensor: str) -> bool:
        """Whether one of them reads a tensor, directly or behind ops that only move values."""
        matcher = self.matcher
        pending, seen = [tensor], {tensor}
        while pending:
            last = pending.pop()
            for reader in matcher.readers(matcher.maker(last)):
                inputs = matcher.inputs(reader)
                if last not in inputs or reader in self.ineligible:
                    continue
                if self._goes_low(reader, inputs.index(last)):
                    return True
                if matcher.op(reader) in _MOVES and inputs[0] == last:
                    moved = matcher.output(reader)
                    if moved not in seen:
                        seen.add(moved)
                        pending.append(moved)
        return False

    def _goes_low(self, number: int, port: int) -> bool:
        kind = self.matcher.view.kind(number)
        if kind.op_type is None or self.lists.list_of(kind.op_type.name) != "allow":
            return False
        slot = kind.layout.in_slots[port]
        return kind.dtypes[slot] == FLOAT and self.support.supports(kind, slot)
