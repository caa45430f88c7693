"""Sums that nothing reads, such as the gradient of the constant in a Select.

Automatic differentiation makes a gradient for every operand, constants included, and sums it to
the shape of the operand. TensorFlow drops what nothing reads before the graph runs, but only after
the rewrite: until then such a sum would deny, and ask for a Cast that is dropped with it; and so
would what makes only the sum, such as the squares in the gradient of a swish for its constant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from graph_passes.patterns.edits import GraphEdits

REDUCTIONS = ("Sum", "Mean")


def pass_unread_sums(
    edits: GraphEdits, ends: Collection[int], preserve: Collection[str], denied: Collection[str]
) -> None:
    """Lets sums that nothing reads, and what makes them alone, take whatever dtype comes.

    In a graph of which nobody has said what is fetched, everything may be.

    Args:
        edits: receives the lists and the units.
        ends: the nodes that sum and the Reshapes, by number.
        preserve: names of nodes that are fetched or run.
        denied: the ops of the deny list.
    """
    view = edits.view
    if not (preserve or view.is_function):
        return
    matcher = edits.matcher
    read = np.bincount(view.sources, minlength=len(view.dtypes)).astype(bool)
    unread = {
        number
        for number in ends
        if not read[view.base[number]] and view.names[number] not in preserve
    }
    sums = []
    for end in sorted(unread):
        number = matcher.source(end, 0) if matcher.op(end) == "Reshape" else end
        name = view.names[number]
        if (
            matcher.op(number) in REDUCTIONS
            and name not in preserve
            and name not in edits.listed
            and matcher.output(number) not in edits.redirect
            and unread.issuperset(matcher.readers(number))
        ):
            edits.listed[name] = "clear"
            edits.units.append(f"unread-sum: {name}")
            sums.append(number)
    for number in _made_for(edits, sums, unread.union(sums), preserve):
        if matcher.op(number) in denied:
            edits.listed.setdefault(view.nodes[number].name, "infer")


def _made_for(
    edits: GraphEdits, sums: Iterable[int], unread: Collection[int], preserve: Collection[str]
) -> list[int]:
    """The nodes that only unread nodes read, one after another, back from sums."""
    view, matcher = edits.view, edits.matcher
    pending, gone, found = list(sums), set(unread), []
    while pending:
        for maker in matcher.makers(pending.pop()):
            name, op_type = view.names[maker], view.op_type(maker)
            if maker in gone or name in preserve or name in view.control_readers:
                continue
            if op_type is None or op_type.op_def.is_stateful:
                continue
            if gone.issuperset(matcher.readers(maker)):
                gone.add(maker)
                found.append(maker)
                pending.append(maker)
    return found
