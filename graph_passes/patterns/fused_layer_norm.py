"""Puts TensorFlow's fused kernels in the place of layer normalizations on a GPU.

A layer normalization is a batch normalization of [1, rows, size, 1] in which every row is a
channel: `FusedBatchNormV3` with a scale of 1 and an offset of 0 makes the normalized rows, in and
out in the target dtype, with statistics in float32. The stored scale and offset are applied
behind it. TensorFlow's own Keras layers do the same on GPUs.

The gradients of scale and offset are sums over rows, by `BiasAddGrad`, which adds up in float32 on
a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.patterns.batch_norm import MIN_EPSILON
from graph_passes.patterns.edits import GraphEdits, NearMiss
from graph_passes.patterns.fused_batch_norm import BACKWARD, FORWARD
from graph_passes.patterns.layer_norm import Norm
from graph_passes.patterns.layer_norm_algebra import ParameterSums, normalized_size, prove
from graph_passes.patterns.layer_norm_gradient import NormGradient
from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.patterns.norms import FoundNorm
from graph_passes.view import FLOAT, Shape

RULE = "fused-layer-norm"
_INT = types_pb2.DT_INT32
_DEEPEST_IDLE = 5


def fuse_layer_norms(
    edits: GraphEdits, matcher: Matcher, norms: Iterable[FoundNorm], preserve: Collection[str]
) -> list[FoundNorm]:
    """Replaces layer normalizations over the last axes, with their gradients, by fused ops.

    Args:
        edits: receives the changes, the units and the near misses.
        matcher: reads the graph.
        norms: the normalizations in it.
        preserve: names of nodes that must stay.

    Returns:
        The normalizations that were not replaced.
    """
    left = []
    for found in norms:
        norm, gradient = found.forward, found.gradient
        name = matcher.node(norm.output).name
        if not norm.is_centred:
            left.append(found)  # no fused op leaves the mean in
            continue
        try:
            if norm.weights is not None:
                raise NoMatchError("the statistics are weighted")
            if norm.epsilon < MIN_EPSILON["GPU"]:
                raise NoMatchError(f"epsilon {norm.epsilon:g} is below {MIN_EPSILON['GPU']:g}")
            sums = prove(matcher, norm, gradient)
            _require_closed(matcher, found, sums, preserve)
        except NoMatchError as miss:
            edits.misses.append(NearMiss(name, f"not fused: {miss}"))
            left.append(found)
        else:
            _Emission(edits, matcher, norm).emit(gradient, sums)
            edits.take_shapes_of(norm.x, found.inside - {norm.output})
            edits.units.append(f"{RULE}: {name}")
    return left


def _require_closed(
    m: Matcher, norm: FoundNorm, sums: ParameterSums, preserve: Collection[str]
) -> None:
    """Nothing outside may read, fetch or wait for what will no longer be computed."""
    replaced = {*norm.inside, *sums.gamma, *sums.beta}
    ends = {norm.forward.output, *sums.gamma, *sums.beta}
    if norm.gradient is not None:
        ends.add(norm.gradient.dx_sum or norm.forward.output)
    for number in replaced:
        node = m.node(number)
        if node.name in preserve:
            raise NoMatchError(f"{node.name!r} is to be preserved")
        awaited = [name[1:] for name in node.input if name[0] == "^"]
        if not {m.view.index[name] for name in awaited} <= replaced:
            raise NoMatchError(f"{node.name!r} waits for {awaited[0]!r}")
        for waiting in m.view.control_readers.get(node.name, ()):
            if waiting not in replaced and not _serves(m, waiting, replaced):
                raise NoMatchError(f"{m.node(waiting).name!r} waits for {node.name!r}")
        if number in ends:
            if m.view.shape(m.output(number)) is None:
                raise NoMatchError(f"the shape of {node.name!r} is not known")
            continue
        for reader in m.readers(number):
            if (
                reader in replaced
                or m.op(reader) in ("Shape", "ShapeN")
                or _is_idle(m, reader, preserve)
            ):
                continue
            raise NoMatchError(f"{m.node(reader).name!r} outside the unit reads {node.name!r}")


def _is_idle(
    m: Matcher, number: int, preserve: Collection[str], depth: int = _DEEPEST_IDLE
) -> bool:
    """Whether nothing comes of a node: a gradient for what needs none.

    Should somebody fetch it all the same, the primitives are there still, since it reads them.
    """
    name = m.node(number).name
    if name in preserve or name in m.view.control_readers or not depth:
        return False
    if not m.view.layout(number).out_slots:
        return False  # the result of a function, or an op that only has an effect
    return all(_is_idle(m, reader, preserve, depth - 1) for reader in m.readers(number))


def _serves(m: Matcher, number: int, inside: Collection[int]) -> bool:
    """Whether a node is a constant that only nodes inside read."""
    return m.op(number) == "Const" and set(m.readers(number)) <= set(inside)


class _Emission:
    """Writes the fused nodes of one unit."""

    def __init__(self, edits: GraphEdits, matcher: Matcher, norm: Norm) -> None:
        self._edits = edits
        self._m = matcher
        self._norm = norm
        node = edits.view.nodes[norm.output]
        self._device = node.device
        self._stem = f"{node.name}/{FORWARD}"
        self._size = normalized_size(matcher, norm)
        self._shape = edits.view.shape(norm.x) or ()
        leading = self._shape[: len(self._shape) - len(norm.axes)]
        known = [size for size in leading if size is not None]
        self._rows = math.prod(known) if len(known) == len(leading) else None
        self._images: Shape = (1, self._rows, self._size, 1)

    def emit(self, gradient: NormGradient | None, sums: ParameterSums) -> None:
        """Adds the nodes and the redirections of tensors."""
        edits, norm = self._edits, self._norm
        x = self._as_images("x", norm.x)
        ones, zeros = self._filled("ones", x, 1.0), self._filled("zeros", x, 0.0)
        empty = self._constant("empty", np.zeros(0, np.float32))
        self._normalization(FORWARD, self._stem, (x, ones, zeros, empty, empty))
        statistics = [edits.output(self._stem, FORWARD, port) for port in range(3, 6)]
        rows = edits.output(self._stem, FORWARD)
        normalized = output = self._as_input("normalized", rows)
        if norm.gamma is not None:
            output = self._join("Mul", "scaled", output, norm.gamma)
        if norm.beta is not None:
            output = self._join("AddV2", "shifted", output, norm.beta)
        edits.redirect[self._m.output(norm.output)] = output
        if gradient is None:
            return
        if gradient.dx_sum is not None:
            self._emit_input_gradient(gradient, gradient.dx_sum, x, ones, statistics)
        for number in sums.gamma:
            self._emit_sum(number, self._join("Mul", "weighted", gradient.dy, normalized))
        for number in sums.beta:
            self._emit_sum(number, gradient.dy)

    def _emit_input_gradient(
        self, gradient: NormGradient, total: int, x: str, ones: str, statistics: list[str]
    ) -> None:
        edits, norm, name = self._edits, self._norm, f"{self._stem}Grad"
        dy = gradient.dy
        if norm.gamma is not None:
            dy = self._join("Mul", "dy_scaled", dy, norm.gamma)
        inputs = (self._as_images("dy", dy), x, ones, *statistics)
        self._normalization(BACKWARD, name, inputs)
        dx = self._as_input("dx", edits.output(name, BACKWARD))
        node = edits.view.nodes[total]
        read = edits.inputs.get(node.name, self._m.inputs(total))
        others = [tensor for tensor in read if tensor not in gradient.dx_terms]
        if others:
            edits.inputs[node.name] = [*others, dx]
        else:
            edits.redirect[self._m.output(total)] = dx

    def _emit_sum(self, number: int, tensor: str) -> None:
        """Replaces a sum over all rows."""
        edits, node = self._edits, self._m.node(number)
        if self._m.output(number) in edits.redirect:
            return  # two units share dy, and with it its sum
        shape = edits.view.shape(self._m.output(number)) or ()
        stem = f"{node.name}/BiasAddGrad"
        rows = tensor
        if len(self._norm.axes) > 1:
            flat = self._named_constant(f"{stem}/rows_shape", np.array([-1, self._size], np.int32))
            sizes = (self._rows, self._size)
            rows = edits.add_reshape(f"{stem}/rows", tensor, flat, self._device, sizes)
            edits.listed[f"{stem}/rows"] = "infer"  # or its reader would not follow what is low
        gradient = edits.add(
            "BiasAddGrad", stem, (rows,), self._device, {"T": FLOAT}, [(self._size,)]
        )
        gradient.attr["data_format"].s = b"NHWC"
        edits.redirect[self._m.output(number)] = edits.add_reshape(
            f"{stem}/shaped",
            edits.output(stem, "BiasAddGrad"),
            self._named_constant(f"{stem}/shape", np.array(shape, np.int32)),
            self._device,
            shape,
        )

    def _as_images(self, name: str, tensor: str) -> str:
        """A tensor of x's shape as [1, rows, size, 1]."""
        wanted = np.array([1, -1, self._size, 1], np.int32)
        return self._reshape(name, tensor, self._constant(f"{name}_shape", wanted), self._images)

    def _as_input(self, name: str, tensor: str) -> str:
        """A tensor [1, rows, size, 1] in the shape of x."""
        full = f"{self._stem}/{name}"
        return self._edits.add_reshape_like(full, tensor, self._norm.x, self._device)

    def _filled(self, name: str, images: str, value: float) -> str:
        """A tensor [rows] of one value."""
        edits, full = self._edits, f"{self._stem}/{name}"
        if self._rows is not None:
            tensor = self._constant(name, np.array(value, np.float32))
            shape = edits.new_nodes[-1].attr["value"].tensor.tensor_shape
            shape.dim.add(size=self._rows)
            return tensor
        sizes = self._shape_of(f"{name}/sizes", images)
        bounds = [
            self._constant(f"{name}/{bound}", np.array([at], np.int32))
            for bound, at in (("begin", 1), ("end", 2), ("stride", 1))
        ]
        rows = edits.add_single(
            "StridedSlice",
            f"{full}/rows",
            (sizes, *bounds),
            self._device,
            {"T": _INT, "Index": _INT},
        )
        one = self._constant(f"{name}/value", np.array(value, np.float32))
        dtypes = {"T": FLOAT, "index_type": _INT}
        edits.add("Fill", full, (rows, one), self._device, dtypes, [(None,)])
        return edits.output(full, "Fill")

    def _shape_of(self, name: str, tensor: str) -> str:
        dtypes = {"T": FLOAT, "out_type": _INT}
        return self._edits.add_single(
            "Shape", f"{self._stem}/{name}", (tensor,), self._device, dtypes
        )

    def _normalization(self, op: str, name: str, inputs: tuple[str, ...]) -> None:
        types = {"T": FLOAT, "U": FLOAT}
        node = self._edits.add(op, name, inputs, self._device, types, [self._images])
        node.attr["epsilon"].f = self._norm.epsilon
        node.attr["data_format"].s = b"NCHW"
        node.attr["is_training"].b = True
        if op == FORWARD:
            node.attr["exponential_avg_factor"].f = 1.0

    def _join(self, op: str, name: str, left: str, right: str) -> str:
        full = f"{self._stem}/{name}"
        self._edits.add(op, full, (left, right), self._device, {"T": FLOAT}, [self._shape])
        return self._edits.output(full, op)

    def _reshape(self, name: str, tensor: str, wanted: str, shape: Shape) -> str:
        return self._edits.add_reshape(f"{self._stem}/{name}", tensor, wanted, self._device, shape)

    def _constant(self, name: str, value: np.ndarray) -> str:
        return self._named_constant(f"{self._stem}/{name}", value)

    def _named_constant(self, name: str, value: np.ndarray) -> str:
        return self._edits.add_constant(name, value, self._device, self._norm.x)
