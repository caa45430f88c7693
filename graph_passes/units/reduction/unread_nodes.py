"""What nothing reads in a function: gradients that nobody asked for, say.

TensorFlow leaves it out as well, but only after the rewrite: until then its products and casts
would have prices that nobody pays, and decide what others are.
"""

from __future__ import annotations

from graph_passes.ops.node_types import NodeType
from graph_passes.units.unit_pass import UnitSearch

RULE = "unread"


def leave_out_unread_nodes(search: UnitSearch) -> None:
    """Takes them out of a function; of a graph, anything may be fetched.

    Calls stay, since what they call was found before.
    """
    view = search.edits.view
    if view.is_function:
        search.edits = search.edits.without_unread(view.of_node_type(_runs_functions))


def _runs_functions(node_type: NodeType) -> bool:
    return node_type.op_type is not None and node_type.op_type.runs_functions
