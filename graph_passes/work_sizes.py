"""How much work the nodes of a graph have, told from static shapes, as cost tables count it."""

from __future__ import annotations

import math

from graph_passes.costs import BROADCAST, POINTWISE, STRIDED, TRANSPOSED, OpCost
from graph_passes.view import FLOAT, GraphView, Shape

UNKNOWN_DIMENSION = 32
"""What counts for a dimension that is not known, nearly always the batch."""

UNKNOWN_ELEMENTS = 1 << 18
"""What counts for a tensor whose shape is not known: neither in a cache nor large."""

# Op of a convolution -> the axes of its filter.
_CONVOLUTIONS = {
    **{
        f"{op}{part}": 4
        for op in ("Conv2D", "DepthwiseConv2dNative")
        for part in ("", "BackpropInput", "BackpropFilter")
    },
    **dict.fromkeys(("Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2"), 5),
}
_TO_INPUT, _TO_FILTER = ("BackpropInput", "BackpropInputV2"), ("BackpropFilter", "BackpropFilterV2")


class WorkSizes:
    """Sizes of tensors and of the work of nodes, from static shapes."""

    def __init__(self, view: GraphView) -> None:
        self._view = view
        self._shapes: dict[str, Shape | None] = {}
        self._read: dict[int, list[str]] = {}

    def elements(self, tensor: str) -> int | None:
        """The number of elements of a tensor, None where its shape is not known."""
        shape = self._shape(tensor)
        if shape is None or None in shape:
            number = self._view.index[self._view.split(tensor)[0]]
            before = None
            if number in self._view.aliases:
                call, port = self._view.aliases[number]
                before = self.elements(self._view.nodes[call].input[port])
            elif self._view.kind(number).op == "Reshape":
                # A dimension of unknown size may be what a Reshape made of several known ones.
                before = self.elements(self._view.nodes[number].input[0])
            return _elements(shape) if before is None else before
        return _elements(shape)

    def variant(self, number: int) -> str:
        """The variant of its op that a node is."""
        node, op = self._view.nodes[number], self._view.kind(number).op
        if op == "MatMul":
            return TRANSPOSED if "transpose_b" in node.attr and node.attr["transpose_b"].b else ""
        if op in _CONVOLUTIONS:
            if "strides" in node.attr and max(node.attr["strides"].list.i, default=1) > 1:
                return STRIDED
            weights = self._filter(number)
            return POINTWISE if weights is not None and set(weights[:-2]) == {1} else ""
        made = self._output(number)
        if made is None:
            return ""
        read = [self._shape(name) for name in self.read(number)]
        return BROADCAST if any(shape not in (None, made) for shape in read) else ""

    def size(self, number: int, cost: OpCost) -> int | None:
        """The size of a node's work as its costs count it, None where it is not known."""
        if cost.measure == "flops":
            return self._flops(number)
        known = [self.elements(name) for name in self.read(number)]
        sizes = [size for size in (*known, _elements(self._output(number))) if size is not None]
        return max(sizes, default=None)

    def _flops(self, number: int) -> int | None:
        op = self._view.kind(number).op
        if op in _CONVOLUTIONS:
            weights, windows = self._filter(number), self._windows(number)
            if weights is None or windows is None:
                return None
            read = weights[:-2] if op.startswith("Depthwise") else weights[:-1]
            return 2 * windows * math.prod(read)
        if op == "Einsum":
            return self._einsum_flops(number)
        # A matrix product: every element made is a sum over one axis of the first factor.
        names = self.read(number)
        left = self._shape(names[0]) if names else None
        made = _elements(self._output(number))
        if left is None or len(left) < 2 or made is None:
            return None
        attr = self._view.nodes[number].attr
        # Asking a protobuf map for a key that it lacks would add the key.
        transposed = any(name in attr and attr[name].b for name in ("transpose_a", "adj_x"))
        return 2 * made * self._length(names[0], left, -2 if transposed else -1)

    def _einsum_flops(self, number: int) -> int | None:
        """One multiplication and addition for each combination of all labels' values."""
        equation = self._view.nodes[number].attr["equation"].s.decode()
        lengths: dict[str, int] = {}
        for name, axes in zip(
            self.read(number), equation.partition("->")[0].split(","), strict=True
        ):
            shape = self._shape(name)
            if shape is None or "." in axes:
                return None
            for label, length in zip(axes, shape, strict=True):
                lengths[label] = UNKNOWN_DIMENSION if length is None else length
        return 2 * math.prod(lengths.values())

    def _length(self, tensor: str, shape: Shape, axis: int) -> int:
        """The length of one axis, worked out from the elements where it alone is not known."""
        length = shape[axis]
        if length is None:
            others = [size for size in shape if size is not None]
            elements = self.elements(tensor) if len(others) == len(shape) - 1 else None
            length = (elements or 0) // (math.prod(others) or 1) or UNKNOWN_DIMENSION
        return length or UNKNOWN_DIMENSION

    def _filter(self, number: int) -> tuple[int, ...] | None:
        """The shape of a convolution's filter."""
        op, names = self._view.kind(number).op, self.read(number)
        if op.endswith(_TO_FILTER):
            shape = self._output(number)
        else:
            shape = self._shape(names[0 if op.endswith(_TO_INPUT) else 1])
        if shape is None or len(shape) != _CONVOLUTIONS[op]:
            return None
        return tuple(UNKNOWN_DIMENSION if size is None else size for size in shape)

    def _windows(self, number: int) -> int | None:
        """The elements of a convolution's result, or of the gradient of it."""
        if self._view.kind(number).op.endswith((*_TO_INPUT, *_TO_FILTER)):
            return self.elements(self.read(number)[-1])
        return _elements(self._output(number))

    def read(self, number: int) -> list[str]:
        """The float32 tensors that a node reads."""
        found = self._read.get(number)
        if found is None:
            kind = self._view.kind(number)
            slots, dtypes = kind.layout.in_slots, kind.dtypes
            names = self._view.nodes[number].input[: len(slots)]
            found = self._read[number] = [
                name for name, slot in zip(names, slots, strict=True) if dtypes[slot] == FLOAT
            ]
        return found

    def written(self, number: int) -> list[str]:
        """The float32 tensors that a node makes."""
        kind, name = self._view.kind(number), self._view.nodes[number].name
        return [
            f"{name}:{port}" if port else name
            for port, slot in enumerate(kind.layout.out_slots)
            if kind.dtypes[slot] == FLOAT
        ]

    def _output(self, number: int) -> Shape | None:
        return self._shape(self._view.nodes[number].name)

    def _shape(self, tensor: str) -> Shape | None:
        if tensor not in self._shapes:
            self._shapes[tensor] = self._view.shape(tensor)
        return self._shapes[tensor]


def _elements(shape: Shape | None) -> int | None:
    if shape is None:
        return None
    elements = 1
    for size in shape:
        elements *= UNKNOWN_DIMENSION if size is None else size
    return elements
