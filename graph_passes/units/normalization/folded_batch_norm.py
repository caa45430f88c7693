"""Stored batch normalization folded into the convolution before it.

With scale and offset that do not depend on the input,

    (conv(x, w) + bias) * scale + offset  is  conv(x, w * scale) + (bias * scale + offset)

TensorFlow's remapper joins a bfloat16 convolution on a CPU with the BiasAdd and the activation
behind it, but not with a batch normalization; so this form leaves one op where three would each
walk through the activations. The products with scale are computed in float32 and rounded once, like
any other weight; of constants, when the graph is rewritten.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from tensorflow.core.framework import node_def_pb2

from graph_passes.ir.graph_view import Shape, elements
from graph_passes.rewriter.constant_evaluation import evaluated
from graph_passes.rewriter.editor import GraphEdits
from graph_passes.rewriter.matcher import ADDS, Matcher
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.normalization.forward import Norm

_CONVOLUTIONS = ("Conv2D", "DepthwiseConv2dNative")
_WORTH = 2
"""How many times as large as the activations a weight may be. Weights that no constant holds are
multiplied in every step; measured on a CPU, that costs less than what it saves up to this size."""


class _Convolution(NamedTuple):
    """A convolution whose result only a batch normalization reads.

    Attributes:
        node: the convolution.
        weight: tensor [height, width, channels in, channels out], for a depthwise one [height,
            width, channels in, multiplier].
        weight_shape: the shape of it.
        bias: tensor [channels] that is added to the result, None where there is none.
    """

    node: node_def_pb2.NodeDef
    weight: str
    weight_shape: tuple[int, ...]
    bias: str | None

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape in which a scale [channels] meets the weight."""
        # The channels of a depthwise convolution's result are numbered by input channel first.
        return self.weight_shape[2 if self.node.op == "DepthwiseConv2dNative" else 3 :]


def fold_batch_norm(edits: GraphEdits, norm: Norm, unknown: int) -> bool:
    """Puts a convolution with scaled weights in the place of a norm with stored statistics.

    Args:
        edits: of the graph.
        norm: the norm.
        unknown: the length that counts for a batch that is not known.

    Returns:
        Whether it was done; False where no convolution is before it, where scale and offset are no
        tensors of their own, or where scaling the weights would cost more than it saves.
    """
    m, shape = edits.matcher, norm.shape or ()
    if norm.axes != (0, 1, 2):
        return False
    convolution, parts = _find_convolution(m, norm.x), _scale_and_offset(m, norm)
    if convolution is None or parts is None:
        return False
    constants = _scaled_constants(m, convolution, *parts)
    batch = unknown if shape[0] is None else shape[0]
    size = elements((batch, *shape[1:]))
    pays = constants is not None or (
        size is not None and math.prod(convolution.weight_shape) <= _WORTH * size
    )

    def write(new: Replacement) -> None:
        new.stem = f"{new.stem}/folded"
        x = convolution.node.input[0]
        if constants is None:
            weight, bias = _scaled_tensors(new, convolution, *parts, shape[3:])
        else:
            weight, bias = (
                new.constant(value.astype(np.float32), name=name, beside=x)
                for name, value in zip(("weight", "bias"), constants, strict=True)
            )
        made = new.copy(convolution.node, x, weight, name="", shape=shape)
        new.replace(norm.output, new.op.BiasAdd(made, bias))

    return pays and edits.propose("batch-norm", norm.output, write)


def _find_convolution(m: Matcher, x: str) -> _Convolution | None:
    """The convolution that makes a tensor, if a batch normalization may be folded into it."""
    chain, bias = [m.maker(x)], None
    if m.op(chain[0]) == "BiasAdd":
        bias = m.tensor(chain[0], 1)
        chain.append(m.source(chain[0], 0))
    last = chain[-1]
    if m.op(last) not in _CONVOLUTIONS:
        return None
    for number in chain:
        if m.attr(number, "data_format").s != b"NHWC":
            return None
        if len(m.readers(number)) != 1 or m.view.names[number] in m.view.awaited:
            return None
    weight = m.tensor(last, 1)
    shape = m.shape_of(weight)
    if shape is None or None in shape:
        return None
    return _Convolution(m.node(last), weight, shape, bias)  # type: ignore[arg-type]


def _scale_and_offset(m: Matcher, norm: Norm) -> tuple[str, str] | None:
    """The tensors s and t of y = x * s + t, None where it is written in another way."""
    if m.op(norm.output) not in ADDS:
        return None
    for product, offset in (m.inputs(norm.output), m.inputs(norm.output)[::-1]):
        number = m.maker(product)
        if m.op(number) == "Mul" and m.reads(number, norm.x):
            return m.other_input(number, norm.x), offset
    return None


def _scaled_constants(
    m: Matcher, old: _Convolution, scale: str, offset: str
) -> tuple[np.ndarray, np.ndarray] | None:
    """The scaled weight and the new bias; None unless both are known now, one for each channel."""
    tensors = (scale, offset, old.weight, *([] if old.bias is None else [old.bias]))
    values = [value for tensor in tensors if (value := evaluated(m, tensor)) is not None]
    if len(values) < len(tensors):
        return None
    factor, shift, weight, *more = values
    if {factor.size, shift.size} != {math.prod(old.scale_shape)}:
        return None
    bias = more[0].ravel() if more else np.zeros(1)
    return weight * factor.reshape(old.scale_shape), bias * factor.ravel() + shift.ravel()


def _scaled_tensors(
    new: Replacement, old: _Convolution, scale: str, offset: str, channels: Shape
) -> tuple[str, str]:
    """Tensors of the scaled weight and the new bias."""

    def reshaped(name: str, tensor: str, shape: Shape) -> str:
        fits = new.matcher.shape_of(tensor) == shape
        return tensor if fits else new.reshape(tensor, shape, name=name)

    weight = new.op.Mul(old.weight, reshaped("scale", scale, old.scale_shape), name="weight")
    bias = reshaped("offset", offset, channels)
    if old.bias is not None:
        product = new.op.Mul(old.bias, reshaped("bias_scale", scale, channels), name="scaled_bias")
        bias = new.op.AddV2(product, bias, name="bias")
    return weight, bias
