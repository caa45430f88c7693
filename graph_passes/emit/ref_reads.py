"""Which writes of a ref variable of TensorFlow 1 come before a reader of it.

A copy of such a variable, its `read`, shares its memory: it is the reader that tells when the value
is taken, and what runs behind an assignment has the new one, whoever made the copy. Besides,
TensorFlow's arithmetic optimizer lets a Cast change places with what hands a tensor on, whatever
that waits for.
"""

from __future__ import annotations

import functools

from graph_passes.ir.adjacency import Neighbours, walk
from graph_passes.ir.graph_view import GraphView
from graph_passes.ir.node_order import order_edges
from graph_passes.rewriter.matcher import MOVES


class RefReads:
    """Reads of the ref variables of one graph."""

    def __init__(self, view: GraphView) -> None:
        self._view = view
        self._writes: dict[int, list[tuple[str, set[int]]]] = {}  # by variable

    def awaited(self, maker: int, reader: int) -> list[str]:
        """What a Cast between two nodes must wait for; nothing where it casts no ref variable.

        That is what the two and those between them and the variable wait for, and its writes.
        """
        view = self._view
        waits = list(view.waits.get(reader, ()))
        while maker >= 0 and (view.op_names[maker] in MOVES or self._is_write(maker)):
            waits.extend(view.waits.get(maker, ()))
            maker = view.makers(maker)[0]
        if maker < 0 or not self._has_ref(maker, "output_arg"):
            return []
        if maker not in self._writes:
            self._writes[maker] = self._find_writes(maker)
        waits.extend(write for write, behind in self._writes[maker] if reader in behind)
        return sorted(set(waits))

    def _find_writes(self, variable: int) -> list[tuple[str, set[int]]]:
        """The writes of a variable, each with all that runs behind it."""
        view, readers = self._view, self._readers

        def writes(number: int) -> list[int]:
            return [reader for reader in view.reading_nodes(number) if self._is_write(reader)]

        found = sorted(set(walk([variable], writes)) - {variable})
        return [(view.names[n], set(walk([n], readers.__getitem__))) for n in found]

    @functools.cached_property
    def _readers(self) -> Neighbours:
        return Neighbours(len(self._view.nodes), *order_edges(self._view))

    def _is_write(self, number: int) -> bool:
        """Whether a node takes a ref, but to hand it on in control flow (RefEnter, RefSwitch)."""
        return self._has_ref(number, "input_arg") and not self._view.op_names[number].startswith(
            "Ref"
        )

    def _has_ref(self, number: int, args: str) -> bool:
        op_type = self._view.op_type(number)
        return op_type is not None and any(arg.is_ref for arg in getattr(op_type.op_def, args))
