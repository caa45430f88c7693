"""Gradients of biases: sums of a gradient over its leading axes.

Sums are denied, since float16 kernels may add up in float16, so what is summed would be cast to
float32 first. Two ops add up low-precision values in float32 inside:

    BiasAddGrad(dy), on a GPU
    MatMul(ones[1, rows], dy[rows, channels]), on a CPU in bfloat16

On a CPU BiasAddGrad adds up in bfloat16 and is off by up to 10 % of the sum of magnitudes over
65,536 rows; the product is off by 0.03 %, and takes half the time of a Cast and a BiasAddGrad in
float32.

Neither takes the place of a loss's sum: what is summed is reshaped to the constant shape of a bias
afterwards, and the search asks for that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Protocol

import numpy as np
from tensorflow.core.framework import node_def_pb2

from graph_passes.patterns.edits import GraphEdits
from graph_passes.patterns.gradient_sums import PRODUCTS
from graph_passes.patterns.low_products import LowProducts
from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.patterns.ones_product import OnesProduct
from graph_passes.patterns.sums import (
    attempt,
    control_inputs,
    elements,
    float_sums,
    summed_axes,
    target_shape,
)
from graph_passes.view import ARGUMENT, FLOAT, Shape


class _Replacement(Protocol):
    """What sums in place of a Sum."""

    rule: str

    def pays(self, number: int, tensor: str) -> bool: ...

    def add(self, node: node_def_pb2.NodeDef, tensor: str, shape: Shape) -> str: ...


def use_bias_gradients(edits: GraphEdits, preserve: Collection[str]) -> None:
    """Replaces sums of a gradient over its leading axes by BiasAddGrad.

    Args:
        edits: receives the changes and the units.
        preserve: names of nodes that must stay.
    """
    _replace_sums(edits, preserve, _BiasGradient(edits))


def multiply_by_ones(edits: GraphEdits, preserve: Collection[str], products: LowProducts) -> None:
    """Replaces BiasAddGrad, and sums like it, by a matrix product with ones.

    Only a gradient that another product reads too is summed so: it goes low in any case.

    Args:
        edits: receives the changes and the units.
        preserve: names of nodes that must stay.
        products: tells which gradients go low in any case.
    """
    view, matcher, ones = edits.view, edits.matcher, OnesProduct(edits, products)
    for number in view.of_op("BiasAddGrad"):
        node, op_type = view.nodes[number], view.op_type(number)
        is_last = op_type is not None and op_type.attr(node, "data_format").s == b"NHWC"
        if not is_last or not view.is_float[view.base[number]] or node.name in preserve:
            continue
        if _is_added_to_argument(matcher, number):
            continue  # behind a loop one product may take the place of this sum in all rounds
        tensor = node.input[0]
        shape = view.shape(tensor)
        if shape is not None and ones.pays(number, tensor):
            made = ones.add(node, tensor, shape)
            edits.redirect[edits.output(node.name, "BiasAddGrad")] = made
            edits.units.append(f"{ones.rule}: {node.name}")
    _replace_sums(edits, preserve, ones)


def _is_added_to_argument(matcher: Matcher, number: int) -> bool:
    """Whether a function adds what a node makes to one of its arguments, as bodies of loops do."""
    return any(
        matcher.op(matcher.maker(matcher.through(tensor, "Identity"))) == ARGUMENT
        for reader in matcher.readers(number)
        if matcher.op(reader) == "AddN"
        for tensor in matcher.inputs(reader)
    )


@dataclasses.dataclass(frozen=True)
class _BiasGradient:
    edits: GraphEdits
    rule = "bias-gradient"

    def pays(self, number: int, tensor: str) -> bool:
        return True

    def add(self, node: node_def_pb2.NodeDef, tensor: str, shape: Shape) -> str:
        name, inputs = f"{node.name}/BiasAddGrad", (tensor, *control_inputs(node))
        made = self.edits.add("BiasAddGrad", name, inputs, node.device, {"T": FLOAT}, [shape[-1:]])
        made.attr["data_format"].s = b"NHWC"
        return self.edits.output(name, "BiasAddGrad")


def _replace_sums(edits: GraphEdits, preserve: Collection[str], replacement: _Replacement) -> None:
    def replace(edits: GraphEdits, matcher: Matcher, number: int) -> None:
        _replace(edits, matcher, number, replacement)

    matcher = edits.matcher
    for number in float_sums(edits):
        if matcher.op(matcher.source(number, 0)) not in PRODUCTS:
            attempt(edits, matcher, number, preserve, replace)


def _replace(edits: GraphEdits, matcher: Matcher, number: int, replacement: _Replacement) -> None:
    tensor, node = matcher.tensor(number, 0), matcher.node(number)
    shape = edits.view.shape(tensor)
    if shape is None or len(shape) < 2:
        return
    try:
        axes = summed_axes(matcher, number, shape, target_shape(matcher, number))
    except NoMatchError:
        return  # most sums are no gradient of a bias: no near misses
    channels = elements(shape[axes:])
    if not axes or channels in (None, 1) or not replacement.pays(number, tensor):
        return
    if axes < len(shape) - 1:
        wanted = np.array([-1, channels], np.int32)
        dims = edits.add_constant(f"{node.name}/rows_shape", wanted, node.device, tensor)
        shape = (elements(shape[:axes]), channels)
        tensor = edits.add_reshape(f"{node.name}/rows", tensor, dims, node.device, shape)
        # A clear op that leads to no allow op goes low too late for an infer op behind it.
        edits.listed[f"{node.name}/rows"] = "infer"
    made = replacement.add(node, tensor, shape)
    edits.redirect[edits.output(node.name, "Sum")] = made
    edits.units.append(f"{replacement.rule}: {node.name}")
