"""What float16 can hold of a constant."""

from __future__ import annotations

import math

import numpy as np
from tensorflow.core.framework import tensor_pb2

LARGEST = 65504.0
"""The largest finite float16."""
SMALLEST = 2.0**-24
"""The smallest float16 above 0 (a subnormal)."""
SMALL_TENSOR = 16
"""Tensors of up to this many elements are looked at for values that would become 0. In a larger
one (a weight matrix) a few values so near to 0 carry no meaning of their own."""


def is_out_of_range(tensor: tensor_pb2.TensorProto) -> bool:
    """Whether float16 would turn a finite value into infinity, or a small constant into 0."""
    content = tensor.tensor_content
    if not content and len(tensor.float_val) == 1:  # nearly all constants: spare them an array
        size = abs(tensor.float_val[0])
        return LARGEST < size < math.inf or 0 < size < SMALLEST
    stored = np.frombuffer(content, "<f4") if content else np.array(tensor.float_val, np.float32)
    largest = max(abs(stored.max(initial=0.0)), abs(stored.min(initial=0.0)))
    if not math.isfinite(largest):
        largest = np.abs(stored[np.isfinite(stored)]).max(initial=0.0)
    if largest > LARGEST:
        return True
    if stored.size > SMALL_TENSOR:
        return False
    sizes = np.abs(stored)
    return bool(((sizes > 0) & (sizes < SMALLEST)).any())
