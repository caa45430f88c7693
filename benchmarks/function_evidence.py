"""What the functions of TensorFlow's runtime compute in: evidence that a rewrite took place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tensorflow.core.framework import function_pb2, node_def_pb2, types_pb2
from tensorflow.python.eager import context as context_lib
from tensorflow.python.framework import op_def_registry

from graph_passes.ops.op_types import stands_for
from graph_passes.units.reduction.ones_product import is_ones_product

MATH_OPS = frozenset(
    (
        "MatMul",
        "BatchMatMul",
        "BatchMatMulV2",
        "BatchMatMulV3",
        "Einsum",
        "_FusedMatMul",
        "Conv2D",
        "Conv2DBackpropInput",
        "Conv2DBackpropFilter",
        "Conv3D",
        "Conv3DBackpropInputV2",
        "Conv3DBackpropFilterV2",
        "DepthwiseConv2dNative",
        "DepthwiseConv2dNativeBackpropInput",
        "DepthwiseConv2dNativeBackpropFilter",
    )
)
"""Ops whose arithmetic is matrix multiplication or convolution, forward and backward."""

_LOW = {types_pb2.DT_HALF: "float16", types_pb2.DT_BFLOAT16: "bfloat16"}
_DTYPES = {**_LOW, types_pb2.DT_FLOAT: "float32"}


def is_product(node: node_def_pb2.NodeDef) -> bool:
    """Whether a node is a product or convolution of the program: no sum that became a product."""
    return stands_for(node.op) in MATH_OPS and not is_ones_product(node.name)


def low_precision_ops() -> dict[str, dict[str, int]]:
    """Counts matrix multiplications and convolutions in the function that holds most of them.

    Looked at are the functions that no other function calls, each with all that it calls: one of
    them is the training step. A step that makes its variables is traced twice, and TensorFlow runs
    the second trace alone: of two that hold as many, the one with more in low precision counts.
    What nothing reads is not counted: TensorFlow leaves it out before it runs a function, a rewrite
    before that. What else its own graph optimizers or XLA make of the definitions is not in them.

    Returns:
        Dtype ("float32", "float16", "bfloat16", "other") -> op -> number of nodes.
    """
    functions = _runtime_functions()
    called = {name for body in functions.values() for name in _callees(body, functions)}
    best = max(
        (_count(root, functions) for root in functions.keys() - called),
        key=lambda counts: (counts.total(), _in_low_precision(counts)),
        default=Counter[tuple[str, str]](),
    )
    found: dict[str, dict[str, int]] = {}
    for (dtype, op), count in sorted(best.items()):
        found.setdefault(dtype, {})[op] = count
    return found


def _in_low_precision(counts: Counter[tuple[str, str]]) -> int:
    return sum(count for (dtype, _), count in counts.items() if dtype in _LOW.values())


def _runtime_functions() -> dict[str, function_pb2.FunctionDef]:
    context = context_lib.context()
    names = context.list_function_names()
    return {
        name.decode() if isinstance(name, bytes) else name: context.get_function_def(name)
        for name in names
    }


def _count(root: str, functions: dict[str, function_pb2.FunctionDef]) -> Counter[tuple[str, str]]:
    seen, todo = {root}, [root]
    counts: Counter[tuple[str, str]] = Counter()
    while todo:
        body = functions[todo.pop()]
        read = _read_nodes(body)
        for node in body.node_def:
            if is_product(node) and node.name in read:
                counts[_DTYPES.get(node.attr["T"].type, "other"), stands_for(node.op)] += 1
        new = set(_callees(body, functions)) - seen
        seen |= new
        todo.extend(new)
    return counts


def _read_nodes(body: function_pb2.FunctionDef) -> set[str]:
    """The names of the nodes of which a result or an effect of a function comes."""
    read_by = {node.name: node.input for node in body.node_def}
    pending = [*body.ret.values(), *body.control_ret.values()]
    for node in body.node_def:
        op_def = op_def_registry.get(node.op)
        if op_def is None or op_def.is_stateful:
            pending.append(node.name)
    read: set[str] = set()
    while pending:
        name = pending.pop().removeprefix("^").partition(":")[0]
        if name not in read:
            read.add(name)
            pending.extend(read_by.get(name, ()))
    return read


def _callees(
    body: function_pb2.FunctionDef, functions: dict[str, function_pb2.FunctionDef]
) -> Iterator[str]:
    for node in body.node_def:
        yield from (name for name in function_names(node) if name in functions)


def function_names(node: node_def_pb2.NodeDef) -> Iterator[str]:
    """Gives the names of functions that a node may call, its own op type among them."""
    yield node.op
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        elif value.HasField("list"):
            yield from (func.name for func in value.list.func)
