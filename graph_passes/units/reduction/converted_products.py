"""Which tensors go low because a matrix product or a convolution reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from graph_passes.ir.adjacency import walk
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
        m = self.matcher

        def readers(tensor: str) -> list[int]:
            found = [reader for reader in m.readers(m.maker(tensor)) if m.reads(reader, tensor)]
            return [reader for reader in found if reader not in self.ineligible]

        def moved(tensor: str) -> list[str]:
            return [m.output(reader) for reader in readers(tensor) if m.op(reader) in MOVES]

        return any(
            self._goes_low(reader, m.inputs(reader).index(same))
            for same in walk([tensor], moved)
            for reader in readers(same)
        )

    def _goes_low(self, number: int, port: int) -> bool:
        node_type = self.matcher.view.node_type(number)
        if node_type.op_type is None or self.lists.list_of(node_type.op_type.name) != "allow":
            return False
        return self.support.supports(node_type, node_type.layout.in_slots[port])
