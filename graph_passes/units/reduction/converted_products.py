"""Which tensors go low because a matrix product or a convolution reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from graph_passes.ir.view import FLOAT
from graph_passes.ops.kernels import KernelSupport
from graph_passes.policy.op_lists import OpLists
from graph_passes.rewriter.matcher import MOVES, Matcher


@dataclasses.dataclass(frozen=True)
class ConvertedProducts:
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
                if matcher.op(reader) in MOVES and inputs[0] == last:
                    moved = matcher.output(reader)
                    if moved not in seen:
                        seen.add(moved)
                        pending.append(moved)
        return False

    def _goes_low(self, number: int, port: int) -> bool:
        node_type = self.matcher.view.node_type(number)
        if node_type.op_type is None or self.lists.list_of(node_type.op_type.name) != "allow":
            return False
        slot = node_type.layout.in_slots[port]
        return node_type.dtypes[slot] == FLOAT and self.support.supports(node_type, slot)
