"""Convolutions of groups run by oneDNN's kernels, where Keras has XLA compile them.

Keras compiles each by itself on every device (`_conv_xla` in keras/src/backend/tensorflow/nn.py),
since TensorFlow's kernels for CPUs other than oneDNN's have no gradients of groups. What XLA makes
of them for a CPU takes many times as long: the gradient of 32 filters of 3 x 3 for 128 channels, on
8 images of 32 x 32, takes seconds, 2 ms by oneDNN.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from tensorflow.core.framework import function_pb2, types_pb2

from graph_passes.functions.call_tree import MUST_COMPILE, Region, is_set
from graph_passes.ir.convolutions import CONVOLUTIONS, has_groups
from graph_passes.ir.copying import Graph, nodes_of
from graph_passes.ir.graph_view import FunctionShapes, Shape, Shapes
from graph_passes.ops.kernels import ONEDNN_LABEL
from graph_passes.ops.op_types import of_onednn
from graph_passes.policy.config import PrecisionConfig

RULE = "grouped-convolution"
_MOVES = ("BatchToSpaceND", "ExpandDims", "Identity", "Reshape", "SpaceToBatchND", "Squeeze")
# Gradients of second order add up.
_BESIDE = frozenset(("AddN", "Const", "NoOp", "ReadVariableOp", "Shape", "ShapeN", *_MOVES))


def is_in_force(config: PrecisionConfig) -> bool:
    """Whether kernels of oneDNN are known to run what a configuration makes of a convolution."""
    if not config.has_rule(RULE) or (config.device, config.fused) != ("CPU", False):
        return False
    has_kernels = config.target_dtype == "bfloat16" and config.cost_table is not None
    return has_kernels or not config.converts


def is_grouped_convolution(function: function_pb2.FunctionDef, shapes: Shapes | None) -> bool:
    """Whether XLA compiles a function of nothing but convolutions of groups, as its shapes show."""
    if shapes is None or not is_set(function.attr, MUST_COMPILE):
        return False
    shape = functools.partial(_shape, shapes)
    work = [node for node in function.node_def if node.op not in _BESIDE]
    return bool(work) and all(_has_kernel(node) and has_groups(node, shape) for node in work)


def released(
    function: function_pb2.FunctionDef, config: PrecisionConfig
) -> function_pb2.FunctionDef:
    """A copy of a function that XLA does not compile.

    It stays apart from its caller, as it was: TensorFlow would make one kernel of the gradients of
    a filter and a bias, which fails where a batch has no rows. In float32 it names oneDNN's
    kernels: by itself TensorFlow uses them on CPUs with AVX512_VNNI or the like alone.
    """
    new = copy.deepcopy(function)
    new.attr.pop(MUST_COMPILE, None)
    if not config.converts:
        for node in new.node_def:
            if node.op in CONVOLUTIONS:
                node.op = of_onednn(node.op)
                node.attr["_kernel"].s = ONEDNN_LABEL
    return new


def release_convolutions(
    tree: Region,
    config: PrecisionConfig,
    function_shapes: FunctionShapes,
    may_change: Callable[[Graph, str], bool],
) -> tuple[Region, dict[Region, tuple[str, ...]]]:
    """Takes convolutions of groups from XLA.

    Args:
        tree: the call tree; it is not changed.
        config: for what it is planned.
        function_shapes: gives the static shapes of functions by their names.
        may_change: whether a calling node, by its graph and name, may be changed.

    Returns:
        A tree of the same form, and for each of its regions the calls that XLA compiles no more.
        It is `tree` itself where there is none.
    """
    bodies: dict[Region, Graph] = {}
    found: dict[Region, tuple[str, ...]] = {}
    for region in tree.walk():  # callers first
        calls = {
            call.node: call.callees[0]
            for call in region.calls
            if call.kind.functions == ("f",)
            and isinstance(called := call.callees[0].proto, function_pb2.FunctionDef)
            and is_grouped_convolution(called, function_shapes(called.signature.name))
            and may_change(region.proto, call.node)
        }
        if not calls:
            continue
        found[region] = tuple(calls)
        bodies[region] = copy.deepcopy(region.proto)
        for node in nodes_of(bodies[region]):
            if node.name in calls:
                node.attr.pop(MUST_COMPILE, None)
        bodies |= {callee: released(callee.proto, config) for callee in calls.values()}  # type: ignore[arg-type]
    if not bodies:
        return tree, {}
    new = tree.with_bodies(lambda region: bodies.get(region, region.proto))
    pairs = zip(tree.walk(), new.walk(), strict=True)
    return new, {region: found[old] for old, region in pairs if old in found}


def _has_kernel(node: Any) -> bool:
    """Whether it is a convolution for which oneDNN's kernels take groups, gradients included."""
    attr = node.attr
    return (
        node.op in CONVOLUTIONS
        and attr["T"].type == types_pb2.DT_FLOAT
        and attr["padding"].s in (b"SAME", b"VALID")
        and not ("data_format" in attr and attr["data_format"].s != b"NHWC")
    )


def _shape(shapes: Shapes, tensor: str) -> Shape | None:
    found = shapes(tensor.partition(":")[0])
    return found[0] if found else None
