"""Losses and metrics: what a scalar is reduced from is computed in float32.

A loss takes predictions and labels apart: a difference, a product with a mask, a probability close
to 1. Ops of the infer list that do this would go low behind the last matrix product, and the
reduction after them, which is denied, would then add up rounded terms in float32:

    Mean(Square(labels - predictions))             mean squared error
    Mean(Relu(z) - z * labels + Log1p(Exp(-|z|)))  binary cross entropy

So all that lies between the last matrix product and a reduction to a scalar stays float32, and the
predictions are cast once. The way back from the scalar ends at ops of the allow list and at what
they read, at sums with a bias, and at gradients. A scalar that more than scalars are made of is no
loss: the norm of a gradient scales the gradient. Where a way is long, or has many ends, what is
near the scalar counts: a residual stream may go back to the first layer, and a norm of all
gradients to each.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

from graph_passes.coloring.state import ALLOW, CLEAR, DENY, INFER, Coloring
from graph_passes.ir.adjacency import walk
from graph_passes.ops.reasons import Reason

MOST_OPS = 512
"""Ops between the last matrix products and a loss, and between a loss and what is reported."""
MOST_ENDS = 16
"""Tensors of the model that a loss is made of: detectors have three for each of five sizes."""

_REDUCTIONS = ("Sum", "Mean", "L2Loss")
_STORED = ("Const", "ReadVariableOp")
PART_OF_THE_MODEL = frozenset(("BiasAdd", "BiasAddV1"))


def keep_losses(coloring: Coloring) -> None:
    """Keeps losses and metrics in float32; nothing is painted yet."""
    inside: set[int] = set()
    around: set[int] = set()
    is_scalar, belongs = (
        functools.cache(functools.partial(test, coloring)) for test in (_is_scalar, _belongs)
    )
    for number in coloring.view.of_op(*_REDUCTIONS):
        root = coloring.view.base[number]
        if coloring.list_codes[root] == DENY and _is_loss(coloring, root, is_scalar):
            _follow_back(coloring, root, belongs, inside, around)
    inside |= _made_again(coloring, inside, around)
    coloring.block(sorted(inside), Reason.INSIDE_UNIT)


def _is_loss(coloring: Coloring, root: int, is_scalar: Callable[[int], bool]) -> bool:
    """Whether a reduction makes a scalar of which only scalars are made."""
    for count, vertex in enumerate(walk([root], coloring.edges.readers)):
        if count == MOST_OPS or not is_scalar(vertex):
            return False
    return True


def _is_scalar(coloring: Coloring, vertex: int) -> bool:
    """Whether the outputs of a vertex's node are known to be scalars, or there are none."""
    view, number = coloring.view, coloring.view.vertex_nodes[vertex]
    outputs = len(view.layout(number).out_slots)
    return [*view.output_shapes(number)[:outputs]] == [()] * outputs


def _follow_back(
    coloring: Coloring,
    root: int,
    belongs: Callable[[int], bool],
    inside: set[int],
    around: set[int],
) -> None:
    """Finds the infer and clear vertices between a loss and the model, and what they read.

    `inside` receives these, `around` those of predictions, labels and weights.
    """
    codes, producers = coloring.list_codes, coloring.edges.producers
    way, ends, level = set[int](), set[int](), {root}
    while level:
        makers = {maker for vertex in level for maker in producers(vertex)} - way
        further = {maker for maker in makers if belongs(maker)}
        ends.update(maker for maker in makers - further if codes[maker])
        if len(way) + len(level) > MOST_OPS or len(ends) > MOST_ENDS:
            break
        way |= level
        level = further - way
    inside.update(vertex for vertex in way if codes[vertex] in (INFER, CLEAR))
    around.update(maker for vertex in way for maker in producers(vertex) if maker not in way)


def _made_again(coloring: Coloring, inside: set[int], around: set[int]) -> set[int]:
    """What the gradient makes once more of predictions and labels, such as their difference."""
    codes, op_of, edges = coloring.list_codes, coloring.view.op_of, coloring.edges
    known = inside | around
    found = set()
    for reader in {v for end in around if codes[end] for v in edges.readers(end)}:
        makers = {v for v in edges.producers(reader) if op_of(v) not in _STORED}
        is_rounded_here = any(v in inside or not codes[v] for v in makers)
        if codes[reader] in (INFER, CLEAR) and makers <= known and is_rounded_here:
            found.add(reader)
    return found


def _belongs(coloring: Coloring, vertex: int) -> bool:
    op = coloring.view.op_of(vertex)
    if coloring.list_codes[vertex] in (0, ALLOW) or op in PART_OF_THE_MODEL or op.endswith("Grad"):
        return False
    return not _is_read_by_product(coloring, vertex)


def _is_read_by_product(coloring: Coloring, vertex: int) -> bool:
    """Whether an op of the allow list reads a tensor, as it is or behind clear ops."""
    codes, readers = coloring.list_codes, coloring.edges.readers
    behind = walk([vertex], lambda v: [reader for reader in readers(v) if codes[reader] == CLEAR])
    near = itertools.islice(behind, MOST_OPS)
    return any(codes[reader] == ALLOW for v in near for reader in readers(v))
