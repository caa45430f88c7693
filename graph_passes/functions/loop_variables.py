"""More variables for a loop: in its functions and at its node."""

from __future__ import annotations

from collections.abc import Collection

from tensorflow.core.framework import function_pb2, node_def_pb2, types_pb2


def names_in(function: function_pb2.FunctionDef) -> set[str]:
    """The names that a function gives to nodes, arguments and results."""
    signature = function.signature
    names = {arg.name for arg in (*signature.input_arg, *signature.output_arg)}
    return names | {node.name for node in function.node_def}


def free_name(name: str, taken: Collection[str]) -> str:
    """The name followed by the first number that makes it a new one."""
    count = 0
    while f"{name}_{count}" in taken:
        count += 1
    return f"{name}_{count}"


def add_to_functions(
    body: function_pb2.FunctionDef,
    cond: function_pb2.FunctionDef,
    name: str,
    dtype: int,
    result: str = "",
) -> None:
    """Adds a loop variable to the functions of a loop.

    Args:
        body: the loop's body; changed in place.
        cond: its condition; changed in place.
        name: of the new argument, free in both; `name` + "_out", of the result, must be free too.
        dtype: of the variable.
        result: the tensor that the body gives for the next round, "" for the argument itself.
    """
    for function in (body, cond):
        function.signature.input_arg.add(name=name, type=dtype)
    body.signature.output_arg.add(name=f"{name}_out", type=dtype)
    body.ret[f"{name}_out"] = result or name


def add_to_loop(loop: node_def_pb2.NodeDef, tensor: str, dtype: int) -> int:
    """Gives the loop's node one more input, with what the variable starts from.

    Returns:
        The output of the node that has what the variable ends as.
    """
    dtypes = loop.attr["T"].list.type
    position = len(dtypes)
    loop.input.insert(position, tensor)
    dtypes.append(dtype)
    for attr in ("output_shapes", "_output_shapes"):
        if attr in loop.attr and loop.attr[attr].list.shape:
            shape = loop.attr[attr].list.shape.add()
            shape.unknown_rank = dtype != types_pb2.DT_VARIANT  # a handle is a scalar
    return position
