"""The rank of tensors in graphs without static shapes, from what the graph itself stores."""

from __future__ import annotations

from tensorflow.core.framework import tensor_shape_pb2

from graph_passes.ir.view import Shape
from graph_passes.rewriter.matcher import Matcher

_PASSES = ("Identity", "ReadVariableOp", "StopGradient", "Cast", "Enter")
_MOST_STEPS = 16


def known_shape(m: Matcher, tensor: str) -> Shape | None:
    """The static shape of a tensor, or that of the constant or variable that it comes from."""
    shape = m.shape_of(tensor)
    for _ in range(_MOST_STEPS):
        if shape is not None:
            return shape
        number = m.maker(tensor)
        op, node = m.op(number), m.node(number)
        if op == "Const":
            return _sizes(node.attr["value"].tensor.tensor_shape)
        if op == "Reshape" and m.op(m.source(number, 1)) == "Const":
            sizes = m.constant(m.tensor(number, 1)).ravel().tolist()
            return tuple(None if size < 0 else size for size in sizes)
        if op not in _PASSES:
            return _sizes(node.attr["shape"].shape) if "shape" in node.attr else None
        tensor = m.tensor(number, 0)
        shape = m.shape_of(tensor) if op != "ReadVariableOp" else None
    return None


def _sizes(proto: tensor_shape_pb2.TensorShapeProto) -> Shape | None:
    if proto.unknown_rank:
        return None
    return tuple(None if dim.size < 0 else dim.size for dim in proto.dim)
