"""Periods: products of which nothing but the rest by a period is used.

    FloorMod(bits x generator, 2)                         parities
    FloorMod(x w + pi, 2 pi), Atan2(Sin(x w), Cos(x w))   wrapped phases
    x w - Floor(x w)                                      what is left of a turn
    ConcatV2(Sin(2 pi x w), Cos(2 pi x w)), Complex(...)  features of random frequencies

A product is rounded by its size, and what is left of it by a period is smaller: beyond 256 the
parity of a bfloat16 number is 0, and an angle is any. So the product stays float32, and so does
what lies between it and its period, and between the last products and its operands. A sine alone is
an activation, and so is its gradient, a cosine: they are joined by none of these ops.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from graph_passes.coloring.state import ALLOW, CLEAR, INFER, Coloring
from graph_passes.coloring.ways import Ways, near, what_is_before
from graph_passes.ir.adjacency import walk
from graph_passes.ops.reasons import Reason

MOST_OPS = 32
"""Between a product and its period, and between sines and where they are joined."""

_MODULOS = ("FloorMod", "Mod", "TruncateMod")
_JOINS = ("Atan2", "Complex", "ConcatV2", "Pack")
_ANGLES = frozenset(("Cos", "Sin"))


def keep_periods(coloring: Coloring) -> None:
    """Keeps products of which the rest by a period is taken in float32."""
    codes, view, producers = coloring.list_codes, coloring.view, coloring.edges.producers
    ways, arithmetic = Ways(coloring), (codes == CLEAR) | (codes == INFER)

    def behind(number: int, goes_on: np.ndarray) -> list[int]:
        found = walk(view.producers(number), producers, goes_on.__getitem__)
        return list(islice(found, MOST_OPS))

    def is_fraction(vertex: int) -> bool:
        *_, taken = view.producers(view.vertex_nodes[vertex])
        is_floor = "Floor" in map(view.op_of, near([taken], ways.handed))
        is_of_product = codes[ways.origin(taken)] == ALLOW  # else a place between two pixels
        return is_of_product and is_floor and ways.multiplies_itself(vertex)

    roots = {*view.of_op(*_MODULOS)}
    roots |= {view.makers(number)[0] for number in roots}.intersection(view.of_op("Cast"))
    if "Floor" in view.ops:
        roots |= {number for number in view.of_op("Sub") if is_fraction(view.base[number])}
    if view.ops >= _ANGLES:
        moved = (codes == CLEAR) | coloring.has_op({"Mul"})
        for number in view.of_op(*_JOINS):
            angles = [v for v in behind(number, moved) if view.op_of(v) in _ANGLES]
            if {*map(view.op_of, angles)} == _ANGLES:
                roots.update(view.vertex_nodes[vertex] for vertex in angles)
    for root in sorted(roots):
        way = behind(root, arithmetic)
        products = [vertex for vertex in way if codes[vertex] == ALLOW]
        before = [v for product in products for v in what_is_before(coloring, product)]
        if products:
            coloring.block([*way, *before], Reason.PERIOD)
