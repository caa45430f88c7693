"""What products alone lead on from step to step, as the powers of a matrix.

The next of a Markov chain, of ranks, of a covariance that a Kalman filter predicts is made of the
last by products, sums, single factors and moves, and no activation limits it. A matrix that was
rounded is another one, and its powers are farther off with each step: a chain lost a tenth of its
probability, a covariance was not positive definite any more. What leads on in this manner stays
float32, be it round a loop, from what a variable holds to what it is given, or unrolled, where a
product has one tensor as a factor more than eight times.

Where the last value itself is one of the terms, `x + h * (x @ a)`, one product stays round a loop.
Several are what a network makes of it, a gradient by which weights take a step, or what an
optimizer does in low precision by design, as Muon its iterations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from graph_passes.coloring.state import Coloring
from graph_passes.coloring.ways import MATRIX_PRODUCTS, Ways, linear, moves, near
from graph_passes.ir.adjacency import in_order, walk
from graph_passes.ops.reasons import Reason

_MOST_FACTORS = 8
"""As often as in graph networks, whose layers multiply by the one adjacency matrix."""
_SQUARINGS = 3
"""A product of more than `_MOST_FACTORS` has as many others before it, at least."""


def keep_recurrences(coloring: Coloring) -> None:
    """Keeps what products alone lead on from step to step in float32."""
    multiplies = coloring.has_op(MATRIX_PRODUCTS) & coloring.view.is_float
    if not multiplies.any():
        return
    inside = linear(coloring, multiplies | moves(coloring))
    coloring.block(_circles(coloring, inside, multiplies), Reason.RECURRENCE)
    coloring.block(_powers(coloring, inside, multiplies), Reason.RECURRENCE)


def _circles(coloring: Coloring, inside: np.ndarray, multiplies: np.ndarray) -> Iterator[int]:
    """What leads round loops, and from variables to their next values."""
    edges = coloring.edges
    loops = ((edges.readers(v), v) for v in coloring.carriers())
    circles = [circle for circle in chain(loops, _assigned(coloring)) if inside[circle[1]]]
    firsts = [v for starts, _ in circles for v in starts if inside[v]]
    left = inside & edges.reach(firsts, inside, forward=True)
    left &= edges.reach([end for _, end in circles], inside, backward=True)
    alone = left & ~multiplies

    def ahead(starts: Sequence[int], through: np.ndarray) -> set[int]:
        return set(walk(starts, edges.readers, through.__getitem__))

    def before(end: int, through: np.ndarray) -> set[int]:
        return set(walk([end], edges.producers, through.__getitem__))

    for starts, end in circles:
        later, earlier = ahead(starts, alone), before(end, alone)
        if end in later and alone[end]:
            found = {v for v in later & earlier if multiplies[v] and left[v]}
            behind = [reader for product in found for reader in edges.readers(product)]
            found |= earlier & ahead(behind, alone)
        else:
            found = ahead(starts, left) & before(end, left)
        yield from filter(left.item, found)


def _assigned(coloring: Coloring) -> Iterator[tuple[Sequence[int], int]]:
    """For each assignment what reads the variable, and what it is given."""
    view = coloring.view
    for number in view.of_op("AssignVariableOp"):
        variable, value = view.producers(number)
        read = [v for v in view.readers(variable) if view.op_of(v) == "ReadVariableOp"]
        values = [v for r in read for v in coloring.float_vertices(view.vertex_nodes[r])]
        yield [reader for v in values for reader in coloring.edges.readers(v)], value


def _powers(coloring: Coloring, inside: np.ndarray, multiplies: np.ndarray) -> Iterator[int]:
    """The products that have one tensor as a factor too often, and what is between them."""
    view, edges, ways = coloring.view, coloring.edges, Ways(coloring)
    terms = inside & ~multiplies
    terms[coloring.carriers()] = False
    last = coloring.where(multiplies)
    for _ in range(_SQUARINGS):
        behind = multiplies[view.targets] & edges.reach(last, terms, forward=True)[view.sources]
        last = np.unique(view.targets[behind]).tolist()

    def factors(product: int) -> list[list[int]]:
        operands = edges.producers(product)
        found = [near([v], lambda v: edges.producers(v) if terms[v] else ()) for v in operands]
        return [[v for v in ends if not terms[v]] for ends in found]

    def made_of(product: int) -> list[int]:
        return [v for ends in factors(product) for v in ends if multiplies[v]]

    chained = [*walk(last, made_of)]
    place = {product: number for number, product in enumerate(chained)}
    pairs = [(place[maker], place[v]) for v in chained for maker in made_of(v)]
    steps = np.array(pairs, np.int64).reshape(-1, 2)
    powers: dict[int, Counter[int]] = {}
    for number in in_order(len(chained), steps[:, 0], steps[:, 1]):  # a list may close a circle
        product = chained[number]
        powers[product] = Counter()
        for ends in factors(product):
            least: dict[int, int] = {}
            for v in ends:
                for factor, power in powers.get(v, {ways.one_read(v): 1}).items():
                    least[factor] = min(power, least.get(factor, power))
            powers[product].update(least)
    often = {v for found in powers.values() for v, power in found.items() if power > _MOST_FACTORS}
    products = [v for v, found in powers.items() if not often.isdisjoint(found)]
    enter = (terms | multiplies).__getitem__
    ahead, before = (walk(products, way, enter) for way in (edges.readers, edges.producers))
    yield from {*ahead}.intersection(before)
