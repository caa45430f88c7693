"""What traced functions capture: the devices of variables, and tensors that were made before."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.types import core

from graph_passes.ir.constants import Constant

if TYPE_CHECKING:
    import numpy as np

    from graph_passes.ir.constants import Constants, FunctionConstants
    from graph_passes.ir.graph_view import FunctionDevices


def variable_devices(graph: Any, definition: Any) -> FunctionDevices:
    """Returns a function that gives the device of a variable by a function and its argument.

    A variable that a function captures is followed to the eager tensor that stands for it, through
    the functions in which this one is traced.

    Args:
        graph: the FuncGraph that was traced.
        definition: the FunctionDef that TensorFlow made of it.

    Returns:
        A function that gives the full name of the device. For an argument that is no capture it
        gives a name that no other argument has: nothing shows that the two are on one device.
    """
    outside = functools.cache(_outside)

    @functools.cache
    def of(name: str) -> Mapping[str, str]:
        return {
            argument: _device_of(tensor, outside)
            for argument, tensor in _arguments(graph, definition, name)
            if tensor.dtype == tf.resource
        }

    return lambda function, argument: of(function).get(argument) or f"of {function} {argument}"


def captured_constants(graph: Any, definition: Any) -> FunctionConstants:
    """Returns a function that gives the arguments of a function that are eager tensors it captures.

    These are tables that a program makes once, and weights that are no variables.

    Args:
        graph: the FuncGraph that was traced.
        definition: the FunctionDef that TensorFlow made of it.
    """
    outside = functools.cache(_outside)

    def of(name: str) -> Constants:
        return {
            argument: Constant(tuple(value.shape), functools.partial(_values, value))
            for argument, tensor in _arguments(graph, definition, name)
            if tensor.dtype != tf.resource and _is_table(value := _origin(tensor, outside))
        }

    return of


def _arguments(graph: Any, definition: Any, name: str) -> Iterable[tuple[str, Any]]:
    """The arguments of a function or of one that it calls, with their tensors inside."""
    body, signature = graph, definition.signature
    if name != signature.name:
        function = graph._functions.get(name)
        body = getattr(function, "graph", None)
        if body is None:
            return ()
        signature = function.cached_definition.signature
    if len(signature.input_arg) != len(body.inputs):
        return ()
    names = (argument.name for argument in signature.input_arg)
    return zip(names, body.inputs, strict=True)


def _is_table(tensor: Any) -> bool:
    # What several devices hold together, as DTensor has it, cannot be read.
    return isinstance(tensor, core.Value) and "CUSTOM" not in tensor.device


def _values(tensor: Any) -> np.ndarray:
    return tensor.numpy().ravel()  # type: ignore[no-any-return]


def _device_of(tensor: Any, outside: Any) -> str:
    origin = _origin(tensor, outside)
    if isinstance(origin, core.Value):
        return str(origin.device)
    return "" if origin.op.type == "Placeholder" else str(origin.op.device)


def _origin(tensor: Any, outside: Any) -> Any:
    """What a tensor stands for, captured through the graphs in which it is traced."""
    while not isinstance(tensor, core.Value):
        captured = outside(tensor.graph).get(id(tensor))
        if captured is None:
            break
        tensor = captured
    return tensor


def _outside(graph: Any) -> Mapping[int, Any]:
    """By the id of what a graph has inside: what it captures."""
    return {id(inside): outside for outside, inside in getattr(graph, "captures", ())}
