"""Gradients of what was repeated a few times: they add up as few terms as additions do.

Sums are denied, since they may have many terms. That over the copies of a Tile, which `repeat` and
the upsampling of images are made of, has as many as there were copies. TensorFlow writes it as
Sum(Reshape(dy, sizes), axes), where the sizes alternate between copies and lengths
(`_TileGrad` in tensorflow/python/ops/array_grad.py).
"""

from __future__ import annotations

from graph_passes.ir.graph_view import FLOAT
from graph_passes.rewriter.constant_evaluation import evaluated
from graph_passes.rewriter.matcher import Matcher
from graph_passes.units.unit_pass import UnitSearch

RULE = "tile-gradient"
OPS = ("Tile",)
_MOST_COPIES = 4
"""Rounded after each addition, four terms are off by less than 2^-7 of the sum of magnitudes."""
_SIZES = ("Reshape", "Transpose", "Pack")
"""What makes the sizes, from the last: copies and lengths, each a vector, in turns."""


def add_few_copies(search: UnitSearch) -> None:
    """Lets sums over the copies of a Tile, where these are few, take the dtype of what they sum."""
    view, m = search.edits.view, search.edits.matcher
    for number in view.of_op("Sum"):
        if view.dtypes[view.base[number]] != FLOAT or m.output(number) in search.edits.redirect:
            continue
        copies = _copies(m, number)
        if copies is not None and copies <= _MOST_COPIES:
            search.list_nodes(RULE, number, (view.names[number],), "infer")


def _copies(m: Matcher, total: int) -> int | None:
    """How many terms a Sum has if it is the gradient of a Tile with constant multiples."""
    reshaped, axes = m.source(total, 0), m.source(total, 1)
    if m.op(reshaped) != "Reshape" or m.op(axes) != "Range":
        return None
    if [m.scalar(tensor) for tensor in m.inputs(axes)[::2]] != [0, 2]:
        return None  # from the first on every other axis
    sizes = m.source(reshaped, 1)
    for op in _SIZES[:-1]:
        if m.op(sizes) != op:
            return None
        sizes = m.source(sizes, 0)
    is_made_so = m.op(sizes) == _SIZES[-1] and len(m.inputs(sizes)) == 2
    multiples = evaluated(m, m.tensor(sizes, 0)) if is_made_so else None
    return None if multiples is None else int(multiples.prod())
