"""The sum of a matrix over its rows as a matrix product with ones."""

from __future__ import annotations

from collections.abc import Collection

from graph_passes.ir.adjacency import walk
from graph_passes.ir.graph_view import Shape, elements
from graph_passes.rewriter.matcher import MOVES
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.unit_pass import UnitSearch

NAME = "ones_product"
"""Is part of the names of the nodes that take the place of a sum, see `is_ones_product`."""
FEW_ELEMENTS = 1 << 15
"""Below this, starting the product with ones costs more than the Cast that it saves (measured on
two cores: 2 us more at 4,096 elements, the same at 32,768, 10 us less at 262,144)."""
_UNKNOWN_DIMENSION = 128
"""What counts at the least for a dimension that is not known. A product in vain costs 3 us, a Cast
in vain much more, so this is on the large side."""

FEW_CHANNELS = 32
"""Up to so many, oneDNN's product is slow on single rows: 2^23 elements of 8 channels take 20.9 ms,
and 3.5 with 32 rows in one, of 16 channels 10.8 and 3.5, of 32 channels 3.3 and 2.0, of 64 no less
(two cores with AMX)."""
MOST_ROWS_IN_ONE = 128
"""More gain nothing, and their sums are one more tensor to read."""


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


def sum_rows_pays(
    search: UnitSearch, ineligible: Collection[int], number: int, tensor: str
) -> bool:
    """Whether a node that sums a tensor over its rows is better replaced.

    Only a tensor that other products read goes low in any case; the product would make any go low.
    What is ineligible, by number, goes low in none.
    """
    view = search.edits.view
    if number in ineligible or view.names[number] in view.awaited:
        return False
    shape = view.shape(tensor)
    if shape is None or shape[-1] is None:
        return False  # mostly in the body of a loop, on small tensors: 8 us more at 16,384
    size = elements(shape, max(_UNKNOWN_DIMENSION, search.config.unknown_dimension)) or 0
    return size >= FEW_ELEMENTS and _is_read_low(search, ineligible, tensor)


def _is_read_low(search: UnitSearch, ineligible: Collection[int], tensor: str) -> bool:
    """Whether a product that goes low reads a tensor, itself or behind ops that only move it."""
    m = search.edits.matcher

    def readers(tensor: str) -> list[int]:
        found = [reader for reader in m.readers(m.maker(tensor)) if m.reads(reader, tensor)]
        return [reader for reader in found if reader not in ineligible]

    def moved(tensor: str) -> list[str]:
        return [m.output(reader) for reader in readers(tensor) if m.op(reader) in MOVES]

    def goes_low(reader: int, port: int) -> bool:
        node_type = m.view.node_type(reader)
        is_product = search.lists.list_of(node_type.op) == "allow"
        return is_product and search.support.supports(node_type, node_type.layout.in_slots[port])

    return any(
        goes_low(reader, m.inputs(reader).index(same))
        for same in walk([tensor], moved)
        for reader in readers(same)
    )


def sum_rows(new: Replacement, tensor: str, shape: Shape) -> str:
    """Writes MatMul(ones[1, rows], tensor as [rows, channels]), reshaped to [channels].

    Of few channels several rows are taken as one, and what is left of them is added in float32.
    The tensor is of rank 2 or more, and the last dimension of its shape is known.
    """
    stem, new.stem = new.stem, f"{new.stem}/{NAME}"
    folded, channels = _rows_in_one(shape), shape[-1] or 0
    size, width = elements(shape), folded * channels
    rows = size and size // width
    flat = tensor
    if len(shape) > 2:
        flat = new.reshape(tensor, (None, width), name="rows", shape=(rows, width))
    if rows is None:
        count = new.length(flat, 0, name="count")
    else:
        count = new.constant([rows], name="count", beside=tensor)
    one = new.constant(1.0, name="one", beside=tensor)
    filled = new.op.Fill(count, one, name="fill", shape=(rows,))
    ones = new.reshape(filled, (1, None), name="ones", shape=(1, rows))
    product = new.op.MatMul(ones, flat)
    if folded > 1:
        parts = new.reshape(product, (None, channels), name="parts", shape=(folded, channels))
        axis = new.constant([0], name="axis", beside=tensor)
        vector = new.op.Sum(parts, axis, name="channels", shape=(channels,))
    else:
        vector = new.reshape(product, (None,), name="channels", shape=(channels,))
    new.stem = stem
    return vector


def _rows_in_one(shape: Shape) -> int:
    """How many rows of a tensor are taken as one."""
    *_, columns, channels = shape
    if len(shape) < 3 or columns is None or (channels or 0) > FEW_CHANNELS:
        return 1
    return max(rows for rows in range(1, MOST_ROWS_IN_ONE + 1) if columns % rows == 0)
