"""What the patterns of sums have in common: finding sums, and telling what they sum over."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from tensorflow.core.framework import node_def_pb2

from graph_passes.patterns.edits import GraphEdits, NearMiss
from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.view import FLOAT, Shape

Replace = Callable[[GraphEdits, Matcher, int], None]
"""Makes the edits for one sum, given by its number; raises NoMatchError for a near miss."""


def float_sums(edits: GraphEdits) -> list[int]:
    """The float32 Sum nodes that no pattern has replaced yet, by number."""
    view, output = edits.view, edits.matcher.output
    return [
        number
        for number in view.of_op("Sum")
        if view.dtypes[view.base[number]] == FLOAT and output(number) not in edits.redirect
    ]


def attempt(
    edits: GraphEdits, matcher: Matcher, number: int, preserve: Collection[str], replace: Replace
) -> None:
    """Tries a replacement on one node, unless the node must stay; notes a near miss."""
    name = matcher.view.names[number]
    if name in preserve:
        return
    try:
        replace(edits, matcher, number)
    except NoMatchError as miss:
        edits.misses.append(NearMiss(name, str(miss)))


def target_shape(matcher: Matcher, number: int) -> list[int]:
    """The constant shape that all readers of a sum reshape it to.

    Raises:
        NoMatchError: a reader is no Reshape, or there are several shapes, or one is not constant.
    """
    shapes = set()
    for reader in matcher.readers(number):
        matcher.expect(reader, "Reshape")
        shapes.add(tuple(matcher.constant(matcher.tensor(reader, 1)).ravel().tolist()))
    if len(shapes) != 1:
        raise NoMatchError("the sum is not reshaped to one constant shape")
    return list(shapes.pop())


def reduces(matcher: Matcher, number: int, axes: int, rank: int) -> bool:
    """Whether a sum is over its first `axes` axes, or over those that broadcasting added."""
    maker = matcher.source(number, 1)
    if matcher.op(maker) == "BroadcastGradientArgs":
        return True
    found = matcher.constant(matcher.tensor(number, 1)).ravel()
    return sorted(int(axis) % rank for axis in found) == list(range(axes))


def elements(dimensions: Sequence[int | None]) -> int | None:
    """The number of elements of a shape, None where a dimension is not known."""
    known = [dimension for dimension in dimensions if dimension is not None]
    return math.prod(known) if len(known) == len(dimensions) else None


def summed_axes(matcher: Matcher, number: int, shape: Shape, kept: Sequence[int]) -> int:
    """How many leading axes a sum takes away, if the shape that is kept is that of a bias.

    Args:
        matcher: reads the graph.
        number: the Sum.
        shape: of the tensor that is summed.
        kept: the shape that the sum is reshaped to.

    Returns:
        The number of leading axes that are summed, at least 1 and fewer than there are; 0 where
        the sum is of another kind.
    """
    for axes in range(len(shape) - 1, 0, -1):
        rest = list(shape[axes:])
        leading, trailing = kept[: -len(rest)], kept[-len(rest) :]
        if trailing != rest or not set(leading) <= {1}:
            continue
        if reduces(matcher, number, axes, len(shape)):
            return axes
    return 0


def control_inputs(node: node_def_pb2.NodeDef) -> list[str]:
    """What a node reads as control inputs, which its replacement must read too."""
    return [name for name in node.input if name.startswith("^")]
