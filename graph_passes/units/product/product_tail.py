"""Biases and activations in the kernel of the product before them, or kept out of it.

On a CPU, TensorFlow's remapper has the kernel of a product add the bias and apply the activation
while the result is at hand, if each reads the one before and nothing else does. A layer on tensors
of more than two axes has a Reshape in between, which can as well come last: it keeps the channels.
GELU is recognized as x * (0.5 * (1 + Erf(x * sqrt(0.5)))) alone, not with the Erfc of `tf.nn.gelu`.
Where no gradient reads what is inside it, it is written so.

512 x 768 x 3072 in bfloat16 take 3.7 ms with bias and GELU in place of 6.4 (two cores). Where the
cost table says so, simple tails are kept out of the kernel instead, which takes a Reshape between:
2048 x 512 x 2048 with a bias take 10 ms in place of 15 on a CPU with AMX, with a GELU 21 and 17.
"""

from __future__ import annotations

from graph_passes.ir.graph_view import FLOAT, elements
from graph_passes.rewriter.matcher import NoMatchError
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.activation.exact_gelu import ERFS, ExactGelu, find_gelu, write_gelu
from graph_passes.units.unit_pass import UnitSearch

RULE = "product-tail"
OPS = ("BiasAdd",)
_SLOW_ACTIVATIONS = ("Elu", "Sigmoid")
"""Those that bfloat16 makes dearer by themselves than in the slower kernel."""
_ACTIVATIONS = (*_SLOW_ACTIVATIONS, "LeakyRelu", "Relu", "Relu6", "Tanh")
FEW_ELEMENTS = 1 << 18
"""Of fewer, a tail in the kernel costs no more than one behind it."""


def place_tails(search: UnitSearch) -> None:
    """Puts biases and activations where they cost least: next to their products, or away."""
    edits, view, m = search.edits, search.edits.view, search.edits.matcher
    if not search.has_cpu_kernels:
        return
    found = [find_gelu(m, number) for number in view.of_op(*ERFS)]
    gelus = {gelu.x: gelu for gelu in found if gelu and gelu.is_only_read_inside(m)}
    table = search.config.cost_table
    simple_pay = table is None or table.fused_tails
    for number in view.of_op(*OPS):
        is_last = m.attr(number, "data_format").s == b"NHWC"
        if not is_last or view.dtypes[view.base[number]] != FLOAT:
            continue
        gelu, before, readers = gelus.get(m.output(number)), m.source(number, 0), m.readers(number)
        is_slow = len(readers) == 1 and m.op(readers[0]) in _SLOW_ACTIVATIONS
        if simple_pay or gelu or is_slow:
            edits.propose(RULE, number, _move, number, gelu)
        elif m.op(before) == "MatMul" and len(m.readers(before)) == 1:
            size = elements(m.shape(number) or (), search.config.unknown_dimension) or 0
            if size >= FEW_ELEMENTS:
                edits.propose(RULE, number, _keep_out, number)


def _keep_out(new: Replacement, bias_add: int) -> None:
    """Writes a bias of rows as one of a matrix of them, which the remapper leaves alone."""
    m, product = new.matcher, new.matcher.tensor(bias_add, 0)
    rows, channels = m.shape_of(product) or (None, None)
    sizes = 1, rows, channels
    if channels is None:
        raise NoMatchError(f"how many channels {product!r} has is not known")
    matrix = new.reshape(product, (1, None, channels), name="matrix", shape=sizes)
    made = new.copy(m.node(bias_add), matrix, m.tensor(bias_add, 1), name="of_matrix")
    new.replace(bias_add, new.reshape(made, (None, channels), name="rows", shape=sizes[1:]))


def _move(new: Replacement, bias_add: int, gelu: ExactGelu | None) -> None:
    m = new.matcher
    before, sizes = m.source(bias_add, 0), m.shape_of(m.tensor(bias_add, 1)) or ()
    bias = sizes[0] if len(sizes) == 1 else None
    is_reshaped = m.op(before) == "Reshape"
    product = m.source(before, 0) if is_reshaped else before
    if m.op(product) != "MatMul" or not (is_reshaped or gelu):
        return
    if any(map(m.view.is_ordered, (product, before))):
        raise NoMatchError(f"nodes wait for {m.node(product).name!r}, or it for them")
    for number in {product, before}:
        if len(m.readers(number)) != 1:
            raise NoMatchError(f"more than one node reads {m.node(number).name!r}")
        if bias is None or (m.shape(number) or (None,))[-1] != bias:
            raise NoMatchError(f"{m.node(number).name!r} may have another last axis than the bias")
    end = bias_add
    made = new.copy(m.node(end), m.output(product), m.tensor(end, 1), name="of_product")
    readers = m.readers(end)
    if gelu is not None:
        end = m.maker(gelu.y)
        made = write_gelu(new, made)
    elif len(readers) == 1 and m.op(readers[0]) in _ACTIVATIONS:
        end = readers[0]
        made = new.copy(m.node(end), made, name=m.op(end))
    if is_reshaped:
        made = new.op.Reshape(made, m.tensor(before, 1), name="as_before", shape=m.shape(before))
    new.replace(end, made)
