"""What decides beyond op and dtypes which kernels run a convolution or a pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tensorflow.core.framework import node_def_pb2

from graph_passes.ir.graph_view import GraphView, Shape

CONVOLUTIONS: Mapping[str, tuple[int | None, int | None]] = {
    "Conv2D": (0, 1),
    "Conv2DBackpropInput": (None, 1),
    "Conv2DBackpropFilter": (0, None),
}
"""Op -> the inputs that are its image and its filter; None for the one that it makes."""

_OVER_SPACE = ("Conv2D", "Conv3D", "DepthwiseConv2dNative", "MaxPool", "AvgPool")


def has_groups(node: node_def_pb2.NodeDef, shape: Callable[[str], Shape | None]) -> bool:
    """Whether each filter of a convolution reads a part of the channels, as its shapes show.

    Args:
        node: one of `CONVOLUTIONS`, with the channels last.
        shape: gives the static shape of a tensor, None where it is not known.
    """
    image, weights = (
        shape(node.name if port is None else node.input[port]) for port in CONVOLUTIONS[node.op]
    )
    if not image or not weights or None in (image[-1], weights[2]):
        return False
    return image[-1] != weights[2]


def refused_off_onednn(view: GraphView) -> list[int]:
    """The nodes at which TensorFlow's own kernels for CPUs end in an error, where oneDNN's run.

    They take no channels in front of the image; none but Conv2D takes dilations (those of depthwise
    gradients do, and are counted all the same); of groups they have no gradients.
    """
    ops = [op for op in view.ops if op.startswith(_OVER_SPACE)]
    return [number for number in view.of_op(*ops) if _is_refused(view, number)]


def _is_refused(view: GraphView, number: int) -> bool:
    if view.attr(number, "data_format").s.startswith(b"NC"):
        return True
    node = view.nodes[number]
    if node.op == "Conv2D":
        return False
    is_dilated = any(rate != 1 for rate in view.attr(number, "dilations").list.i)
    return is_dilated or (node.op in CONVOLUTIONS and has_groups(node, view.shape))
