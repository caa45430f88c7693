"""Puts TensorFlow's fused kernels in the place of batch normalizations written in primitives.

`FusedBatchNormV3` takes and gives the target dtype while it keeps scale, offset and statistics in
float32 inside, so no float32 island is left between two convolutions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np
from tensorflow.core.framework import node_def_pb2, types_pb2
from tensorflow.python.framework import tensor_util

from graph_passes.kernels import KernelSupport
from graph_passes.op_registry import Slot, registered_op_type
from graph_passes.patterns.batch_norm import BatchNorm, NearMiss, find_batch_norms
from graph_passes.patterns.surgery import Proto, output_name, replace_tensors
from graph_passes.view import GraphView

FORWARD = "FusedBatchNormV3"
BACKWARD = "FusedBatchNormGradV3"


@dataclasses.dataclass(frozen=True)
class Fusion:
    """The outcome of looking for batch normalizations.

    Attributes:
        proto: the new graph, the original where nothing was fused.
        units: names of the nodes that made the outputs that fused nodes make now.
        misses: what came close.
    """

    proto: object
    units: tuple[str, ...]
    misses: tuple[NearMiss, ...]


def has_fused_kernels(support: KernelSupport) -> bool:
    """Whether both fused ops have a kernel for the device and dtype."""
    probe = node_def_pb2.NodeDef()
    probe.attr["T"].type = probe.attr["U"].type = types_pb2.DT_FLOAT
    types = [registered_op_type(op) for op in (FORWARD, BACKWARD)]
    return all(t is not None and support.has_kernel(t, Slot("T"), probe) for t in types)


def fuse_batch_norms(proto: Proto, view: GraphView, preserve: Collection[str]) -> Fusion:
    """Replaces every recognized batch normalization, with its gradient, by the fused ops.

    The fused op gives the variance over n - 1 values; Keras stores that over n, so what is stored
    is multiplied by (n - 1) / n again.

    Args:
        proto: the GraphDef or FunctionDef; it is not changed.
        view: its view.
        preserve: names of nodes that must stay.

    Returns:
        The new graph, what was fused, and near misses.
    """
    units, misses = find_batch_norms(view, preserve)
    if not units:
        return Fusion(proto, (), tuple(misses))
    redirect: dict[str, str] = {}
    inputs: dict[str, Sequence[str]] = {}
    new_nodes: list[node_def_pb2.NodeDef] = []
    for unit in units:
        _Emission(view, unit, redirect, inputs, new_nodes).emit()
    new = replace_tensors(
        proto,
        view,
        redirect=_resolved(redirect),
        inputs={name: [_final(redirect, t) for t in tensors] for name, tensors in inputs.items()},
        new_nodes=new_nodes,
        preserve=preserve,
    )
    names = tuple(view.nodes[unit.output].name for unit in units)
    return Fusion(new, names, tuple(misses))


def _final(redirect: dict[str, str], tensor: str) -> str:
    while tensor in redirect:
        tensor = redirect[tensor]
    return tensor


def _resolved(redirect: dict[str, str]) -> dict[str, str]:
    """Redirections whose target is redirected as well (two units in a row) made direct."""
    return {tensor: _final(redirect, tensor) for tensor in redirect}


class _Emission:
    """Writes the fused nodes of one unit."""

    def __init__(
        self,
        view: GraphView,
        unit: BatchNorm,
        redirect: dict[str, str],
        inputs: dict[str, Sequence[str]],
        new_nodes: list[node_def_pb2.NodeDef],
    ) -> None:
        self._view = view
        self._unit = unit
        self._redirect = redirect
        self._inputs = inputs
        self._new = new_nodes
        self._output = view.nodes[unit.output]
        self._stem = f"{self._output.name}/{FORWARD}"

    def emit(self) -> None:
        """Adds the nodes and the redirections of tensors."""
        view, unit = self._view, self._unit
        anchor = "^" + view.split(unit.x)[0]
        # A control input keeps the constant in the frame of the loop that the unit is in.
        empty = self._constant("empty", np.zeros(0, np.float32), anchor)
        fused = self._node(FORWARD, "", (unit.x, unit.gamma, unit.beta, empty, empty))
        self._set_normalization(fused, exponential=True)
        outputs = [output_name(view, fused.name, FORWARD, port) for port in range(6)]
        self._redirect[self._tensor(self._output.name, self._output.op)] = outputs[0]
        for tensor in unit.stored_mean:
            self._redirect[tensor] = outputs[1]
        if unit.stored_variance:
            population = self._population_variance(outputs[2], anchor)
            for tensor in unit.stored_variance:
                self._redirect[tensor] = population
        if unit.gradient is None:
            return
        gradient = unit.gradient
        back = self._node(
            BACKWARD, "Grad", (gradient.dy, unit.x, unit.gamma, outputs[3], outputs[4], outputs[5])
        )
        self._set_normalization(back, exponential=False)
        results = [output_name(view, back.name, BACKWARD, port) for port in range(3)]
        total = view.nodes[gradient.dx_sum]
        others = [t for t in total.input if t[0] != "^" and t not in gradient.dx_terms]
        if others:
            known = list(self._inputs.get(total.name, others))
            remaining = [t for t in known if t not in gradient.dx_terms]
            self._inputs[total.name] = [*remaining, results[0]]
        else:
            self._redirect[self._tensor(total.name, total.op)] = results[0]
        self._redirect[gradient.d_gamma] = results[1]
        self._redirect[gradient.d_beta] = results[2]

    def _tensor(self, node: str, op: str) -> str:
        return output_name(self._view, node, op, 0)

    def _node(self, op: str, suffix: str, inputs: Sequence[str]) -> node_def_pb2.NodeDef:
        name = f"{self._stem}{suffix}" if not suffix or suffix == "Grad" else suffix
        node = node_def_pb2.NodeDef(name=name, op=op, device=self._output.device, input=inputs)
        node.attr["T"].type = types_pb2.DT_FLOAT
        self._new.append(node)
        return node

    def _set_normalization(self, node: node_def_pb2.NodeDef, *, exponential: bool) -> None:
        node.attr["U"].type = types_pb2.DT_FLOAT
        node.attr["epsilon"].f = self._unit.epsilon
        node.attr["data_format"].s = b"NHWC"
        node.attr["is_training"].b = True
        if exponential:
            node.attr["exponential_avg_factor"].f = 1.0

    def _constant(self, name: str, value: np.ndarray, control: str) -> str:
        node = node_def_pb2.NodeDef(
            name=f"{self._stem}/{name}", op="Const", device=self._output.device, input=[control]
        )
        node.attr["dtype"].type = types_pb2.DT_FLOAT
        node.attr["value"].tensor.CopyFrom(tensor_util.make_tensor_proto(value))
        self._new.append(node)
        return self._tensor(node.name, "Const")

    def _population_variance(self, variance: str, anchor: str) -> str:
        """Tensor, the fused op's variance times (n - 1) / n, n = elements of x a channel."""
        sizes = [
            self._count(name, tensor)
            for name, tensor in (("size", self._unit.x), ("channels", self._unit.gamma))
        ]
        inverse = self._small("RealDiv", "inverse_count", (sizes[1], sizes[0]))
        one = self._constant("one", np.float32(1), anchor)
        factor = self._small("Sub", "factor", (one, inverse))
        return self._small("Mul", "variance", (variance, factor))

    def _count(self, name: str, tensor: str) -> str:
        size = node_def_pb2.NodeDef(
            name=f"{self._stem}/{name}", op="Size", device=self._output.device, input=[tensor]
        )
        size.attr["T"].type = types_pb2.DT_FLOAT
        size.attr["out_type"].type = types_pb2.DT_INT64
        cast = node_def_pb2.NodeDef(
            name=f"{self._stem}/{name}_float",
            op="Cast",
            device=self._output.device,
            input=[self._tensor(size.name, "Size")],
        )
        cast.attr["SrcT"].type = types_pb2.DT_INT64
        cast.attr["DstT"].type = types_pb2.DT_FLOAT
        cast.attr["Truncate"].b = False
        self._new.extend((size, cast))
        return self._tensor(cast.name, "Cast")

    def _small(self, op: str, name: str, inputs: Sequence[str]) -> str:
        node = node_def_pb2.NodeDef(
            name=f"{self._stem}/{name}", op=op, device=self._output.device, input=inputs
        )
        node.attr["T"].type = types_pb2.DT_FLOAT
        self._new.append(node)
        return self._tensor(node.name, op)
