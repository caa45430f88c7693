"""Loops of TensorFlow 1 (Enter, Merge, NextIteration, Exit) and reads of its ref variables."""

from __future__ import annotations

from graph_passes.coloring.state import Coloring
from graph_passes.ir.adjacency import walk
from graph_passes.ir.graph_view import GraphView
from graph_passes.ops.reasons import Reason
from graph_passes.policy.op_classes import ops_of
from graph_passes.rewriter.matcher import SHAPERS

_REF_VARIABLES = ops_of("ref_variables")
SHARES = (*SHAPERS, "Enter", "Switch")
"""Ops whose output is the memory of their first input, and changes with it."""


def ref_variable_readers(view: GraphView, *, parity: bool) -> list[int]:
    """The nodes that share the memory of a non-resource variable.

    Converting such a node would put the low-precision value where savers, summaries and
    assignments in loops expect the variable itself, and an old one before what reads it again
    behind an assignment. TensorFlow's pass, which is followed in parity, looks no further than an
    Identity of the variable and that Identity's Enter.
    """

    def readers(number: int, *ops: str) -> list[int]:
        return [n for n in view.reading_nodes(number) if view.op_names[n] in ops]

    first, further = (("Identity",), ("Enter",)) if parity else (SHARES, SHARES)
    copies = [n for number in view.of_op(*_REF_VARIABLES) for n in readers(number, *first)]
    return sorted(walk(copies, lambda number: readers(number, *further)))


def back_edges(view: GraphView) -> list[list[int]]:
    """For each NextIteration the vertex of what it gives, and those that read it."""
    made = [view.base[number] for number in view.of_op("NextIteration")]
    return [[vertex, *view.readers(vertex)] for vertex in made]


def match_loop_edges(coloring: Coloring) -> None:
    """Gives both ends of every loop's back edge one colour.

    A NextIteration and all the Merge nodes it feeds go low together or not at all. Other nodes may
    read it too, once TensorFlow has taken away the Merge of a loop that never runs; they are free
    to read it through a Cast.
    """
    view = coloring.view
    for back, *readers in back_edges(view):
        if not view.is_float[back]:
            continue
        merges = [reader for reader in readers if view.op_of(reader) == "Merge"]
        if all(coloring.low[merge] for merge in merges):
            coloring.paint((back,), Reason.LOOP_EDGE)
        else:
            coloring.erase((*merges, back), Reason.LOOP_MISMATCH)
