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
from collections.abc import Callable, Collection

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.patterns.edits import GraphEdits
from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.view import FLOAT, Shape

_CONVOLUTIONS = ("Conv2D", "DepthwiseConv2dNative")
_UNKNOWN_BATCH = 32
"""What counts for a batch size that is not known."""
_WORTH = 2
"""How many times as large as the activations a weight may be. Weights that no constant holds are
multiplied in every step; measured on a CPU, that costs less than what it saves up to this size."""
_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "AddV2": np.add,
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Rsqrt": lambda value: 1 / np.sqrt(value),
    "Squeeze": np.squeeze,
}


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


def find_convolution(m: Matcher, x: str, preserve: Collection[str]) -> Convolution | None:
    """The convolution that makes a tensor, if a batch normalization may be folded into it.

    Args:
        m: reads the graph.
        x: the tensor that is normalized, [batch, height, width, channels].
        preserve: names of nodes that must stay.
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
        if len(m.readers(number)) != 1 or node.name in m.view.control_readers:
            return None
        if node.name in preserve:
            return None
    weight = m.tensor(last, 1)
    shape = m.view.shape(weight)
    if shape is None or len(shape) != 4 or None in shape:
        return None
    return Convolution(last, weight, tuple(size or 0 for size in shape), bias)


def fold_batch_norm(
    edits: GraphEdits,
    convolution: Convolution,
    output: int,
    scale: str,
    offset: str,
    shape: Shape,
) -> bool:
    """Puts a convolution with scaled weights in the place of a batch normalization.

    Args:
        edits: receives the changes.
        convolution: what is normalized.
        output: node that makes the normalized tensor.
        scale: tensor of float32, [channels] or the same with leading dimensions of 1.
        offset: tensor, likewise.
        shape: that of the normalized tensor.

    Returns:
        Whether it was done; False where scaling the weights would cost more than it saves.
    """
    emission = _Emission(edits, convolution, output, shape)
    constants = emission.scaled_constants(scale, offset)
    if constants is not None:
        emission.emit(*constants)
        return True
    batch, *sizes = (1 if size is None else size for size in shape)
    elements = math.prod(sizes) * (_UNKNOWN_BATCH if shape[0] is None else batch)
    if None in shape[1:] or math.prod(convolution.weight_shape) > _WORTH * elements:
        return False
    emission.emit(*emission.scaled_tensors(scale, offset))
    return True


class _Emission:
    """Writes the nodes of one folded convolution."""

    def __init__(
        self, edits: GraphEdits, convolution: Convolution, output: int, shape: Shape
    ) -> None:
        self._edits = edits
        self._convolution = convolution
        self._node = edits.view.nodes[convolution.node]
        self._output = edits.view.nodes[output]
        self._shape = shape
        self._stem = f"{self._output.name}/folded"
        depthwise = self._node.op == "DepthwiseConv2dNative"
        # The channels of a depthwise convolution's result are numbered by input channel first.
        self._scale_shape = convolution.weight_shape[2:] if depthwise else shape[3:]

    def scaled_constants(self, scale: str, offset: str) -> tuple[str, str] | None:
        """Tensors of the scaled weight and the new bias; None unless both are known now."""
        m, old_bias = Matcher(self._edits.view), self._convolution.bias
        try:
            factor, shift = _evaluate(m, scale), _evaluate(m, offset)
            weight = _evaluate(m, self._convolution.weight)
            bias = np.zeros(1) if old_bias is None else _evaluate(m, old_bias).ravel()
        except NoMatchError:
            return None
        scaled = weight * factor.reshape([size or 0 for size in self._scale_shape])
        shifted = bias * factor.ravel() + shift.ravel()
        return self._constant("weight", scaled), self._constant("bias", shifted)

    def scaled_tensors(self, scale: str, offset: str) -> tuple[str, str]:
        """Tensors of the scaled weight and the new bias, computed in every step."""
        channels = self._shape[3:]
        factor = self._reshaped("scale", scale, self._scale_shape)
        weight = self._small("Mul", "weight", self._convolution.weight, factor)
        bias = self._reshaped("offset", offset, channels)
        if self._convolution.bias is not None:
            flat = self._reshaped("bias_scale", scale, channels)
            product = self._small("Mul", "scaled_bias", self._convolution.bias, flat)
            bias = self._small("AddV2", "bias", product, bias)
        return weight, bias

    def emit(self, weight: str, bias: str) -> None:
        """Adds the convolution and its BiasAdd, and redirects the normalized tensor."""
        edits, node, device = self._edits, self._node, self._output.device
        copy = edits.add(node.op, self._stem, (), device, {}, [self._shape])
        for name, value in node.attr.items():
            copy.attr[name].CopyFrom(value)
        controls = [name for name in node.input if name[0] == "^"]
        copy.input.extend([node.input[0], weight, *controls])
        name = f"{self._stem}/BiasAdd"
        inputs = (edits.output(self._stem, node.op), bias)
        added = edits.add("BiasAdd", name, inputs, device, {"T": FLOAT}, [self._shape])
        added.attr["data_format"].s = b"NHWC"
        normalized = edits.output(self._output.name, self._output.op)
        edits.redirect[normalized] = edits.output(name, "BiasAdd")

    def _constant(self, name: str, value: np.ndarray) -> str:
        return self._edits.add_constant(
            f"{self._stem}/{name}",
            value.astype(np.float32),
            self._output.device,
            self._node.input[0],
        )

    def _reshaped(self, name: str, tensor: str, shape: Shape) -> str:
        if self._edits.view.shape(tensor) == shape:
            return tensor
        sizes = self._edits.add_constant(
            f"{self._stem}/{name}_shape",
            np.array(shape, np.int32),
            self._output.device,
            self._node.input[0],
        )
        dtypes = {"T": FLOAT, "Tshape": types_pb2.DT_INT32}
        name = f"{self._stem}/{name}"
        self._edits.add("Reshape", name, (tensor, sizes), self._output.device, dtypes, [shape])
        return self._edits.output(name, "Reshape")

    def _small(self, op: str, name: str, *inputs: str) -> str:
        return self._edits.add_single(
            op, f"{self._stem}/{name}", inputs, self._output.device, {"T": FLOAT}
        )


def _evaluate(m: Matcher, tensor: str) -> np.ndarray:
    """The value of what few element-wise ops make of constants.

    Raises:
        NoMatchError: it is made of something else.
    """
    number = m.maker(tensor)
    op, inputs = m.op(number), m.inputs(number)
    if op == "Const":
        return m.constant(tensor)
    if op == "Identity":
        return _evaluate(m, inputs[0])
    if op == "Reshape":
        return _evaluate(m, inputs[0]).reshape(_evaluate(m, inputs[1]))
    if op not in _FUNCTIONS:
        raise NoMatchError(f"{m.node(number).name!r} is {op}, whose value is not known")
    return _FUNCTIONS[op](*(_evaluate(m, name) for name in inputs))
