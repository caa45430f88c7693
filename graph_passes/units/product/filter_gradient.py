"""Gradients of the filter and the bias of a convolution, made by one kernel.

On a CPU, TensorFlow's own oneDNN rewrite makes one op of both where they have one dtype. In
bfloat16 BiasAddGrad must have none: its own kernel adds up in bfloat16, and is off by up to 10 % of
the sum of magnitudes. The kernel of both adds up in float32 while it has the gradient at hand. The
op is put in here, and not left to TensorFlow, which does not rewrite every function that it runs.
Its shape function gives the bias as many elements as the images have channels, so it is left out
where the filter makes another number of them.

Both take 1.9 ms, by two ops of which one is a product with ones 2.6 ms, for 16 filters of 3 x 3 on
8 images of 128 x 128 with 16 channels (two cores with AMX).
"""

from __future__ import annotations

from graph_passes.ir.eligibility import find_ineligible
from graph_passes.ops.kernels import ONEDNN_LABEL, has_kernel
from graph_passes.ops.op_types import FILTER_AND_BIAS
from graph_passes.rewriter.matcher import NoMatchError
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.unit_pass import UnitSearch

RULE = "filter-gradient"
OPS = ("Conv2DBackpropFilter",)
_PADDINGS = (b"SAME", b"VALID")


def merge_bias_gradients(search: UnitSearch) -> None:
    """Makes one op of a Conv2DBackpropFilter and a BiasAddGrad that read one gradient."""
    edits, lists, config = search.edits, search.lists, search.config
    may_merge = (
        search.knows_times
        and lists.list_of("BiasAddGrad") is None
        and lists.list_of(*OPS) == "allow"
        and has_kernel(FILTER_AND_BIAS, config.device)
    )
    if not may_merge:
        return
    view, m = edits.view, edits.matcher
    ineligible = {*find_ineligible(view, (), config), *edits.kept}

    def qualifies(number: int) -> bool:
        is_last = m.attr(number, "data_format").s == b"NHWC"
        return is_last and number not in ineligible and bool(view.is_float[view.base[number]])

    def channels(number: int, port: int) -> set[int | None]:
        return {*(view.shape(m.tensor(number, port)) or (None,))[-1:]}

    def is_beside(product: int, bias: int) -> bool:
        return (
            m.op(product) in OPS
            and m.output(product) not in edits.redirect
            and qualifies(product)
            and m.tensor(product, 2) == m.tensor(bias, 0)
            and m.attr(product, "padding").s in _PADDINGS
            and m.node(product).device == m.node(bias).device
            and channels(product, 0) == channels(product, 2) != {None}
        )

    for bias in filter(qualifies, view.of_op("BiasAddGrad")):
        for product in m.readers(m.source(bias, 0)):
            if is_beside(product, bias) and edits.propose(RULE, product, _write, product, bias):
                break


def _write(new: Replacement, product: int, bias: int) -> None:
    m = new.matcher
    for number in (product, bias):
        if m.view.is_ordered(number):
            raise NoMatchError(f"nodes wait for {m.view.names[number]!r}, or it for them")
    image, sizes, dy = new.inputs_of(product)
    if [dy] != [*new.inputs_of(bias)]:
        raise NoMatchError("another unit gives the two different gradients")
    of_filter, of_bias = new.copy(
        m.node(product),
        image,
        sizes,
        dy,
        op=FILTER_AND_BIAS,
        name="and_bias",
        shape=m.shape(product),
    )
    node = new.makers[of_filter]
    node.attr["_kernel"].s = ONEDNN_LABEL
    new.node_lists[node.name] = "allow"
    new.replace(product, of_filter)
    new.replace(bias, of_bias)
