"""The sum of a matrix over its rows as a matrix product with ones."""

from __future__ import annotations

import dataclasses

import numpy as np
from tensorflow.core.framework import node_def_pb2, types_pb2

from graph_passes.config import PrecisionConfig
from graph_passes.op_lists import OpLists
from graph_passes.patterns.edits import GraphEdits
from graph_passes.patterns.low_products import LowProducts
from graph_passes.patterns.sums import control_inputs, elements
from graph_passes.view import FLOAT, Shape

FEW_ELEMENTS = 1 << 15
"""Below this, starting the product with ones costs more than the Cast that it saves (measured on
two cores: 2 us more at 4,096 elements, the same at 32,768, 10 us less at 262,144)."""
UNKNOWN_DIMENSION = 128
"""What counts for a dimension that is not known. A product in vain costs 3 us, a Cast in vain much
more, so this is on the large side."""

_INT = types_pb2.DT_INT32


def ones_products_pay(config: PrecisionConfig, lists: OpLists) -> bool:
    """Whether a product with ones is the best way to sum in the target dtype.

    It is where only the kernel of BiasAddGrad is at fault: in bfloat16 on a CPU. A compiler that
    fuses ops makes a Cast before a sum for nothing.
    """
    return (
        (config.device, config.target_dtype) == ("CPU", "bfloat16")
        and not config.fused
        and lists.list_of("BiasAddGrad") is None
        and lists.list_of("MatMul") == "allow"
        and {lists.list_of("Reshape"), lists.list_of("Fill")} == {"clear"}
    )


@dataclasses.dataclass(frozen=True)
class OnesProduct:
    """MatMul(ones[1, rows], gradient as [rows, channels]), reshaped to [channels].

    Attributes:
        edits: receives the nodes.
        products: tells which gradients go low in any case: the product would make any go low.
    """

    edits: GraphEdits
    products: LowProducts
    rule = "ones-product"

    def pays(self, number: int, tensor: str) -> bool:
        """Whether a node that sums a tensor is better replaced."""
        view = self.edits.view
        if number in self.products.ineligible or view.nodes[number].name in view.control_readers:
            return False
        shape = view.shape(tensor)
        if not shape or len(shape) < 2 or shape[-1] is None:
            return False  # mostly in the body of a loop, on small tensors: 8 us more at 16,384
        sizes = [UNKNOWN_DIMENSION if size is None else size for size in shape]
        if (elements(sizes) or 0) < FEW_ELEMENTS:
            return False
        return self.products.read(tensor)

    def add(self, node: node_def_pb2.NodeDef, tensor: str, shape: Shape) -> str:
        """Adds the sum of a tensor over all axes but the last.

        Args:
            node: the node that it is to replace.
            tensor: what to sum, of rank 2 or more.
            shape: its static shape, of which the last dimension is known.

        Returns:
            The sum, a vector.
        """
        edits, stem, device = self.edits, f"{node.name}/ones_product", node.device
        integers = _Integers(edits, stem, device, tensor)
        rows, channels = elements(shape[:-1]), shape[-1]
        flat = tensor
        if len(shape) > 2:
            dims = integers.constant("rows_shape", [-1, channels])
            flat = edits.add_reshape(f"{stem}/rows", tensor, dims, device, (rows, channels))
        count = integers.length(flat) if rows is None else integers.constant("count", [rows])
        one = edits.add_constant(f"{stem}/one", np.array(1, np.float32), device, tensor)
        dtypes = {"T": FLOAT, "index_type": _INT}
        edits.add("Fill", f"{stem}/fill", (count, one), device, dtypes, [(rows,)])
        ones, dims = edits.output(f"{stem}/fill", "Fill"), integers.constant("ones_shape", [1, -1])
        ones = edits.add_reshape(f"{stem}/ones", ones, dims, device, (1, rows))
        name, inputs = f"{stem}/MatMul", (ones, flat, *control_inputs(node))
        product = edits.add("MatMul", name, inputs, device, {"T": FLOAT}, [(1, channels)])
        product.attr["transpose_a"].b = False
        product.attr["transpose_b"].b = False
        made, dims = edits.output(name, "MatMul"), integers.constant("channels_shape", [-1])
        return edits.add_reshape(f"{stem}/channels", made, dims, device, (channels,))


@dataclasses.dataclass(frozen=True)
class _Integers:
    """Adds the integers that the shapes of one product are made of.

    Attributes:
        edits: receives the nodes.
        stem: what their names begin with.
        device: where they are placed.
        beside: a tensor in the frame that they belong to.
    """

    edits: GraphEdits
    stem: str
    device: str
    beside: str

    def constant(self, name: str, value: list[int | None]) -> str:
        array = np.array(value, np.int32)
        return self.edits.add_constant(f"{self.stem}/{name}", array, self.device, self.beside)

    def length(self, tensor: str) -> str:
        """A vector of one number: the length of the first axis of a tensor."""
        edits, name = self.edits, f"{self.stem}/count"
        dtypes = {"T": FLOAT, "out_type": _INT}
        shape = edits.add_single("Shape", f"{name}_of", (tensor,), self.device, dtypes)
        ends = [
            self.constant(f"count_{end}", [value])
            for end, value in (("begin", 0), ("end", 1), ("step", 1))
        ]
        inputs, dtypes = (shape, *ends), {"T": _INT, "Index": _INT}
        node = edits.add("StridedSlice", name, inputs, self.device, dtypes, [(1,)])
        masks = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
        for mask in masks:
            node.attr[mask].i = 0
        return edits.output(name, "StridedSlice")
