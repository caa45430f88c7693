"""Constants that only converted ops read are stored in the target dtype: no Cast is left of them.

TensorFlow's constant folding would do the same to a Cast of a constant when the graph first runs.
Done here, a graph that is stored (a frozen model) holds its weights in half the bytes, and what
reads the graph sees the Casts that cost something and no others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from tensorflow.core.framework import tensor_pb2
from tensorflow.python.framework import dtypes

from graph_passes.coloring.state import CLEAR, Coloring
from graph_passes.ops.reasons import Reason

_LARGE = 4096
"""Elements above which a constant counts as large."""


def paint_constants(coloring: Coloring) -> None:
    """Paints each float32 constant all of whose readers are painted.

    A reader on the clear list that nothing reads in turn, as frozen graphs have them, follows.
    """
    view, low = coloring.view, coloring.low
    read_low = np.zeros(len(low), bool)
    read_low[view.sources[coloring.is_low[view.targets]]] = True
    for number, _ in view.float_constants(coloring.eligible & read_low):
        made = view.base[number]
        float32 = [reader for reader in view.readers(made) if not low[reader]]
        if all(_is_idle(coloring, reader) for reader in float32):
            coloring.paint((made, *float32), Reason.FOLDED_CONSTANT)


def _is_idle(coloring: Coloring, vertex: int) -> bool:
    return bool(
        coloring.list_codes[vertex] == CLEAR
        and coloring.eligible[vertex]
        and not coloring.view.reading_nodes(coloring.view.vertex_nodes[vertex])
        and coloring.has_kernel[vertex]
    )


def is_large(tensor: tensor_pb2.TensorProto) -> bool:
    """Whether a tensor has so many elements that one more copy of it takes time."""
    return math.prod(dim.size for dim in tensor.tensor_shape.dim) > _LARGE


def convert_tensors(
    tensors: Iterable[tuple[tensor_pb2.TensorProto, tensor_pb2.TensorProto]], target: int
) -> None:
    """Fills tensors with the values of stored float32 tensors, rounded to another dtype.

    Values are rounded to the nearest, ties to even, as the Cast kernel does; a tensor of equal
    values that stores only one of them still does.

    Args:
        tensors: pairs of a stored tensor, which is not changed, and one that receives shape and
            values instead of its own.
        target: the dtype that these get, float16 or bfloat16.
    """
    dtype = dtypes.as_dtype(target).as_numpy_dtype
    with np.errstate(over="ignore"):  # infinity is what the Cast kernel gives, too
        for stored, low in tensors:
            low.Clear()
            low.dtype = target
            low.tensor_shape.CopyFrom(stored.tensor_shape)
            content = stored.tensor_content  # each time it is asked for, it is copied
            if content:
                low.tensor_content = np.frombuffer(content, "<f4").astype(dtype).tobytes()
            else:
                values = np.array(stored.float_val[:], np.float32).astype(dtype)
                low.half_val.extend(values.view(np.uint16).tolist())
