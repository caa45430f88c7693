"""Loops of TensorFlow 1 (Enter, Merge, NextIteration, Exit) and reads of its ref variables."""

from __future__ import annotations

from graph_passes.coloring.state import Coloring
from graph_passes.ir.adjacency import walk
from graph_passes.ir.graph_view import GraphView
from graph_passes.ops.reasons import Reason

_REF_VARIABLES = frozenset(("Variable", "VariableV2"))


def ref_variable_readers(view: GraphView) -> list[int]:
    """The nodes that read a non-resource variable: an Identity of it, or that Identity's Enter.

    Converting such a node would put the low-precision value where savers, summaries and, for an
    Enter, assignments inside the loop expect the variable itself.
    """

    def readers(number: int, op: str) -> list[int]:
        return [n for n in view.reading_nodes(number) if view.op_names[n] == op]

    copies = [n for number in view.of_op(*_REF_VARIABLES) for n in readers(number, "Identity")]
    return sorted(walk(copies, lambda number: readers(number, "Enter")))


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
