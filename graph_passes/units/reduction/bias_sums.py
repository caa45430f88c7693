"""Gradients of biases: sums of a gradient over its leading axes.

Sums are denied, since float16 kernels may add up in float16, so what is summed would be cast to
float32 first. Two ops add up low-precision values in float32 inside:

    BiasAddGrad(dy), on a GPU
    MatMul(ones[1, rows], dy[rows, channels]), on a CPU in bfloat16

On a CPU BiasAddGrad adds up in bfloat16 and is off by up to 10 % of the sum of magnitudes over
65,536 rows; the product is off by 0.03 %, and takes half the time of a Cast and a BiasAddGrad in
float32.

Neither takes the place of a loss's sum, or of one that a model takes forward: what is summed is the
gradient of a broadcast, and is reshaped to the constant shape of a bias afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from graph_passes.ir.eligibility import find_ineligible
from graph_passes.ir.graph_view import ARGUMENT, Shape, elements
from graph_passes.rewriter.matcher import Matcher
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.reduction import sums
from graph_passes.units.reduction.gradient_sums import PRODUCTS
from graph_passes.units.reduction.ones_product import ones_products_pay, sum_rows, sum_rows_pays
from graph_passes.units.unit_pass import UnitSearch

BIAS_GRADIENT = "bias-gradient"
ONES_PRODUCT = "ones-product"

_Write = Callable[[Replacement, str, Shape], str]
"""Writes the sum of a tensor of some shape, [..., channels], over all axes but the last."""


def use_bias_gradients(search: UnitSearch) -> None:
    """Replaces sums of a gradient over its leading axes by BiasAddGrad."""
    if search.infers("BiasAddGrad"):
        _replace_sums(
            search,
            BIAS_GRADIENT,
            lambda *_: True,
            lambda new, tensor, _: new.op.BiasAddGrad(tensor),
        )


def multiply_by_ones(search: UnitSearch) -> None:
    """Replaces BiasAddGrad, and sums like it, by a matrix product with ones.

    Only a gradient that another product reads too is summed so: it goes low in any case.
    """
    if not ones_products_pay(search):
        return
    edits, view, m = search.edits, search.edits.view, search.edits.matcher
    ineligible = {*find_ineligible(view, (), search.config), *edits.kept}
    pays = functools.partial(sum_rows_pays, search, ineligible)
    for number in view.of_op("BiasAddGrad"):
        is_last = m.attr(number, "data_format").s == b"NHWC"
        if not is_last or not view.is_float[view.base[number]]:
            continue
        if m.output(number) in edits.redirect:
            continue
        if _is_added_to_argument(m, number):
            continue  # behind a loop one product may take the place of this sum in all rounds
        tensor = m.tensor(number, 0)
        if pays(number, tensor):
            edits.propose(ONES_PRODUCT, number, _replace, number, m.shape_of(tensor), sum_rows)
    _replace_sums(search, ONES_PRODUCT, pays, sum_rows)


def _is_added_to_argument(matcher: Matcher, number: int) -> bool:
    """Whether a function adds what a node makes to one of its arguments, as bodies of loops do."""
    return any(
        matcher.op(matcher.maker(matcher.through(tensor, "Identity"))) == ARGUMENT
        for reader in matcher.readers(number)
        if matcher.op(reader) == "AddN"
        for tensor in matcher.inputs(reader)
    )


def _replace_sums(
    search: UnitSearch, rule: str, pays: Callable[[int, str], bool], write: _Write
) -> None:
    edits, view, m = search.edits, search.edits.view, search.edits.matcher
    gradients = sums.BroadcastGradients(m)
    for number in sums.float_sums(edits):
        if number in search.exact or m.op(m.source(number, 0)) in PRODUCTS:
            continue
        tensor, kept = m.tensor(number, 0), sums.reshaped_to(m, number)
        shape = view.shape(tensor)
        if kept is None or shape is None:
            continue
        axes = sums.summed_axes(m, number, shape, kept)
        channels = elements(shape[axes:])
        if not axes or not pays(number, tensor):
            continue  # most sums are no gradient of a bias: no near misses
        if gradients.has(number):
            rows = (elements(shape[:axes]), channels) if axes < len(shape) - 1 else shape
            edits.propose(rule, number, _replace, number, rows, write)


def _replace(new: Replacement, number: int, rows: Shape, write: _Write) -> None:
    tensor = new.matcher.tensor(number, 0)
    if new.matcher.shape_of(tensor) != rows:
        tensor = new.reshape(tensor, (None, rows[-1]), name="rows", shape=rows)
        # A clear op that leads to no allow op goes low too late for an infer op behind it.
        new.node_lists[new.makers[tensor].name] = "infer"
    new.replace(number, write(new, tensor, rows))
