"""What a Cast of a ref variable of TensorFlow 1 must wait for.

A copy of such a variable, its `read`, shares its memory, and so does what hands that on: it is the
reader that tells when the value is taken, and what runs behind an assignment has the new one,
whoever made the copy. Besides, TensorFlow's arithmetic optimizer lets a Cast change places with
what hands a tensor on, whatever that waits for.
"""

from __future__ import annotations

import functools

import numpy as np

from graph_passes.coloring.v1_loops import SHARES
from graph_passes.ir.adjacency import Neighbours, walk
from graph_passes.ir.graph_view import GraphView

_ENTERS = ("Enter", "RefEnter")


class RefReads:
    """Reads of the ref variables of one graph."""

    def __init__(self, view: GraphView) -> None:
        self._view = view
        self._written: dict[int, set[int]] = {}  # by variable

    def awaited(self, maker: int, reader: int) -> list[str]:
        """What a Cast between two nodes must wait for; nothing where it casts no ref variable.

        That is what the reader and those between it and the variable wait for, and what they read
        behind a write of it: the Cast has then the value that the reader had.
        """
        view = self._view
        takers, number = [reader], maker
        while number >= 0 and self._hands_on(number):
            if view.op_names[number] == "Transpose":
                takers = []  # a copy of its own, made when it runs
            takers.append(number)
            number = view.makers(number)[0]
        if number < 0 or not self._has_ref(number, "output_arg"):
            return []
        if number not in self._written:
            self._written[number] = self._behind_writes(number)
        waits: list[str] = []
        for taker in takers:
            op = view.op_names[taker]
            if op in _ENTERS:  # what is outside the loop of the reader must not be waited for
                break
            waits.extend(view.waits.get(taker, ()))
            # A Merge runs by the first of its inputs.
            if taker in self._written[number] and op != "Merge":
                read = zip(view.nodes[taker].input, view.makers(taker), strict=False)
                others = (name for name, made in read if made not in (maker, number, *takers))
                waits.extend(name.partition(":")[0] for name in others)
        return sorted(set(waits))

    def _behind_writes(self, variable: int) -> set[int]:
        """All that runs behind a write of a variable, be it in the next round of a loop."""
        view = self._view

        def takers(number: int) -> list[int]:
            return [n for n in view.reading_nodes(number) if self._has_ref(n, "input_arg")]

        found = set(walk([variable], takers)) - {variable}
        # What only hands a ref on is no write (RefEnter, RefSwitch).
        writes = sorted(n for n in found if not view.op_names[n].startswith("Ref"))
        return set(walk(writes, self._readers.__getitem__))

    @functools.cached_property
    def _readers(self) -> Neighbours:
        view = self._view
        makers, (awaited, waiting) = np.asarray(view.maker_nodes), view.control_edges
        known = makers >= 0
        return Neighbours(
            len(view.nodes),
            np.concatenate([makers[known], awaited]),
            np.concatenate([view.edge_readers[known], waiting]),
        )

    def _hands_on(self, number: int) -> bool:
        op = self._view.op_names[number]
        return op in SHARES or op == "Transpose" or self._has_ref(number, "input_arg")

    def _has_ref(self, number: int, args: str) -> bool:
        op_type = self._view.op_type(number)
        return op_type is not None and any(arg.is_ref for arg in getattr(op_type.op_def, args))
