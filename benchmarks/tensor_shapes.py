"""Shapes of the tensors of a rewritten graph or function, from those known when it was traced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2, op_def_pb2
from tensorflow.python.framework import op_def_registry

Shape = list[int] | None


class TensorShapes:
    """Looks shapes up by node and port.

    A node that a rewrite has added is not among those traced; its shapes are worked out by
    TensorFlow's shape functions from those of its inputs.
    """

    def __init__(
        self,
        nodes: Sequence[node_def_pb2.NodeDef],
        traced: Mapping[str, Sequence[Shape]],
        unknown_dimension: int,
    ) -> None:
        """Indexes a graph.

        Args:
            nodes: the nodes of the rewritten graph, or of one rewritten function.
            traced: node name -> shapes of its outputs: None for an unknown rank, -1 for an unknown
                dimension.
            unknown_dimension: what stands for an unknown dimension, the batch size.
        """
        self._nodes = {node.name: node for node in nodes}
        self._traced = traced
        self._unknown = unknown_dimension
        self._inferred: dict[str, Sequence[Shape]] = {}

    def elements(self, tensor: str) -> int | None:
        """Returns the number of elements of a tensor, None if its shape cannot be told.

        Args:
            tensor: as in the inputs of a node: "name", "name:1", in functions "name:output:0".
        """
        shape = self._shape(tensor)
        if shape is None:
            return None
        return math.prod(self._unknown if size < 0 else size for size in shape)

    def _shape(self, tensor: str) -> Shape:
        name, port = self._node_and_port(tensor)
        shapes = self._traced.get(name)
        if shapes is None:
            if name not in self._inferred:
                # A node whose inputs lead back to itself is one of an unknown shape.
                self._inferred[name] = ()
                self._inferred[name] = self._infer(name)
            shapes = self._inferred[name]
        return shapes[port] if port < len(shapes) else None

    def _node_and_port(self, tensor: str) -> tuple[str, int]:
        name, *rest = tensor.split(":")
        if len(rest) < 2:
            return name, int(rest[0]) if rest else 0
        node = self._nodes[name]
        definition = op_def_registry.get(node.op)
        if definition is None:
            return name, int(rest[1])
        first = 0
        for argument in definition.output_arg:
            if argument.name == rest[0]:
                return name, first + int(rest[1])
            first += len(list(_argument_dtypes(argument, node, definition)))
        raise ValueError(f"{tensor!r} names no output of {name!r} ({node.op})")

    def _infer(self, name: str) -> Sequence[Shape]:
        node = self._nodes.get(name)
        definition = op_def_registry.get(node.op) if node is not None else None
        if node is None or definition is None:
            return ()
        if node.op == "Cast":
            return (self._shape(node.input[0]),)
        graph_def = graph_pb2.GraphDef()
        copy = graph_def.node.add()
        copy.CopyFrom(node)
        copy.ClearField("input")
        # Colocation with nodes that are not in the small graph would stop the import.
        copy.attr.pop("_class", None)
        dtypes = _dtypes(definition.input_arg, node, definition)
        tensors = (tensor for tensor in node.input if not tensor.startswith("^"))
        for number, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=False)):
            source = graph_def.node.add()
            producer = self._nodes.get(tensor.split(":")[0])
            if producer is not None and producer.op == "Const":
                source.CopyFrom(producer)
                source.ClearField("input")
            else:
                source.op = "Placeholder"
                source.attr["dtype"].type = dtype
                shape = self._shape(tensor)
                source.attr["shape"].shape.CopyFrom(tf.TensorShape(_dimensions(shape)).as_proto())
            source.name = f"input_{number}"
            copy.input.append(source.name)
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(graph_def, name="")
            outputs = graph.get_operation_by_name(name).outputs
            return [_as_list(output.shape) for output in outputs]


def _dimensions(shape: Shape) -> list[int | None] | None:
    return None if shape is None else [None if size < 0 else size for size in shape]


def _as_list(shape: tf.TensorShape) -> Shape:
    return None if shape.rank is None else [-1 if size is None else size for size in shape]


def static_shapes(
    traced: Mapping[str, Sequence[Shape]],
) -> Callable[[str], tuple[tuple[int | None, ...] | None, ...]]:
    """Returns the shapes of tracing in the form in which the pass asks for them.

    Args:
        traced: as for `TensorShapes`.
    """

    def shapes_of(node: str) -> tuple[tuple[int | None, ...] | None, ...]:
        return tuple(
            None if shape is None else tuple(None if size < 0 else size for size in shape)
            for shape in traced.get(node, ())
        )

    return shapes_of


def body_shapes(
    functions: Iterable[function_pb2.FunctionDef], traced: Mapping[str, Mapping[str, Any]]
) -> Callable[[str], Callable[[str], tuple[tuple[int | None, ...] | None, ...]]]:
    """The same for the bodies of functions, by the function's name.

    Args:
        functions: their definitions.
        traced: function name -> node name -> shapes of its outputs.
    """
    arguments = {function.signature.name: argument_shapes(function) for function in functions}
    return lambda name: static_shapes({**traced.get(name, {}), **arguments.get(name, {})})


def argument_shapes(function: function_pb2.FunctionDef) -> dict[str, list[Shape]]:
    """Returns the shapes that tracing has noted at a function's arguments, by argument name.

    A FunctionDef gives its arguments names of its own, so that they are not found among the nodes
    that were traced.
    """
    found: dict[str, list[Shape]] = {}
    for number, argument in enumerate(function.signature.input_arg):
        attrs = function.arg_attr[number].attr if number in function.arg_attr else {}
        if "_output_shapes" in attrs:
            shapes = attrs["_output_shapes"].list.shape
            found[argument.name] = [_as_list(tf.TensorShape(shape)) for shape in shapes]
    return found


def _dtypes(
    arguments: Sequence[op_def_pb2.OpDef.ArgDef],
    node: node_def_pb2.NodeDef,
    definition: op_def_pb2.OpDef,
) -> Iterator[int]:
    for argument in arguments:
        yield from _argument_dtypes(argument, node, definition)


def _argument_dtypes(
    argument: op_def_pb2.OpDef.ArgDef, node: node_def_pb2.NodeDef, definition: op_def_pb2.OpDef
) -> Iterator[int]:
    if argument.type_list_attr:
        yield from _attr(argument.type_list_attr, node, definition).list.type
        return
    count = _attr(argument.number_attr, node, definition).i if argument.number_attr else 1
    dtype = argument.type or _attr(argument.type_attr, node, definition).type
    yield from [dtype] * count


def _attr(name: str, node: node_def_pb2.NodeDef, definition: op_def_pb2.OpDef) -> Any:
    if name in node.attr:
        return node.attr[name]
    return next(attr.default_value for attr in definition.attr if attr.name == name)
