"""Sums that nothing reads, such as the gradient of the constant in a Select.

Automatic differentiation makes a gradient for every operand, constants included, and sums it to
the shape of the operand. TensorFlow drops what nothing reads before the graph runs, but only after
the rewrite: until then such a sum would deny, and ask for a Cast that is dropped with it.
"""

from __future__ import annotations

from collections.abc import Collection

from graph_passes.patterns.edits import GraphEdits
from graph_passes.patterns.matching import Matcher

_REDUCTIONS = ("Sum", "Mean")


def pass_unread_sums(edits: GraphEdits, preserve: Collection[str]) -> None:
    """Lets sums that nothing reads take whatever dtype comes.

    In a graph of which nobody has said what is fetched, everything may be.

    Args:
        edits: receives the lists and the units.
        preserve: names of nodes that are fetched or run.
    """
    view = edits.view
    if not (preserve or view.is_function):
        return
    matcher = Matcher(view)
    for number, op_type in enumerate(view.op_types):
        if op_type is None or op_type.name not in _REDUCTIONS:
            continue
        name = view.nodes[number].name
        known = name in edits.listed or matcher.output(number) in edits.redirect
        if known or not _is_unread(matcher, number, preserve):
            continue
        edits.listed[name] = "clear"
        edits.units.append(f"unread-sum: {name}")


def _is_unread(matcher: Matcher, number: int, preserve: Collection[str]) -> bool:
    """Whether nothing reads a node, or only a Reshape that nothing reads."""
    if matcher.node(number).name in preserve:
        return False
    return all(
        matcher.op(reader) == "Reshape"
        and matcher.node(reader).name not in preserve
        and not matcher.readers(reader)
        for reader in matcher.readers(number)
    )
