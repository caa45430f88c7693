"""Constants a little beyond what bfloat16 holds.

bfloat16 ends at 3.39e38, float32 at 3.40e38: `float32.min`, which many masks are made with,
becomes -inf when it is rounded, and 0 times that, or a softmax of nothing else, NaN. Such a
constant becomes bfloat16's least or largest number for all its readers, so that what they make of
it in float32 can be cast down as well. To a softmax or a maximum it says the same, but not where it
comes as it is to a comparison, to a variable or to another function: there it may mark what is
missing.
"""

from __future__ import annotations

import numpy as np
from tensorflow.python.framework import dtypes

from graph_passes.ir.adjacency import walk
from graph_passes.ir.constants import largest_stored
from graph_passes.ir.graph_view import FLOAT, RESULT
from graph_passes.rewriter.editor import GraphEdits
from graph_passes.rewriter.matcher import MOVES, SELECTS, SIZES, SPREADS
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.unit_pass import UnitSearch

RULE = "bounded-constant"
OPS = ("Const",)
_LARGEST = float(dtypes.as_dtype("bfloat16").max)
_HANDS_ON = frozenset(
    (
        *(*MOVES, *SPREADS, *SELECTS, "Fill", "ConcatV2", "Pack", "PadV2", "GatherV2"),
        *("Slice", "StridedSlice", "Maximum", "Minimum", "ClipByValue", "Max", "Min"),
    )
)
"""Ops of whose results an element may be one of what they read, as it is."""
_BLIND = frozenset((*SIZES, "ArgMax", "ArgMin"))
"""Ops that say the same of a number a little less, though they give none."""


def bound_constants(search: UnitSearch) -> None:
    """Puts numbers that bfloat16 holds in the place of those that it does not."""
    if search.is_float16:
        return  # which has other numbers for masks (`mask`), and stays away from large constants
    edits, view = search.edits, search.edits.view
    for number, tensor in view.float_constants(view.is_float):
        if largest_stored(tensor) > _LARGEST and not _may_mark(edits, number):
            edits.propose(RULE, number, _write, number)


def _may_mark(edits: GraphEdits, constant: int) -> bool:
    """Whether a constant comes as it is to what tells it from a number a little less."""
    m, view = edits.matcher, edits.view

    def readers(number: int) -> list[int]:
        hands_on = number == constant or m.ops[number] in _HANDS_ON
        return [r for r in m.readers(number) if m.ops[r] not in _BLIND] if hands_on else []

    def tells(number: int) -> bool:
        slots = view.layout(number).out_slots
        if not slots:
            return m.ops[number] != RESULT
        is_float = view.dtypes[view.base[number] + slots[0]] == FLOAT
        return not is_float or view.node_type(number).runs_functions

    return any(map(tells, walk([constant], readers)))


def _write(new: Replacement, number: int) -> None:
    m = new.matcher
    value = m.constant(m.output(number))
    bounded = np.where(np.isinf(value), value, np.clip(value, -_LARGEST, _LARGEST))
    new.replace(number, new.constant(bounded, name="bounded", beside=m.output(number)))
