"""Puts TensorFlow's fused kernels in the place of batch normalizations written in primitives.

`FusedBatchNormV3` takes and gives the target dtype while it keeps scale, offset and statistics in
float32 inside, so no float32 island is left between two convolutions. A missing scale is a constant
of ones, a missing offset one of zeros; nothing reads their gradients. What the fused op cannot
stand for, by its epsilon or by what is read inside, stays in primitives as a unit in float32; and
so does the normalization of data, since rounding would come before the mean is subtracted.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from tensorflow.core.framework import node_def_pb2, types_pb2

from graph_passes.kernels import KernelSupport
from graph_passes.op_registry import Slot, registered_op_type
from graph_passes.patterns.batch_norm import BatchNorm, find_batch_norms
from graph_passes.patterns.batch_norm_gradient import Gradient
from graph_passes.patterns.edits import GraphEdits, NearMiss
from graph_passes.patterns.float32_units import Float32Unit
from graph_passes.patterns.images import Images
from graph_passes.patterns.matching import Matcher
from graph_passes.view import FLOAT

RULE = "batch-norm"
FORWARD = "FusedBatchNormV3"
BACKWARD = "FusedBatchNormGradV3"
_DATA = "the input is data, which must not be rounded before its mean is subtracted"


def has_fused_kernels(support: KernelSupport) -> bool:
    """Whether both fused ops have a kernel for the device and dtype."""
    probe = node_def_pb2.NodeDef()
    probe.attr["T"].type = probe.attr["U"].type = FLOAT
    types = [registered_op_type(op) for op in (FORWARD, BACKWARD)]
    return all(t is not None and support.has_kernel(t, Slot("T"), probe) for t in types)


def fuse_batch_norms(
    edits: GraphEdits,
    preserve: Collection[str],
    *,
    least_epsilon: float,
    has_kernels: bool,
    products: Collection[str],
) -> list[Float32Unit]:
    """Replaces every batch normalization over a batch, with its gradient, by the fused ops.

    Args:
        edits: receives the changes, the units and the near misses.
        preserve: names of nodes that must stay.
        least_epsilon: the smallest that the kernels of the device take.
        has_kernels: whether there are kernels of the fused ops for the target dtype.
        products: the ops of the allow list.

    Returns:
        The batch normalizations that no fused op can stand for.
    """
    units, misses = find_batch_norms(edits.matcher, preserve, least_epsilon)
    edits.misses.extend(misses)
    left = []
    for unit in units:
        name = edits.view.nodes[unit.output].name
        obstacle = unit.obstacle
        if not may_round(edits.matcher, unit.x, unit.gradient, products):
            obstacle = obstacle or _DATA
        if has_kernels and obstacle is None and unit.images is not None:
            _Emission(edits, unit, unit.images).emit()
            edits.take_shapes_of(unit.x, unit.nodes - {unit.output})
            edits.units.append(f"{RULE}: {name}")
            continue
        if has_kernels:
            edits.misses.append(NearMiss(name, f"not fused: {obstacle}"))
        left.append(Float32Unit(f"{RULE} in float32", unit.output, unit.nodes))
    return left


def may_round(m: Matcher, x: str, gradient: Gradient | None, products: Collection[str]) -> bool:
    """Whether the op of the gradient, which dy draws into the target dtype, may draw x with it.

    Data that comes with a mean far from 0 would lose in the rounding what the unit is to bring out.

    Args:
        m: reads the graph.
        x: tensor, the input of the unit.
        gradient: the gradient.
        products: the ops of the allow list.
    """
    is_data = gradient is not None and gradient.dx_sum is None and not m.is_made_by(x, products)
    return not is_data


def redirect_gradients(
    edits: GraphEdits, gradient: Gradient, images: Images, fused: str, x: str
) -> None:
    """Lets a fused op make the gradients of a unit.

    Args:
        edits: receives the changes.
        gradient: what the op stands for.
        images: the layout of x.
        fused: name of the op.
        x: tensor, the input of the unit.
    """
    results = [edits.output(fused, BACKWARD, port) for port in range(3)]
    for tensor, result in ((gradient.d_gamma, results[1]), (gradient.d_beta, results[2])):
        if tensor is not None:
            edits.redirect[tensor] = result
    if gradient.dx_sum is None:
        return
    total = edits.view.nodes[gradient.dx_sum]
    stem = fused.removesuffix("Grad")
    dx = images.leave(edits, f"{stem}/dx", results[0], x, total.device)
    read = edits.inputs.get(total.name, [t for t in total.input if t[0] != "^"])
    others = [tensor for tensor in read if tensor not in gradient.dx_terms]
    if gradient.dx_terms and others:
        edits.inputs[total.name] = [*others, dx]
    else:
        edits.redirect[edits.output(total.name, total.op)] = dx


class _Emission:
    """Writes the fused nodes of one unit."""

    def __init__(self, edits: GraphEdits, unit: BatchNorm, images: Images) -> None:
        self._edits = edits
        self._unit = unit
        self._images = images
        self._output = edits.view.nodes[unit.output]
        self._device = self._output.device
        self._stem = f"{self._output.name}/{FORWARD}"
        self._gamma = unit.gamma or self._filled("ones", 1.0)

    def emit(self) -> None:
        """Adds the nodes and the redirections of tensors."""
        edits, unit = self._edits, self._unit
        x = self._as_images("x", unit.x)
        beta = unit.beta or self._filled("zeros", 0.0)
        empty = self._constant("empty", np.zeros(0, np.float32))
        fused = self._normalization(FORWARD, self._stem, (x, self._gamma, beta, empty, empty))
        fused.attr["exponential_avg_factor"].f = 1.0
        outputs = [edits.output(self._stem, FORWARD, port) for port in range(6)]
        output = edits.output(self._output.name, self._output.op)
        edits.redirect[output] = self._as_input("y", outputs[0])
        for tensor in unit.stored_mean:
            edits.redirect[tensor] = outputs[1]
        if unit.stored_variance:
            population = self._population_variance(outputs[2])
            for tensor in unit.stored_variance:
                edits.redirect[tensor] = population
        if unit.gradient is not None:
            self._emit_gradient(unit.gradient, x, outputs)

    def _emit_gradient(self, gradient: Gradient, x: str, outputs: list[str]) -> None:
        edits, name = self._edits, f"{self._stem}Grad"
        dy = self._as_images("dy", gradient.dy)
        self._normalization(BACKWARD, name, (dy, x, self._gamma, *outputs[3:]))
        redirect_gradients(edits, gradient, self._images, name, self._unit.x)

    def _normalization(self, op: str, name: str, inputs: tuple[str, ...]) -> node_def_pb2.NodeDef:
        types, shapes = {"T": FLOAT, "U": FLOAT}, [self._images.sizes]
        node = self._edits.add(op, name, inputs, self._device, types, shapes)
        node.attr["epsilon"].f = self._unit.epsilon
        node.attr["data_format"].s = self._images.data_format.encode()
        node.attr["is_training"].b = True
        return node

    def _as_images(self, name: str, tensor: str) -> str:
        return self._images.enter(self._edits, f"{self._stem}/{name}", tensor, self._device)

    def _as_input(self, name: str, images: str) -> str:
        full = f"{self._stem}/{name}"
        return self._images.leave(self._edits, full, images, self._unit.x, self._device)

    def _filled(self, name: str, value: float) -> str:
        return self._constant(name, np.full(self._images.channels or 0, value, np.float32))

    def _constant(self, name: str, value: np.ndarray) -> str:
        return self._edits.add_constant(f"{self._stem}/{name}", value, self._device, self._unit.x)

    def _population_variance(self, variance: str) -> str:
        """Tensor [channels], the variance over n values; the fused op's is over n - 1.

        n is the number of elements of x a channel, found when the graph runs.
        """
        elements = self._count("elements", self._unit.x)
        channels = self._count("channels", self._gamma)
        inverse = self._small("RealDiv", "inverse_count", channels, elements)
        one = self._constant("one", np.array(1, np.float32))
        return self._small("Mul", "variance", variance, self._small("Sub", "factor", one, inverse))

    def _count(self, name: str, tensor: str) -> str:
        size = self._edits.add_single(
            "Size",
            f"{self._stem}/{name}",
            (tensor,),
            self._device,
            {"T": FLOAT, "out_type": types_pb2.DT_INT64},
        )
        return self._edits.add_single(
            "Cast",
            f"{self._stem}/{name}_float",
            (size,),
            self._device,
            {"SrcT": types_pb2.DT_INT64, "DstT": FLOAT},
        )

    def _small(self, op: str, name: str, *inputs: str) -> str:
        return self._edits.add_single(
            op, f"{self._stem}/{name}", inputs, self._device, {"T": FLOAT}
        )
