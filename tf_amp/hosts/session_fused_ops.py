"""What each fused op of TensorFlow's remapper stands for, as a chain of plain nodes.

``parts_of`` knows every fused op that Grappler makes of float32 nodes on a CPU or a GPU, and says
so when one of them cannot be taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from tensorflow.core.framework import attr_value_pb2, node_def_pb2, types_pb2

PART_PREFIX = "TfAmpUnfused"

_CONTRACTIONS = {
    "_FusedMatMul": "MatMul",
    "_FusedConv2D": "Conv2D",
    "_FusedConv3D": "Conv3D",
    "_FusedDepthwiseConv2dNative": "DepthwiseConv2dNative",
    "_MklFusedBatchMatMulV2": "BatchMatMulV2",
}
_CONTRACTION_ATTRIBUTES = {
    "MatMul": ("transpose_a", "transpose_b"),
    "Conv2D": (
        *("strides", "padding", "explicit_paddings", "data_format", "dilations"),
        "use_cudnn_on_gpu",
    ),
    "Conv3D": ("strides", "padding", "data_format", "dilations"),
    "DepthwiseConv2dNative": ("strides", "padding", "data_format", "dilations"),
    "BatchMatMulV2": ("adj_x", "adj_y"),
}
_UNARY = frozenset({"Relu", "Relu6", "Elu", "LeakyRelu", "Tanh", "Sigmoid"})
_BINARY = {"BiasAdd": "BiasAdd", "Add": "AddV2", "Mul": "Mul"}
_BATCH_NORM_ARGUMENTS = 4

# No plain op, or no safe sequence of them, stands for these.
_WHOLE = frozenset({"_MklFusedMish", "_MklSwish", "_MklLayerNorm", "_MklFusedInstanceNorm"})


@dataclass(frozen=True)
class FusedGroup:
    """One fused node, and what stands for it.

    Attributes:
        fused: The fused node.
        parts: The plain nodes, in topological order.
        moved: Outputs that another part has now, as (old input name, new input name).
    """

    fused: node_def_pb2.NodeDef
    parts: tuple[node_def_pb2.NodeDef, ...]
    moved: tuple[tuple[str, str], ...] = ()


def is_fused(node: node_def_pb2.NodeDef) -> bool:
    """Tells whether a node was made of several float32 nodes by the remapper."""
    known = node.op in _CONTRACTIONS or node.op in _BATCH_NORMS or node.op in _WHOLE
    return known and _attribute(node, "T").type == types_pb2.DT_FLOAT


def parts_of(
    node: node_def_pb2.NodeDef,
    *,
    preserved: bool,
    in_frames: bool,
    rank_of: Callable[[str], int | None] = lambda _: None,
) -> FusedGroup | None:
    """Takes a fused node apart.

    The last op of a chain takes the name of the fused node, so that consumers and fetches are
    not touched; a batch normalization keeps its name, because its other outputs carry it.

    Args:
        node: A node for which `is_fused` holds; not changed.
        preserved: Whether its outputs must stay what they are. A batch normalization is then
            left alone, since its first output would lose the activation.
        in_frames: Whether the graph has loop frames, in which no constant can be added.
        rank_of: Gives the rank of a tensor, None where it is not known.

    Returns:
        The parts; None if the node has to stay whole.
    """
    if node.op in _CONTRACTIONS:
        return _contraction(node, in_frames, rank_of)
    if node.op in _BATCH_NORMS and not preserved:
        return _BATCH_NORMS[node.op](node)
    return None


def _attribute(node: node_def_pb2.NodeDef, name: str) -> attr_value_pb2.AttrValue:
    # Indexing the map of a message with a missing name would add it to the message.
    return node.attr[name] if name in node.attr else attr_value_pb2.AttrValue()


def _present(
    node: node_def_pb2.NodeDef, names: Iterable[str]
) -> dict[str, attr_value_pb2.AttrValue]:
    return {name: node.attr[name] for name in names if name in node.attr}


def copy_node(node: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
    """Returns a node of its own with the same content."""
    duplicate = node_def_pb2.NodeDef()
    duplicate.CopyFrom(node)
    return duplicate


class _Chain:
    """Builds the parts of one fused node, each reading the one before it."""

    def __init__(self, fused: node_def_pb2.NodeDef) -> None:
        self.fused = fused
        self.parts: list[node_def_pb2.NodeDef] = []
        self._controls = [name for name in fused.input if name.startswith("^")]

    def add(
        self, op: str, inputs: Sequence[str], label: str = "", **attributes: object
    ) -> node_def_pb2.NodeDef:
        """Appends a node on the device of the fused one; typed attributes come by keyword."""
        part = node_def_pb2.NodeDef(
            name=self._name(label or op),
            op=op,
            input=[*inputs, *(() if self.parts else self._controls)],
            device=self.fused.device,
        )
        part.attr["T"].type = types_pb2.DT_FLOAT
        for name, value in self.fused.attr.items():
            if name.startswith("_") and name != "_output_shapes":
                part.attr[name].CopyFrom(value)
        for name, value in attributes.items():
            if isinstance(value, attr_value_pb2.AttrValue):
                part.attr[name].CopyFrom(value)
            elif isinstance(value, bool):
                part.attr[name].b = value
            elif isinstance(value, float):
                part.attr[name].f = value
            elif isinstance(value, bytes):
                part.attr[name].s = value
            else:
                raise TypeError(f"attribute {name} of {op}: unexpected value {value!r}")
        self.parts.append(part)
        return part

    def add_constant(self, value: float, label: str) -> str:
        """Appends a float32 scalar and returns its name."""
        part = node_def_pb2.NodeDef(name=self._name(label), op="Const", device=self.fused.device)
        part.attr["dtype"].type = types_pb2.DT_FLOAT
        part.attr["value"].tensor.dtype = types_pb2.DT_FLOAT
        part.attr["value"].tensor.tensor_shape.SetInParent()
        part.attr["value"].tensor.float_val.append(np.float32(value))
        self.parts.append(part)
        return part.name

    def _name(self, label: str) -> str:
        # The number keeps names apart when a chain has one step twice.
        return f"{self.fused.name}/{PART_PREFIX}{len(self.parts)}{label}"

    def finish(self) -> FusedGroup:
        """Gives the last part the name of the fused node."""
        self.parts[-1].name = self.fused.name
        if "_output_shapes" in self.fused.attr:
            self.parts[-1].attr["_output_shapes"].CopyFrom(self.fused.attr["_output_shapes"])
        return FusedGroup(copy_node(self.fused), tuple(self.parts))


def _data_inputs(node: node_def_pb2.NodeDef) -> list[str]:
    return [name for name in node.input if not name.startswith("^")]


def _contraction(
    node: node_def_pb2.NodeDef, in_frames: bool, rank_of: Callable[[str], int | None]
) -> FusedGroup | None:
    op = _CONTRACTIONS[node.op]
    steps = [step.decode() for step in _attribute(node, "fused_ops").list.s]
    first, second, *arguments = _data_inputs(node)
    if _arguments_of(steps, in_frames) != len(arguments):
        return None
    padded = _attribute(node, "padding_list").list.i
    if padded or _attribute(node, "filter_format").s not in (b"", b"HWIO"):
        return None
    chain = _Chain(node)
    data_format = _attribute(node, "data_format").s
    last = chain.add(op, (first, second), **_present(node, _CONTRACTION_ATTRIBUTES[op])).name
    for step in steps:
        if step == "FusedBatchNorm":
            statistics, arguments = (
                arguments[:_BATCH_NORM_ARGUMENTS],
                arguments[_BATCH_NORM_ARGUMENTS:],
            )
            part = chain.add(
                "FusedBatchNormV3",
                (last, *statistics),
                U=attr_value_pb2.AttrValue(type=types_pb2.DT_FLOAT),
                is_training=False,
                **_present(node, ("epsilon", "data_format")),
            )
        elif step == "BiasAdd" and rank_of(arguments[0]) not in (None, 1):
            # The remapper takes the sum with a tensor [1, 1, 1, channels] for a bias as well.
            part = chain.add("AddV2", (last, arguments.pop(0)))
        elif step == "BiasAdd":
            # BiasAdd knows two layouts, named after the rank-4 ones whatever the rank is.
            layout = b"NCHW" if data_format.startswith(b"NC") else b"NHWC"
            part = chain.add("BiasAdd", (last, arguments.pop(0)), data_format=layout)
        elif step in _BINARY:
            part = chain.add(_BINARY[step], (last, arguments.pop(0)))
        elif step == "LeakyRelu":
            alpha = node.attr["leakyrelu_alpha"].f if "leakyrelu_alpha" in node.attr else 0.2
            part = chain.add("LeakyRelu", (last,), alpha=alpha)
        elif step in _GELU:
            part = _GELU[step](chain, last)
        else:
            part = chain.add(step, (last,))
        last = part.name
    return chain.finish()


def _arguments_of(steps: Sequence[str], in_frames: bool) -> int | None:
    """Counts the extra inputs of a chain of steps; None if a step cannot be taken apart."""
    count = 0
    for step in steps:
        if step in _BINARY:
            count += 1
        elif step == "FusedBatchNorm":
            count += _BATCH_NORM_ARGUMENTS
        # The constants of a GELU would need a control edge into the frame of a loop.
        elif step not in _UNARY and (in_frames or step not in _GELU):
            return None
    return count


def _gelu_exact(chain: _Chain, x: str) -> node_def_pb2.NodeDef:
    """GELU as x * Phi(x), written with Erf in the order in which the remapper looks for it."""
    scaled = chain.add("Mul", (x, chain.add_constant(float(np.sqrt(0.5)), "SqrtHalf")), "Scaled")
    erf = chain.add("Erf", (scaled.name,))
    shifted = chain.add("AddV2", (erf.name, chain.add_constant(1.0, "One")), "Shifted")
    half = chain.add("Mul", (shifted.name, chain.add_constant(0.5, "Half")), "Halved")
    return chain.add("Mul", (half.name, x), "Gelu")


def _gelu_approximate(chain: _Chain, x: str) -> node_def_pb2.NodeDef:
    """GELU by Tanh of a cubic (Hendrycks and Gimpel, 2016), in the remapper's order."""
    square = chain.add("Square", (x,))
    factor = chain.add("Mul", (chain.add_constant(0.044715, "Factor"), x), "Weighted")
    term = chain.add("Mul", (factor.name, square.name), "Term")
    total = chain.add("AddV2", (x, term.name), "Sum")
    root = chain.add_constant(float(np.sqrt(2 / np.pi)), "Root")
    tanh = chain.add("Tanh", (chain.add("Mul", (total.name, root), "Scaled").name,))
    shifted = chain.add("AddV2", (tanh.name, chain.add_constant(1.0, "One")), "Shifted")
    half = chain.add("Mul", (chain.add_constant(0.5, "Half"), shifted.name), "Halved")
    return chain.add("Mul", (half.name, x), "Gelu")


