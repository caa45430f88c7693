"""Small graphs written as text, in Python's own syntax: one line a node.

    x = Const(0.5, [32, 32])                  # value and shape; the dtype is that of the value
    w = VariableV2(dtype=float32, shape=[32, 32])
    y = MatMul(x, w, transpose_b=True) @ "/device:CPU:0"
    parts = Split(0, y, num_split=2)          # a number is a Const of its own
    z = AddV2(parts[0], parts[1], after=[x])  # an output port; a control input

    def square(a: float32):                   # a function of the library
        b = MatMul(a, a)
        return b

    s = PartitionedCall(z, Tout=[float32], f=square)
    t = square(s)

Type attributes and counts follow from the inputs, other attributes from the op's definition,
unless they are given. A node may read one of a later line (the back edge of a loop) where its
type attributes follow from its other inputs.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import (
    attr_value_pb2,
    function_pb2,
    graph_pb2,
    node_def_pb2,
    op_def_pb2,
    tensor_shape_pb2,
    types_pb2,
)
from tensorflow.python.framework import dtypes, op_def_registry, tensor_util

from graph_passes.ir.graph_view import Shape, Shapes

REFERENCE = 100
"""A reference to a variable has the variable's dtype plus this."""


def inferred_shapes(graph_def: graph_pb2.GraphDef) -> Shapes:
    """The shapes that TensorFlow infers."""
    with tf.Graph().as_default() as imported:
        tf.graph_util.import_graph_def(graph_def, name="")

    def shapes(name: str) -> tuple[Shape | None, ...]:
        outputs = imported.get_operation_by_name(name).outputs
        return tuple(None if o.shape.rank is None else tuple(o.shape.as_list()) for o in outputs)

    return shapes


def graph(text: str) -> graph_pb2.GraphDef:
    """The GraphDef that a text describes.

    Raises:
        SyntaxError: a line is not of the form `name = Op(inputs, attr=value) @ "device"`.
        ValueError: an op is unknown, or an attribute neither given nor to be inferred.
    """
    result = graph_pb2.GraphDef()
    result.versions.producer = 2000
    signatures: dict[str, op_def_pb2.OpDef] = {}
    body = []
    for statement in ast.parse(textwrap.dedent(text)).body:
        if isinstance(statement, ast.FunctionDef):
            function = _function(statement, signatures)
            signatures[statement.name] = function.signature
            result.library.function.append(function)
        else:
            body.append(statement)
    reader = _Reader(signatures, in_function=False)
    reader.add_all(body)
    result.node.extend(reader.nodes)
    return result


def lines(graph_def: graph_pb2.GraphDef) -> str:
    """A graph as text to read: name, op, inputs and dtypes of each node."""
    return "\n".join(
        f"{node.name} = {node.op}({', '.join(node.input)}) "
        + " ".join(f"{k}={_type_text(v)}" for k, v in sorted(node.attr.items()) if _type_text(v))
        for node in graph_def.node
    )


def port_dtypes(
    args: Iterable[op_def_pb2.OpDef.ArgDef], attrs: Mapping[str, attr_value_pb2.AttrValue]
) -> Iterator[tuple[str, int, int]]:
    """(argument, index within it, dtype) of each port that the arguments of an op stand for."""
    for arg in args:
        if arg.type_list_attr:
            types = list(attrs[arg.type_list_attr].list.type)
        else:
            dtype = attrs[arg.type_attr].type if arg.type_attr else arg.type
            types = [dtype] * (attrs[arg.number_attr].i if arg.number_attr else 1)
        yield from ((arg.name, index, dtype) for index, dtype in enumerate(types))


