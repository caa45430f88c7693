"""Constants that float16 cannot hold, and products of integers.

A mask of -1e9 becomes -inf in float16, and an epsilon of 1e-8 becomes 0. A layer of int8 adds up
products of up to 127 * 127 as int32, five of which may be beyond 65504, and divides what `Cast`
makes of the sum by its scales. Ops that read such a number stay float32, and so does what they
compute, as if they were on the deny list. bfloat16 has nearly float32's range
(`units.attention.bounded_constants`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from tensorflow.core.framework import tensor_pb2, types_pb2

from graph_passes.coloring.state import Coloring
from graph_passes.coloring.ways import MATRIX_PRODUCTS
from graph_passes.ir.constants import largest_stored, stored_floats
from graph_passes.ir.graph_view import GraphView
from graph_passes.ops.reasons import Reason
from graph_passes.rewriter.matcher import MOVES

LARGEST = float(np.finfo(np.float16).max)
SMALLEST = float(np.finfo(np.float16).smallest_subnormal)
SMALL_TENSOR = 16
"""Tensors of up to this many elements are looked at for values that would become 0. In a larger
one (a weight matrix) a few values so near to 0 carry no meaning of their own."""
_WIDE = (types_pb2.DT_INT32, types_pb2.DT_INT64)


def deny_out_of_range(coloring: Coloring) -> None:
    """Denies the readers of numbers out of range, from which the colour then flows forward."""
    view = coloring.view
    could_go_low = (coloring.list_codes > 0) & coloring.eligible
    matters = np.zeros(len(view.dtypes), bool)
    matters[view.sources[could_go_low[view.targets]]] = True
    found = [n for n, tensor in view.float_constants(matters) if is_out_of_range(tensor)]
    made = [*(view.base[n] for n in found), *_integer_products(view)]
    roots = [reader for vertex in made for reader in view.readers(vertex) if could_go_low[reader]]
    coloring.deny(roots, Reason.CONSTANT_RANGE)
    coloring.out_of_range = roots


def _integer_products(view: GraphView) -> Iterator[int]:
    """The floats that are made of products of integers, by the vertices that hold them."""
    for number in view.of_op("Cast"):
        node_type, layout = view.node_type(number), view.layout(number)
        if node_type.dtypes[layout.in_slots[0]] in _WIDE:
            maker = view.makers(number)[0]
            while maker >= 0 and view.op_names[maker] in MOVES:
                maker = view.makers(maker)[0]
            if maker >= 0 and view.op_names[maker] in MATRIX_PRODUCTS:
                yield view.base[number] + layout.out_slots[0]


def is_out_of_range(tensor: tensor_pb2.TensorProto) -> bool:
    """Whether float16 would turn a finite value into infinity, or a small constant into 0."""
    if largest_stored(tensor) > LARGEST:
        return True
    stored = stored_floats(tensor)
    return len(stored) <= SMALL_TENSOR and any(0 < abs(value) < SMALLEST for value in stored)
