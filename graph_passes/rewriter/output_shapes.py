"""Static shapes of what an op makes, for the ops that replacements are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graph_passes.ir.graph_view import Shape
from graph_passes.ops.op_types import FILTER_AND_BIAS, stands_for
from graph_passes.rewriter.matcher import UNARY

_ELEMENT_WISE = ("Mul", "AddV2", "Sub", "RealDiv")
_OF_FIRST = (*UNARY, "AddN", "BiasAdd", "Cast", "ClipByValue", "SigmoidGrad", "TanhGrad")
_Shapes = Sequence[Shape | None]


def shapes_of_outputs(op: str, inputs: _Shapes, attrs: Mapping[str, Any]) -> _Shapes:
    """The static shapes of a node's outputs, as far as they follow from those of its inputs.

    They may also depend on attributes that are not the op's defaults.
    """
    if op in _OF_FIRST:
        return inputs[:1]
    if op == "Size":
        return ((),)
    if op in _ELEMENT_WISE:
        return (_broadcast(inputs[0], inputs[1]),)
    if op == "BiasAddGrad" and inputs[0]:
        return (inputs[0][-1:],)
    if op == FILTER_AND_BIAS and inputs[2]:
        return (None, inputs[2][-1:])
    op = stands_for(op)
    if op in ("MatMul", "BatchMatMulV2"):
        return (_product(inputs[0], inputs[1], attrs),)
    if op == "FusedBatchNormV3":
        return (inputs[0], *([inputs[1]] * 4))
    if op == "FusedBatchNormGradV3":
        return (inputs[0], inputs[2], inputs[2])
    return ()


def _broadcast(left: Shape | None, right: Shape | None) -> Shape | None:
    if left is None or right is None:
        return None
    if len(left) < len(right):
        left, right = right, left
    leading = len(left) - len(right)
    pairs = zip(left[leading:], right, strict=True)
    return (*left[:leading], *(_joined(a, b) for a, b in pairs))


def _joined(left: int | None, right: int | None) -> int | None:
    if left == 1 or right == 1:
        return right if left == 1 else left
    return left if right is None else right


def _product(left: Shape | None, right: Shape | None, attrs: Mapping[str, Any]) -> Shape | None:
    """Of matrices with the leading axes of the first, or of all of them and one matrix."""
    if left is None or right is None or len(left) < 2 or len(right) not in (2, len(left)):
        return None
    rows = left[-1 if attrs.get("transpose_a") or attrs.get("adj_x") else -2]
    columns = right[-2 if attrs.get("transpose_b") or attrs.get("adj_y") else -1]
    return (*left[:-2], rows, columns)