class _Reader:
    """Turns statements into nodes; tensors are named as in a GraphDef or as in a function."""

    def __init__(self, signatures: Mapping[str, op_def_pb2.OpDef], *, in_function: bool) -> None:
        self.nodes: list[node_def_pb2.NodeDef] = []
        self._signatures = signatures
        self._in_function = in_function
        self._outputs: dict[str, list[str]] = {}
        self._dtypes: dict[str, int] = {}

    def add_argument(self, name: str, dtype: int) -> None:
        """Declares an argument of the function."""
        self._outputs[name] = [name]
        self._dtypes[name] = dtype

    def add_all(self, statements: Iterable[ast.stmt]) -> None:
        """Adds one node a statement."""
        for statement in statements:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if not isinstance(target, ast.Name):
                raise SyntaxError(f"not of the form `name = Op(...)`: {ast.unparse(statement)}")
            self._add(target.id, statement.value)

    def tensor(self, expression: ast.expr, reader: str = "") -> str:
        """The name of the tensor that an expression stands for."""
        port = 0
        if isinstance(expression, ast.Subscript):
            expression, port = expression.value, ast.literal_eval(expression.slice)
        if isinstance(expression, ast.Name):
            name = expression.id
            known = self._outputs.get(name)
            return known[port] if known else _graph_tensor(name, port)
        constant = f"{reader}.{len(self.nodes)}"
        self._add(constant, ast.Call(func=ast.Name(id="Const"), args=[expression], keywords=[]))
        return self._outputs[constant][0]

    def dtype(self, tensor: str) -> int:
        """The dtype of a tensor; DT_INVALID for one of a later line."""
        return self._dtypes.get(tensor, types_pb2.DT_INVALID)

    def _add(self, name: str, value: ast.expr) -> None:
        device = ""
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.MatMult):
            device, value = ast.literal_eval(value.right), value.left
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
            raise SyntaxError(f"{name} is not a node: {ast.unparse(value)}")
        node = node_def_pb2.NodeDef(name=name, op=value.func.id, device=device)
        op_def = self._signatures.get(node.op) or op_def_registry.get(node.op)
        if op_def is None:
            raise ValueError(f"TensorFlow knows no op {node.op!r}")
        if node.op == "Const":
            array = _array(*[ast.literal_eval(arg) for arg in value.args])
            node.attr["value"].tensor.CopyFrom(tensor_util.make_tensor_proto(array))
            node.attr["dtype"].type = node.attr["value"].tensor.dtype
        else:
            node.input.extend([self.tensor(arg, name) for arg in value.args])
        given = {k.arg: k.value for k in value.keywords}
        controls = given.pop("after", ast.List(elts=[])).elts
        node_types = {attr.name: attr.type for attr in op_def.attr}
        for attr, literal in given.items():
            node.attr[attr].CopyFrom(_attr(node_types[attr], literal))
        self._infer(node, op_def)
        for attr in op_def.attr:
            if attr.name not in node.attr:
                if not attr.HasField("default_value"):
                    raise ValueError(f"{name} ({node.op}) needs the attribute {attr.name!r}")
                node.attr[attr.name].CopyFrom(attr.default_value)
        node.input.extend([f"^{control.id}" for control in controls])
        self._outputs[name] = []
        for port, (arg, index, dtype) in enumerate(port_dtypes(op_def.output_arg, node.attr)):
            tensor = f"{name}:{arg}:{index}" if self._in_function else _graph_tensor(name, port)
            self._outputs[name].append(tensor)
            self._dtypes[tensor] = dtype
        self.nodes.append(node)

    def _infer(self, node: node_def_pb2.NodeDef, op_def: op_def_pb2.OpDef) -> None:
        rest = list(node.input)
        single = sum(not (arg.number_attr or arg.type_list_attr) for arg in op_def.input_arg)
        for arg in op_def.input_arg:
            variadic = arg.number_attr or arg.type_list_attr
            count = len(node.input) - single if variadic else 1
            taken, rest = rest[:count], rest[count:]
            made = [self.dtype(tensor) % REFERENCE for tensor in taken]
            if arg.number_attr:
                node.attr[arg.number_attr].i = count
            if arg.type_list_attr and arg.type_list_attr not in node.attr:
                node.attr[arg.type_list_attr].list.type.extend(made)
            if arg.type_attr and arg.type_attr not in node.attr and any(made):
                node.attr[arg.type_attr].type = next(filter(None, made))


def _function(
    statement: ast.FunctionDef, signatures: Mapping[str, op_def_pb2.OpDef]
) -> function_pb2.FunctionDef:
    function = function_pb2.FunctionDef()
    function.signature.name = statement.name
    reader = _Reader(signatures, in_function=True)
    for arg in statement.args.args:
        function.signature.input_arg.add(name=arg.arg, type=_type(arg.annotation))
        reader.add_argument(arg.arg, _type(arg.annotation))
    *body, end = statement.body
    if not isinstance(end, ast.Return):
        raise SyntaxError(f"the last line of {statement.name} must be a return")
    reader.add_all(body)
    function.node_def.extend(reader.nodes)
    results = end.value.elts if isinstance(end.value, ast.Tuple) else [end.value]
    for number, result in enumerate(results):
        tensor = reader.tensor(result)
        function.signature.output_arg.add(name=f"result_{number}", type=reader.dtype(tensor))
        function.ret[f"result_{number}"] = tensor
    return function


def _graph_tensor(name: str, port: int) -> str:
    return f"{name}:{port}" if port else name


def _array(value: Any, shape: list[int] | None = None) -> np.ndarray:
    array = np.array(value)
    dtype = {"f": np.float32, "i": np.int32}.get(array.dtype.kind, array.dtype)
    return array.astype(dtype) if shape is None else np.full(shape, value, dtype)


def _type(expression: ast.expr) -> int:
    return dtypes.as_dtype(expression.id).as_datatype_enum


def _attr(kind: str, literal: ast.expr) -> attr_value_pb2.AttrValue:
    result = attr_value_pb2.AttrValue()
    if kind == "type":
        result.type = _type(literal)
    elif kind == "list(type)":
        result.list.type.extend([_type(entry) for entry in literal.elts])
        result.list.SetInParent()
    elif kind == "func":
        result.func.name = literal.id
    else:
        _set_value(result, kind, ast.literal_eval(literal))
    return result


def _set_value(result: attr_value_pb2.AttrValue, kind: str, value: Any) -> None:
    if kind == "shape":
        _set_shape(result.shape, value)
    elif kind == "list(shape)":
        for shape in value:
            _set_shape(result.list.shape.add(), shape)
    elif kind == "string":
        result.s = value.encode()
    elif kind == "list(int)":
        result.list.i.extend(value)
    else:
        setattr(result, {"int": "i", "float": "f", "bool": "b"}[kind], value)


def _set_shape(result: tensor_shape_pb2.TensorShapeProto, shape: list[int] | None) -> None:
    result.unknown_rank = shape is None
    for size in shape or ():
        result.dim.add(size=size)


def _type_text(value: attr_value_pb2.AttrValue) -> str:
    types = [value.type] if value.WhichOneof("value") == "type" else value.list.type
    return ",".join(types_pb2.DataType.Name(dtype)[3:].lower() for dtype in types)
