"""What nothing reads: gradients that nobody asked for, or of the constant in a Select.

Automatic differentiation makes a gradient for every operand, constants included, and sums it to
the shape of the operand. TensorFlow leaves out what nothing reads, but only after the rewrite:
until then such products and casts would have prices that nobody pays, and decide what others are;
and such a sum would deny, as would what makes only the sum, such as the squares in the gradient of
a swish for its constant.
"""

from __future__ import annotations

from graph_passes.rewriter.surgery import Unread, leave_out_unread
from graph_passes.units.unit_pass import UnitSearch

NODES = "unread"
SUMS = "unread-sum"
REDUCTIONS = ("Sum", "Mean")


def leave_out_unread_nodes(search: UnitSearch) -> None:
    """Takes what nothing reads out of a function; of a graph, anything may be fetched.

    Calls stay, since what they call was found before.
    """
    edits, view = search.edits, search.edits.view
    if view.is_function:
        kept = edits.kept.union(view.of_node_type(lambda node_type: node_type.runs_functions))
        search.edits = edits.onto(leave_out_unread(view, Unread(view, kept)))


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
            search.list_nodes(SUMS, number, (name,), "clear")
        elif op in denied:
            edits.node_lists.setdefault(name, "infer")
