"""How much work the nodes of a graph have, told from static shapes, as cost tables count it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

from graph_passes.coloring.ways import is_turned
from graph_passes.ir.graph_view import FLOAT, GraphView, Shape, elements
from graph_passes.ops.node_types import NodeType
from graph_passes.ops.op_types import FILTER_AND_BIAS
from graph_passes.policy.config import UNKNOWN_DIMENSION
from graph_passes.policy.cost_table import OpCost
from graph_passes.policy.op_classes import ops_of

UNKNOWN_ELEMENTS = 1 << 18
"""What counts for a tensor whose shape is not known: neither in a cache nor large."""

# Op of a convolution -> the axes of its filter.
CONVOLUTIONS = {
    **{
        f"{op}{part}": 4
        for op in ("Conv2D", "DepthwiseConv2dNative")
        for part in ("", "BackpropInput", "BackpropFilter")
    },
    FILTER_AND_BIAS: 4,
    **dict.fromkeys(("Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2"), 5),
}
PRODUCTS = ops_of("matrix_products").union(CONVOLUTIONS)
"""The ops whose work is more than a pass over what they read and write."""
LANES = 16
"""oneDNN's kernels work on so many channels at once, in either dtype: a convolution of 32 to 3
channels (32 x 64 x 64 pixels) takes 10 ms in float32, 3 in bfloat16, one of 3 to 32 2.9 and 2.2."""
_ROWS = frozenset(("TensorListConcat", "TensorListConcatV2"))
TO_INPUT = ("BackpropInput", "BackpropInputV2")
TO_FILTER = ("BackpropFilter", "BackpropFilterV2", FILTER_AND_BIAS)


class WorkSizes:
    """Sizes of tensors and of the work of nodes, from static shapes.

    Tensors go by their numbers, see `GraphView.tensors`.

    Attributes:
        view: the graph.
    """

    def __init__(self, view: GraphView, unknown: int = UNKNOWN_DIMENSION) -> None:
        """Reads a graph; `unknown` is the length that counts for a dimension not known."""
        self.view, self._unknown = view, unknown
        self._is_float = bytes(view.is_float[view.targets])  # of edges
        self._nodes = len(view.nodes)
        self._elements: dict[int, int | None] = {}
        self._assumed: dict[int, float] = {}  # how many lengths in that number are not known

    def read(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The float32 tensors that nodes read.

        Args:
            numbers: of the nodes; [n].

        Returns:
            The tensors of all of them; and for each tensor the place of its node in `numbers`.
        """
        starts, ends = (np.asarray(self.view.edge_starts)[numbers + step] for step in (0, 1))
        counts = ends - starts
        of = np.repeat(np.arange(len(numbers)), counts)
        edges = np.arange(len(of)) + (ends - np.cumsum(counts))[of]
        is_float = np.frombuffer(self._is_float, bool)[edges]
        return np.asarray(self.view.tensors)[edges[is_float]], of[is_float]

    def written(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The float32 tensors that nodes make, in the form of those that they read."""
        node_types = np.asarray(self.view.node_type_of)[numbers].tolist()
        ports = [_float_outputs(self.view.node_types[node_type]) for node_type in node_types]
        of = np.repeat(np.arange(len(numbers)), [len(of_node) for of_node in ports])
        flat = np.array([*itertools.chain.from_iterable(ports)], np.int64)
        return numbers[of] + flat * self._nodes, of

    def counted(self, tensors: np.ndarray) -> np.ndarray:
        """The numbers of elements of tensors, `UNKNOWN_ELEMENTS` where that is not known; int64."""
        sizes = map(self.elements, tensors.tolist())
        return np.array([UNKNOWN_ELEMENTS if size is None else size for size in sizes], np.int64)

    def elements(self, tensor: int) -> int | None:
        """The number of elements of a tensor, None where its shape is not known.

        Of what is reshaped, and of the factors of a product, more may be known than of the shape
        that comes out: the rows of a Tensordot's product count for those of all its axes.
        """
        known = self._elements
        pending = [] if tensor in known else [(tensor, False)]
        while pending:
            step, has_makers = pending.pop()
            if has_makers:
                known[step] = self._told_by(self._of_as_many(step), step)
            elif step not in known:
                shape = self.shape(step)
                known[step] = self._first_guess(step, shape)  # for a way that leads back here, too
                self._assumed[step] = math.inf if shape is None else shape.count(None)
                if shape is None or None in shape:
                    pending.append((step, True))
                    pending += [(maker, False) for maker in self._of_as_many(step)]
        return known[tensor]

    def _first_guess(self, tensor: int, shape: Shape | None) -> int | None:
        """The elements of a tensor as its own shape tells them.

        Of the rows of a list's elements neither those of one are known nor how many there are.
        """
        size = self._product(shape)
        is_unknown = shape is not None and shape[:1] == (None,)
        if size and is_unknown and self.view.node_type(tensor % self._nodes).op in _ROWS:
            return size * UNKNOWN_DIMENSION
        return size

    def _told_by(self, makers: Sequence[int], tensor: int) -> int | None:
        """The elements of a tensor, once those of what tells them are known."""
        if len(makers) == 2:
            lengths = self._lengths(tensor % self._nodes)
            return self._elements[tensor] if lengths is None else lengths[0] * lengths[2]
        if not makers:
            return self._elements[tensor]
        # Of fewer lengths that are not known one may stand for several, unless more is known.
        tells_more = _known(self.shape(tensor)) > _known(self.shape(makers[0]))
        if tells_more and self._assumed[makers[0]] > self._assumed[tensor]:
            return self._elements[tensor]
        self._assumed[tensor] = self._assumed[makers[0]]
        return self._elements[makers[0]]

    def _of_as_many(self, tensor: int) -> Sequence[int]:
        """Another tensor of as many elements, or the two matrices that a tensor is made of."""
        view, number = self.view, tensor % self._nodes
        start = view.edge_starts[number]
        if number in view.aliases:
            call, port = view.aliases[number]
            return (view.tensors[view.edge_starts[call] + port],)
        op = view.node_type(number).op
        if op == "MatMul":
            return view.tensors[start : start + 2]
        if (like := self._summed_like(number)) is not None:
            return (like,)
        return (view.tensors[start],) if op == "Reshape" else ()

    def _summed_like(self, number: int) -> int | None:
        """The operand whose gradient a Sum over the axes that broadcasting repeated it on is.

        Where shapes are not known there is such a Sum behind every binary op, and most of them have
        nothing to add up: the kernel then hands on what it reads.
        """
        view = self.view
        if view.node_type(number).op != "Sum":
            return None
        port, maker = divmod(view.tensors[view.edge_starts[number] + 1], self._nodes)
        if view.node_type(maker).op != "BroadcastGradientArgs":
            return None
        shape = view.tensors[view.edge_starts[maker] + port] % self._nodes
        if view.node_type(shape).op == "StridedSlice":  # the axes that count matrices
            shape = view.tensors[view.edge_starts[shape]] % self._nodes
        if view.node_type(shape).op != "Shape":
            return None
        return view.tensors[view.edge_starts[shape]]

    def _lengths(self, product: int) -> tuple[int, int, int] | None:
        """How many rows, terms of each sum, and columns a MatMul has; None if that is not known."""
        left, right = self._of_as_many(product)
        of_left, of_right, made = (self.shape(tensor) for tensor in (left, right, product))
        of_right = of_right or (None, None)
        if of_left is None or made is None or {len(of_left), len(of_right), len(made)} != {2}:
            return None
        if is_turned(self.view, product, 0):
            of_left = of_left[::-1]
        if is_turned(self.view, product, 1):
            of_right = of_right[::-1]
        rows, terms, columns = made[0] or of_left[0], of_left[1] or of_right[0], made[1]
        columns = columns or of_right[1]
        in_left, in_right = self._elements.get(left) or 0, self._elements.get(right) or 0
        terms = terms or in_right // (columns or in_right or 1) or self._unknown
        return rows or in_left // terms or self._unknown, terms, columns or self._unknown

    def size(self, number: int, cost: OpCost) -> int | None:
        """The size of a node's work as its costs count it, None where it is not known."""
        if cost.measure == "flops":
            return self._kernel_flops(number)
        known = [self.elements(tensor) for tensor in (*self.read_by(number), number)]
        if known[0] is not None and known[0] == known[-1] and self._summed_like(number) is not None:
            return 0
        return max((size for size in known if size is not None), default=None)

    def _kernel_flops(self, number: int) -> int | None:
        """The arithmetic of a node as its kernel does it: channels that are made fill all lanes."""
        op, flops = self.view.node_type(number).op, self.flops(number)
        if flops is None or op not in CONVOLUTIONS or op.startswith("Depthwise"):
            return flops
        made = (self.filter(number) or (1, 1))[-2 if op.endswith(TO_INPUT) else -1]
        return flops // made * math.ceil(made / LANES) * LANES if made else flops

    def flops(self, number: int) -> int | None:
        """The arithmetic of a product or convolution; None of others, or of unknown shapes."""
        op = self.view.node_type(number).op
        if op not in PRODUCTS:
            return None
        if op in CONVOLUTIONS:
            weights, windows = self.filter(number), self._windows(number)
            if weights is None or windows is None:
                return None
            read = weights[:-2] if op.startswith("Depthwise") else weights[:-1]
            return 2 * windows * math.prod(read)
        if op == "Einsum":
            return self._einsum_flops(number)
        if op == "MatMul":
            for factor in self.read_by(number):
                self.elements(factor)
            lengths = self._lengths(number)
            return None if lengths is None else 2 * math.prod(lengths)
        # A matrix product: every element made is a sum over one axis of the first factor.
        made, summed = self._product(self.shape(number)), self._summed_axis(number)
        if made is None or summed is None:
            return None
        tensor, left, axis = summed
        return 2 * made * self._length(tensor, left, axis)

    def sides(self, number: int) -> tuple[int | None, ...]:
        """The lengths that the matrix units of a device work in blocks of.

        Returns:
            Rows, summed axis and columns of a matrix product; input and output channels of a
            convolution; () of other nodes and of unknown ranks. None is a length that varies.
        """
        op = self.view.node_type(number).op
        if op in CONVOLUTIONS:
            weights = self.filter(number)
            return weights[-2:] if weights and not op.startswith("Depthwise") else ()
        made = self.shape(number)
        if op not in PRODUCTS or op == "Einsum" or made is None or len(made) < 2:
            return ()
        summed = self._summed_axis(number)
        return () if summed is None else (made[-2], summed[1][summed[2]], made[-1])

    def _summed_axis(self, number: int) -> tuple[int, Shape, int] | None:
        """The first factor of a matrix product, its shape, and the axis that is summed over."""
        factors = self.read_by(number)
        left = self.shape(factors[0]) if factors else None
        if left is None or len(left) < 2:
            return None
        return factors[0], left, -2 if is_turned(self.view, number, 0) else -1

    def _einsum_flops(self, number: int) -> int | None:
        """One multiplication and addition for each combination of all labels' values."""
        equation = self.view.attr(number, "equation").s.decode()
        lengths: dict[str, int] = {}
        for tensor, axes in zip(
            self.read_by(number), equation.partition("->")[0].split(","), strict=True
        ):
            shape = self.shape(tensor)
            if shape is None or "." in axes:
                return None
            for label, length in zip(axes, shape, strict=True):
                lengths[label] = self._unknown if length is None else length
        return 2 * math.prod(lengths.values())

    def _length(self, tensor: int, shape: Shape, axis: int) -> int:
        """The length of one axis, worked out from the elements where it alone is not known."""
        length = shape[axis]
        if length is None:
            others = [size for size in shape if size is not None]
            total = self.elements(tensor) if len(others) == len(shape) - 1 else None
            length = (total or 0) // (math.prod(others) or 1)
        return length or self._unknown

    def filter(self, number: int) -> tuple[int, ...] | None:
        """The shape of a convolution's filter."""
        op, read = self.view.node_type(number).op, self.read_by(number)
        if op.endswith(TO_FILTER):
            shape = self.shape(number)
        else:
            shape = self.shape(read[0 if op.endswith(TO_INPUT) else 1])
        if shape is None or len(shape) != CONVOLUTIONS[op]:
            return None
        return tuple(self._unknown if size is None else size for size in shape)

    def _windows(self, number: int) -> int | None:
        """The elements of a convolution's result, or of the gradient of it."""
        if self.view.node_type(number).op.endswith((*TO_INPUT, *TO_FILTER)):
            return self.elements(self.read_by(number)[-1])
        return self._product(self.shape(number))

    def _product(self, shape: Shape | None) -> int | None:
        return None if shape is None else elements(shape, self._unknown)

    def read_by(self, number: int) -> list[int]:
        """The float32 tensors that a node reads."""
        start, end = self.view.edge_starts[number : number + 2]
        return list(itertools.compress(self.view.tensors[start:end], self._is_float[start:end]))

    def shape(self, tensor: int) -> Shape | None:
        """The static shape of a tensor, that of a node's first output by the node's number."""
        port, number = divmod(tensor, self._nodes)
        shapes = self.view.output_shapes(number)
        return shapes[port] if port < len(shapes) else None


def _known(shape: Shape | None) -> int:
    """The product of the lengths of a shape that are known, 0 where its rank is not."""
    return 0 if shape is None else math.prod(size for size in shape if size is not None)


@functools.lru_cache(maxsize=4096)
def _float_outputs(node_type: NodeType) -> list[int]:
    """The output ports of a node type that are float32."""
    slots = enumerate(node_type.layout.out_slots)
    return [port for port, slot in slots if node_type.dtypes[slot] == FLOAT]
