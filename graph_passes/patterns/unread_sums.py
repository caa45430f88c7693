"""Sums that nothing reads, such as the gradient of the constant in a Select.

Automatic differentiation makes a gradient for every operand, constants included, and sums it to
the shape of the operand. TensorFlow drops what nothing reads before the graph runs, but only after
the rewrite: until then such a sum would deny, and ask for a Cast that is dropped with it.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from graph_passes.patterns.edits import GraphEdits

REDUCTIONS = ("Sum", "Mean")


def pass_unread_sums(edits: GraphEdits, ends: Collection[int], preserve: Collection[str]) -> None:
    """Lets sums that nothing reads take whatever dtype comes.

    In a graph of which nobody has said what is fetched, everything may be.

    Args:
        edits: receives the lists and the units.
        ends: the nodes that sum and the Reshapes, by number.
        preserve: names of nodes that are fetched or run.
    """
    view = edits.view
    if not (preserve or view.is_function):
        return
    matcher = edits.matcher
    read = np.bincount(view.sources, minlength=len(view.dtypes)).astype(bool)
    unread = {
        number
        for number in ends
        if not read[view.base[number]] and view.nodes[number].name not in preserve
    }
    for end in sorted(unread):
        number = matcher.maker(matcher.tensor(end, 0)) if matcher.op(end) == "Reshape" else end
        name = view.nodes[number].name
        if (
            matcher.op(number) in REDUCTIONS
            and name not in preserve
            and name not in edits.listed
            and matcher.output(number) not in edits.redirect
            and unread.issuperset(matcher.readers(number))
        ):
            edits.listed[name] = "clear"
            edits.units.append(f"unread-sum: {name}")
