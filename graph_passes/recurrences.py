"""Loops of TensorFlow 1 (Enter, Merge, NextIteration, Exit) and reads of its ref variables."""

from __future__ import annotations

from graph_passes.canvas import Canvas
from graph_passes.reasons import Reason
from graph_passes.view import GraphView, InvalidGraphError

_REF_VARIABLES = frozenset(("Variable", "VariableV2"))


def ref_variable_readers(view: GraphView) -> list[int]:
    """The nodes that read a non-resource variable: an Identity of it, or that Identity's Enter.

    Converting such a node would put the low-precision value where savers, summaries and, for an
    Enter, assignments inside the loop expect the variable itself.
    """
    if view.ops.isdisjoint(_REF_VARIABLES):
        return []
    return [number for number in view.of_op("Identity", "Enter") if _reads_ref(view, number)]


def _reads_ref(view: GraphView, number: int) -> bool:
    node = view.nodes[number]
    while node.op in ("Identity", "Enter") and node.input:
        producer = view.index.get(view.split(node.input[0])[0])
        if producer is None:
            return False
        source = view.nodes[producer]
        if node.op == "Identity":
            return source.op in _REF_VARIABLES
        node = source
    return False


def match_loop_edges(canvas: Canvas) -> None:
    """Gives both ends of every loop's back edge one colour.

    A NextIteration and all the Merge nodes it feeds go low together or not at all.

    Raises:
        InvalidGraphError: something else than a Merge reads a NextIteration.
    """
    view = canvas.view
    for number in view.of_op("NextIteration"):
        back = view.base[number] + view.layout(number).out_slots[0]
        if not view.is_float[back]:
            continue
        merges = view.readers(back)
        for merge in merges:
            if view.op_of(merge) != "Merge":
                raise InvalidGraphError(
                    f"{view.op_of(merge) or 'an unknown op'} reads the NextIteration node "
                    f"{view.nodes[number].name!r}; only a Merge may"
                )
        if all(canvas.low[merge] for merge in merges):
            canvas.paint((back,), Reason.LOOP_EDGE)
        else:
            canvas.erase((*merges, back), Reason.LOOP_MISMATCH)
