"""Constants that float16 cannot hold.

A mask of -1e9 becomes -inf in float16, and an epsilon of 1e-8 becomes 0. Ops that read such a
constant stay float32, and so does what they compute, as if they were on the deny list. bfloat16
has nearly float32's range (`units.attention.bounded_constants`).
"""

from __future__ import annotations

import numpy as np
from tensorflow.core.framework import tensor_pb2

from graph_passes.coloring.state import Coloring
from graph_passes.ir.constants import largest_stored, stored_floats
from graph_passes.ops.reasons import Reason

LARGEST = float(np.finfo(np.float16).max)
SMALLEST = float(np.finfo(np.float16).smallest_subnormal)
SMALL_TENSOR = 16
"""Tensors of up to this many elements are looked at for values that would become 0. In a larger
one (a weight matrix) a few values so near to 0 carry no meaning of their own."""


def deny_out_of_range(coloring: Coloring) -> None:
    """Denies the readers of constants out of range, from which the colour then flows forward."""
    view = coloring.view
    could_go_low = (coloring.list_codes > 0) & coloring.eligible
    matters = np.zeros(len(view.dtypes), bool)
    matters[view.sources[could_go_low[view.targets]]] = True
    roots: list[int] = []
    for number, tensor in view.float_constants(matters):
        if is_out_of_range(tensor):
            read = view.readers(view.base[number])
            roots.extend(reader for reader in read if could_go_low[reader])
    coloring.deny(roots, Reason.CONSTANT_RANGE)
    coloring.out_of_range = roots


def is_out_of_range(tensor: tensor_pb2.TensorProto) -> bool:
    """Whether float16 would turn a finite value into infinity, or a small constant into 0."""
    if largest_stored(tensor) > LARGEST:
        return True
    stored = stored_floats(tensor)
    return len(stored) <= SMALL_TENSOR and any(0 < abs(value) < SMALLEST for value in stored)
