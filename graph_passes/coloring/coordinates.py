"""Coordinates: products of data over a handful of terms.

    points @ rotation, [x, t] @ weights, pixels @ (colours by colours)

A product over many terms forgives what its operands lose, since errors even out, and so does all
that reads what a network made of such. A point has two to four coordinates, of which bfloat16 keeps
three digits: what is drawn moves, angles between unit vectors are off, and the second derivative of
a network by its coordinates has nothing to do with the equation that it is to solve. So a product
stays float32 where it adds up at most `MOST_TERMS` numbers and a longer one made none of them, as
one makes what a layer hands on, and gradients. It is too small for its time to matter, but for an
outer product, as experts and places are: it adds up none. A row that `one_hot` picks adds up one.
"""

from __future__ import annotations

import numpy as np

from graph_passes.coloring.state import ALLOW, Coloring
from graph_passes.coloring.ways import MATRIX_PRODUCTS, terms, what_is_before
from graph_passes.ops.reasons import Reason

MOST_TERMS = 4
"""Of a point in space and time, or in homogeneous coordinates."""


def keep_coordinates(coloring: Coloring) -> None:
    """Keeps products of data over few terms, with what they read, in float32."""
    view, long = coloring.view, coloring.list_codes == ALLOW
    short = [
        vertex
        for number in view.of_op(*MATRIX_PRODUCTS)
        for vertex in coloring.float_vertices(number)
        if long[vertex] and 0 < terms(view, number) <= MOST_TERMS
    ]
    if not short:
        return
    long[short] = False
    roots = coloring.where(long | coloring.has_op({"OneHot"}))
    no_data = coloring.edges.reach(roots, np.ones(len(long), bool), forward=True)
    kept = [vertex for vertex in short if not no_data[vertex]]
    before = [what_is_before(coloring, product) for product in kept]
    coloring.block(sorted({*kept}.union(*before)), Reason.COORDINATES)
