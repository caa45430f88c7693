"""Devices of the variables that traced functions use."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.types import core

if TYPE_CHECKING:
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
        body, signature = graph, definition.signature
        if name != signature.name:
            function = graph._functions.get(name)
            body = getattr(function, "graph", None)
            if body is None:
                return {}
            signature = function.cached_definition.signature
        if len(signature.input_arg) != len(body.inputs):
            return {}
        return {
            argument.name: _device_of(tensor, outside)
            for argument, tensor in zip(signature.input_arg, body.inputs, strict=True)
            if tensor.dtype == tf.resource
        }

    return lambda function, argument: of(function).get(argument) or f"of {function} {argument}"


def _device_of(tensor: Any, outside: Any) -> str:
    while not isinstance(tensor, core.Value):
        if tensor.op.type != "Placeholder":
            return str(tensor.op.device)
        captured = outside(tensor.graph).get(id(tensor))
        if captured is None:
            return ""
        tensor = captured
    return str(tensor.device)


def _outside(graph: Any) -> Mapping[int, Any]:
    """By the id of what a graph has inside: what it captures."""
    return {id(inside): outside for outside, inside in getattr(graph, "captures", ())}
