"""Stored batch normalization folded into the convolution before it.

With scale and offset that do not depend on the input,

    (conv(x, w) + bias) * scale + offset  is  conv(x, w * scale) + (bias * scale + offset)

TensorFlow's remapper joins a bfloat16 convolution on a CPU with the BiasAdd and the activation
behind it, but not with a batch normalization; so this form leaves one op where three would each
walk through the activations. The products with scale are computed in float32 and rounded once, like
any other weight; of constants, when the graph is rewritten.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from graph_passes.ir.view import Shape
from graph_passes.rewriter.constant_evaluation import ConstantEvaluator
from graph_passes.rewriter.editor import GraphEdits
from graph_passes.rewriter.matcher import ADDS, Matcher, NoMatchError
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.normalization.forward import Norm

_CONVOLUTIONS = ("Conv2D", "DepthwiseConv2dNative")
_UNKNOWN_BATCH = 32
"""What counts for a batch size that is not known."""
_WORTH = 2
"""How many times as large as the activations a weight may be. Weights that no constant holds are
multiplied in every step; measured on a CPU, that costs less than what it saves up to this size."""


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A convolution whose result only a batch normalization reads.

    Attributes:
        node: its number.
        weight: tensor [height, width, channels in, channels out], for a depthwise one [height,
            width, channels in, multiplier].
        weight_shape: the shape of it.
        bias: tensor [channels] that is added to the result, None where there is none.
    """

    node: int
    weight: str
    weight_shape: tuple[int, ...]
    bias: str | None


def find_convolution(m: Matcher, x: str) -> Convolution | None:
    """The convolution that makes a tensor, if a batch normalization may be folded into it.

    Args:
        m: reads the graph.
        x: the tensor that is normalized, [batch, height, width, channels].
    """
    chain, bias = [m.maker(x)], None
    if m.op(chain[0]) == "BiasAdd":
        bias = m.tensor(chain[0], 1)
        chain.append(m.source(chain[0], 0))
    last = chain[-1]
    if m.op(last) not in _CONVOLUTIONS:
        return None
    for number in chain:
        node, op_type = m.node(number), m.view.op_type(number)
        if op_type is None or op_type.attr(node, "data_format").s != b"NHWC":
            return None
        if len(m.readers(number)) != 1 or node.name in m.view.awaited:
            return None
    weight = m.tensor(last, 1)
    shape = m.shape_of(weight)
    if shape is None or len(shape) != 4 or None in shape:
        return None
    return Convolution(last, weight, tuple(size or 0 for size in shape), bias)


def fold_batch_norm(edits: GraphEdits, norm: Norm) -> bool:
    """Puts a convolution with scaled weights in the place of a batch normalization.

    Args:
        edits: receives the changes.
        norm: one with stored statistics.

    Returns:
        Whether it was done; False where no convolution is before it, where scale and offset are no
        tensors of their own, or where scaling the weights would cost more than it saves.
    """
    m, shape = edits.matcher, norm.shape
    if shape is None or len(shape) != 4 or norm.axes != (0, 1, 2):
        return False
    convolution, parts = find_convolution(m, norm.x), _scale_and_offset(m, norm)
    if convolution is None or parts is None:
        return False
    fold = Folding(m, convolution, *parts, shape)
    return fold.pays and edits.propose("batch-norm", norm.output, fold.write)


def _scale_and_offset(m: Matcher, norm: Norm) -> tuple[str, str] | None:
    """The tensors s and t of y = x * s + t, None where it is written in another way."""
    if m.op(norm.output) not in ADDS:
        return None
    for product, offset in (m.inputs(norm.output), m.inputs(norm.output)[::-1]):
        number = m.maker(product)
        if m.op(number) == "Mul" and m.reads(number, norm.x):
            return m.other_input(number, norm.x), offset
    return None


class Folding:
    """Puts a convolution with scaled weights in the place of a batch normalization.

    Attributes:
        pays: whether scaling the weights costs less than it saves.
    """

    def __init__(
        self, m: Matcher, convolution: Convolution, scale: str, offset: str, shape: Shape
    ) -> None:
        """Plans it.

        Args:
            m: reads the graph.
            convolution: what is normalized.
            scale: tensor of float32, [channels] or the same with leading dimensions of 1.
            offset: tensor, likewise.
            shape: that of the normalized tensor.
        """
        self._convolution, self._shape = convolution, shape
        self._scale, self._offset = scale, offset
        self._node = m.node(convolution.node)
        depthwise = self._node.op == "DepthwiseConv2dNative"
        # The channels of a depthwise convolution's result are numbered by input channel first.
        self._scale_shape = convolution.weight_shape[2:] if depthwise else shape[3:]
        self._constants = self._scaled_constants(m)
        batch, *sizes = (1 if size is None else size for size in shape)
        elements = math.prod(sizes) * (_UNKNOWN_BATCH if shape[0] is None else batch)
        self.pays = self._constants is not None or (
            None not in shape[1:] and math.prod(convolution.weight_shape) <= _WORTH * elements
        )

    def _scaled_constants(self, m: Matcher) -> tuple[np.ndarray, np.ndarray] | None:
        """The scaled weight and the new bias; None unless both are known now."""
        old_bias, value_of = self._convolution.bias, ConstantEvaluator(m).value
        try:
            factor, shift = value_of(self._scale), value_of(self._offset)
            weight = value_of(self._convolution.weight)
            bias = np.zeros(1) if old_bias is None else value_of(old_bias).ravel()
        except NoMatchError:
            return None
        scaled = weight * factor.reshape([size or 0 for size in self._scale_shape])
        return scaled, bias * factor.ravel() + shift.ravel()

    def write(self, new: Replacement) -> None:
        """Adds the convolution and its BiasAdd, and redirects the normalized tensor."""
        output, node, shape = new.stem, self._node, self._shape
        new.stem = f"{output}/folded"
        x = node.input[0]
        if self._constants is not None:
            weight, bias = (
                new.constant(value.astype(np.float32), name=name, beside=x)
                for name, value in zip(("weight", "bias"), self._constants, strict=True)
            )
        else:
            weight, bias = self._scaled_tensors(new)
        made = new.copy(node, x, weight, name="", shape=shape)
        new.replace(new.view.index[output], new.op.BiasAdd(made, bias))

    def _scaled_tensors(self, new: Replacement) -> tuple[str, str]:
        """Tensors of the scaled weight and the new bias."""
        old, channels = self._convolution, self._shape[3:]
        factor = self._reshaped(new, "scale", self._scale, self._scale_shape)
        weight = new.op.Mul(old.weight, factor, name="weight")
        bias = self._reshaped(new, "offset", self._offset, channels)
        if old.bias is not None:
            flat = self._reshaped(new, "bias_scale", self._scale, channels)
            product = new.op.Mul(old.bias, flat, name="scaled_bias")
            bias = new.op.AddV2(product, bias, name="bias")
        return weight, bias

    @staticmethod
    def _reshaped(new: Replacement, name: str, tensor: str, shape: Shape) -> str:
        return (
            tensor
            if new.matcher.shape_of(tensor) == shape
            else new.reshape(tensor, shape, name=name)
        )
