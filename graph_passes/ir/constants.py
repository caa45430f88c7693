"""Constants: what they store, and arguments that are ones."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from tensorflow.core.framework import tensor_pb2


class Constant(NamedTuple):
    """A tensor that is the same whenever a graph runs.

    Attributes:
        shape: its shape.
        read: gives the values of a float32 one, of which a last one may stand for all that follow.
    """

    shape: tuple[int, ...]
    read: Callable[[], Sequence[float] | np.ndarray]


Constants = Mapping[str, Constant]
"""The arguments of a function that are constants, by their names."""

FunctionConstants = Callable[[str], Constants]
"""Gives for a function's name those of its arguments that are constants."""

NO_CONSTANTS: Constants = types.MappingProxyType({})


def no_constants(_: str) -> Constants:
    """The arguments of functions that are constants where none are known."""
    return NO_CONSTANTS


def shape_of(tensor: tensor_pb2.TensorProto) -> tuple[int, ...]:
    """The shape of a stored tensor."""
    return tuple(dim.size for dim in tensor.tensor_shape.dim)


def stored_floats(tensor: tensor_pb2.TensorProto) -> Sequence[float] | np.ndarray:
    """The numbers as they are stored: a last one may stand for all that follow."""
    content = tensor.tensor_content  # each time it is asked for, it is copied
    return np.frombuffer(content, "<f4") if content else tensor.float_val


def largest_stored(tensor: tensor_pb2.TensorProto) -> float:
    """The largest absolute value of the finite numbers, 0 without any."""
    stored = stored_floats(tensor)
    if not isinstance(stored, np.ndarray):  # nearly all constants: spare them an array
        return max((abs(value) for value in stored if math.isfinite(value)), default=0.0)
    largest = max(stored.max(initial=0.0), -stored.min(initial=0.0))
    if not math.isfinite(largest):  # without a copy of all the weights of a frozen model
        largest = np.abs(stored[np.isfinite(stored)]).max(initial=0.0)
    return float(largest)
