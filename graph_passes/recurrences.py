"""Loops of TensorFlow 1 (Enter, Merge, NextIteration, Exit) and reads of its ref variables."""

from __future__ import annotations

from graph_passes.canvas import Canvas
from graph_passes.reasons import Reason
from graph_passes.view import GraphView, InvalidGraphError

_REF_VARIABLES = frozenset(("Variable", "VariableV2"))


def reads_ref_variable(view: GraphView, number: int) -> bool:
    """Whether a node reads a non-resource variable: an Identity of it, or that Identity's Enter.

    Converting such a node would put the low-precision value where savers, summaries and, for an
    Enter, assignments inside the loop expect the variable itself.
    """
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
    for number, op_type in enumerate(view.op_types):
        if op_type is None or op_type.name != "NextIteration":
            continue
        back = view.base[number] + view.layouts[number].out_slots[0]
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
