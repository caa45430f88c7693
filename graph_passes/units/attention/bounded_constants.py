"""Constants a little beyond what bfloat16 holds.

bfloat16 ends at 3.39e38, float32 at 3.40e38: `float32.min`, which many masks are made with,
becomes -inf when it is rounded, and 0 times that, or a softmax of nothing else, NaN. Such a
constant becomes bfloat16's least or largest number for all its readers, so that what they make of
it in float32 can be cast down as well. To a softmax or a maximum it says the same.
"""

from __future__ import annotations

import numpy as np
from tensorflow.python.framework import dtypes

from graph_passes.ir.stored_floats import largest_stored
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.unit_pass import UnitSearch

RULE = "bounded-constant"
OPS = ("Const",)
_LARGEST = float(dtypes.as_dtype("bfloat16").max)


def bound_constants(search: UnitSearch) -> None:
    """Puts numbers that bfloat16 holds in the place of those that it does not."""
    if search.is_float16:
        return  # which has other numbers for masks (`mask`), and stays away from large constants
    edits, view = search.edits, search.edits.view
    for number, tensor in view.float_constants(view.is_float):
        if number not in edits.kept and largest_stored(tensor) > _LARGEST:
            edits.propose(RULE, number, _write, number)


def _write(new: Replacement, number: int) -> None:
    m = new.matcher
    value = m.constant(m.output(number))
    bounded = np.where(np.isinf(value), value, np.clip(value, -_LARGEST, _LARGEST))
    new.replace(number, new.constant(bounded, name="bounded", beside=m.output(number)))
