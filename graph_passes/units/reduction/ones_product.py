"""The sum of a matrix over its rows as a matrix product with ones."""

from __future__ import annotations

from graph_passes.ir.graph_view import Shape, elements
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.reduction.converted_products import ConvertedProducts
from graph_passes.units.unit_pass import UnitSearch

NAME = "ones_product"
"""Is part of the names of the nodes that take the place of a sum, see `is_ones_product`."""
FEW_ELEMENTS = 1 << 15
"""Below this, starting the product with ones costs more than the Cast that it saves (measured on
two cores: 2 us more at 4,096 elements, the same at 32,768, 10 us less at 262,144)."""
UNKNOWN_DIMENSION = 128
"""What counts for a dimension that is not known. A product in vain costs 3 us, a Cast in vain much
more, so this is on the large side."""


def is_ones_product(name: str) -> bool:
    """Whether a node of that name takes the place of a sum, or is made for one that does."""
    return f"/{NAME}" in name


def ones_products_pay(search: UnitSearch) -> bool:
    """Whether a product with ones is the best way to sum in the target dtype.

    It is where only the kernel of BiasAddGrad is at fault: in bfloat16 on a CPU. A compiler that
    fuses ops makes a Cast before a sum for nothing.
    """
    return (
        search.is_bfloat16_cpu
        and search.has_cpu_kernels
        and search.lists.list_of("BiasAddGrad") is None
        and search.lists.list_of("MatMul") == "allow"
    )


def sum_rows_pays(products: ConvertedProducts, number: int, tensor: str) -> bool:
    """Whether a node that sums a tensor over its rows is better replaced.

    Only a tensor that other products read goes low in any case; the product would make any go low.
    """
    view = products.matcher.view
    if number in products.ineligible or view.names[number] in view.awaited:
        return False
    shape = view.shape(tensor)
    if shape is None or shape[-1] is None:
        return False  # mostly in the body of a loop, on small tensors: 8 us more at 16,384
    size = elements(shape, UNKNOWN_DIMENSION) or 0
    return size >= FEW_ELEMENTS and products.read(tensor)


def sum_rows(new: Replacement, tensor: str, shape: Shape) -> str:
    """Writes MatMul(ones[1, rows], tensor as [rows, channels]), reshaped to [channels].

    The tensor is of rank 2 or more, and the last dimension of its shape is known.
    """
    stem, new.stem = new.stem, f"{new.stem}/{NAME}"
    rows, channels = elements(shape[:-1]), shape[-1]
    flat = tensor
    if len(shape) > 2:
        flat = new.reshape(tensor, (None, channels), name="rows", shape=(rows, channels))
    if rows is None:
        count = new.length(flat, 0, name="count")
    else:
        count = new.constant([rows], name="count", beside=tensor)
    one = new.constant(1.0, name="one", beside=tensor)
    filled = new.op.Fill(count, one, name="fill", shape=(rows,))
    ones = new.reshape(filled, (1, None), name="ones", shape=(1, rows))
    product = new.op.MatMul(ones, flat)
    vector = new.reshape(product, (None,), name="channels", shape=(channels,))
    new.stem = stem
    return vector