_GELU: dict[str, Callable[[_Chain, str], node_def_pb2.NodeDef]] = {
    "GeluExact": _gelu_exact,
    "GeluApproximate": _gelu_approximate,
}


def _batch_norm(node: node_def_pb2.NodeDef) -> FusedGroup | None:
    activation = _attribute(node, "activation_mode").s.decode() or "Identity"
    inputs = _data_inputs(node)
    if activation not in ("Identity", "Relu"):
        return None
    chain = _Chain(node)
    norm = chain.add(
        "FusedBatchNormV3",
        inputs[:5],
        **_present(node, ("U", "epsilon", "exponential_avg_factor", "data_format", "is_training")),
    )
    norm.name = node.name
    last = norm.name
    for side_input in inputs[5:]:
        last = chain.add("AddV2", (last, side_input)).name
    if activation == "Relu":
        last = chain.add("Relu", (last,)).name
    moved = ((node.name, last),) if last != node.name else ()
    return FusedGroup(copy_node(node), tuple(chain.parts), moved)


def _batch_norm_gradient(node: node_def_pb2.NodeDef) -> FusedGroup | None:
    activation = _attribute(node, "activation_mode").s.decode() or "Identity"
    gradient, x, scale, reserve_1, reserve_2, reserve_3, _, y = _data_inputs(node)
    if activation not in ("Identity", "Relu"):
        return None
    chain = _Chain(node)
    if activation == "Relu":
        gradient = chain.add("ReluGrad", (gradient, y)).name
    else:
        # The side output needs a node of its own, so that its readers can be told apart.
        gradient = chain.add("Identity", (gradient,)).name
    norm = chain.add(
        "FusedBatchNormGradV3",
        (gradient, x, scale, reserve_1, reserve_2, reserve_3),
        **_present(node, ("U", "epsilon", "data_format", "is_training")),
    )
    norm.name = node.name
    return FusedGroup(copy_node(node), tuple(chain.parts), ((f"{node.name}:5", gradient),))


_BATCH_NORMS: dict[str, Callable[[node_def_pb2.NodeDef], FusedGroup | None]] = {
    "_FusedBatchNormEx": _batch_norm,
    "_FusedBatchNormGradEx": _batch_norm_gradient,
}
