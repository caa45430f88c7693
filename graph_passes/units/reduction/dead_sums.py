"""Sums that nothing reads, such as the gradient of the constant in a Select.

Automatic differentiation makes a gradient for every operand, constants included, and sums it to
the shape of the operand. TensorFlow drops what nothing reads before the graph runs, but only after
the rewrite: until then such a sum would deny, and ask for a Cast that is dropped with it; and so
would what makes only the sum, such as the squares in the gradient of a swish for its constant.
"""

from __future__ import annotations

from graph_passes.units.unit_pass import UnitSearch

RULE = "unread-sum"
REDUCTIONS = ("Sum", "Mean")


def pass_unread_sums(search: UnitSearch) -> None:
    """Lets sums of which nothing comes, and what makes them alone, take whatever dtype comes.

    In a graph of which nobody has said what is fetched, everything may be.
    """
    edits, view, denied = search.edits, search.edits.view, search.lists.ops("deny")
    if not (edits.kept or view.is_function):
        return
    for number in sorted(edits.unread.now()):
        name, op = view.names[number], view.op_names[number]
        # Others may have no output at all.
        is_free = op in REDUCTIONS and name not in edits.node_lists
        if is_free and edits.matcher.output(number) not in edits.redirect:
            search.list_nodes(RULE, number, (name,), "clear")
        elif op in denied:
            edits.node_lists.setdefault(name, "infer")
