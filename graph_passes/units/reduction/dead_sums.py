"""Sums that nothing reads, such as the gradient of the constant in a Select.

Automatic differentiation makes a gradient for every operand, constants included, and sums it to
the shape of the operand. TensorFlow drops what nothing reads before the graph runs, but only after
the rewrite: until then such a sum would deny, and ask for a Cast that is dropped with it; and so
would what makes only the sum, such as the squares in the gradient of a swish for its constant.
"""

from __future__ import annotations

from collections.abc import Collection

from graph_passes.rewriter.editor import GraphEdits

RULE = "unread-sum"
REDUCTIONS = ("Sum", "Mean")


def pass_unread_sums(edits: GraphEdits, denied: Collection[str]) -> None:
    """Lets sums of which nothing comes, and what makes them alone, take whatever dtype comes.

    In a graph of which nobody has said what is fetched, everything may be.

    Args:
        edits: receives the lists.
        denied: the ops of the deny list.
    """
    view = edits.view
    if not (edits.kept or view.is_function):
        return
    for number in sorted(edits.unread.now()):
        name, op = view.names[number], view.op_names[number]
        output = edits.matcher.output(number)
        is_free = name not in edits.node_lists and output not in edits.redirect
        if op in REDUCTIONS and is_free:
            edits.propose(
                RULE,
                number,
                lambda new, name=name: new.node_lists.update({name: "clear"}),  # type: ignore[misc]
            )
        elif op in denied:
            edits.node_lists.setdefault(name, "infer")
