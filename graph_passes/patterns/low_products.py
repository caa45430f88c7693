"""Which tensors go low because a matrix product or a convolution reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from graph_passes.kernels import KernelSupport
from graph_passes.op_lists import OpLists
from graph_passes.patterns.matching import Matcher
from graph_passes.patterns.search import SHAPERS
from graph_passes.view import FLOAT, GraphView

_MOVES = (*SHAPERS, "Transpose")


@dataclasses.dataclass(frozen=True)
class LowProducts:
    """The ops of the allow list in one graph, which take the target dtype whatever feeds them.

    Attributes:
        view: the graph.
        lists: the op lists in force.
        support: answers whether a node has a kernel in the target dtype.
        ineligible: numbers of the nodes that must stay as they are.
    """

    view: GraphView
    lists: OpLists
    support: KernelSupport
    ineligible: Collection[int]

    def read(self, tensor: str) -> bool:
        """Whether one of them reads a tensor, directly or behind ops that only move values."""
        view, matcher = self.view, Matcher(self.view)
        pending, seen = [tensor], {tensor}
        while pending:
            last = pending.pop()
            for reader in view.reading_nodes(view.index[view.split(last)[0]]):
                node = view.nodes[reader]
                if last not in node.input or reader in self.ineligible:
                    continue
                if self._goes_low(reader, last):
                    return True
                moved = matcher.output(reader)
                if node.op in _MOVES and node.input[0] == last and moved not in seen:
                    seen.add(moved)
                    pending.append(moved)
        return False

    def _goes_low(self, number: int, tensor: str) -> bool:
        view = self.view
        node, op_type = view.nodes[number], view.op_types[number]
        if op_type is None or self.lists.list_of(op_type.name) != "allow":
            return False
        layout = view.layouts[number]
        slot = layout.in_slots[list(node.input).index(tensor)]
        return view.dtypes[view.base[number] + slot] == FLOAT and self.support.has_kernel(
            op_type, layout.slots[slot], node
        )
