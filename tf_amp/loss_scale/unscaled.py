"""Whether a graph trains in float16 and nothing scales its loss: then small gradients become 0.

A graph *trains* where the value of a gradient reaches a write to a variable of which that gradient
was computed. Gradients are told by the names that TensorFlow gives them. Moving statistics and
metrics hold no gradients, the gradients of inputs are written to no variable, and accumulators,
which are, are read by none.

A loss is *scaled* where a scalar goes into the gradients and these are divided by it, be it of a
variable, an argument or a constant. Constants can be folded, so that it cannot be told of them in
each graph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.core.framework.types_pb2 import DT_FLOAT, DT_HALF, DT_RESOURCE
from tensorflow.python.framework import tensor_util

from graph_passes.coloring.variable_updates import is_assignment
from graph_passes.ir.adjacency import walk
from graph_passes.ops.node_types import GRADIENT_SCOPE
from tf_amp.loss_scale.data_flow import DataFlow, Place, Program

Factor: TypeAlias = Place | float
"""A variable, an argument of the graph, or the value of a constant."""

# `tf.gradients` takes a name for the scope.
_OF_GRADIENT = re.compile(rf"{GRADIENT_SCOPE.pattern}|(?:^|/)[^/]+_grad(?:_\d+)?/")
DIVISIONS = frozenset(("Div", "DivNoNan", "RealDiv"))
_RECIPROCALS = frozenset(("Inv", "Reciprocal"))
_HAND_ON = frozenset(("Cast", "Enter", "Identity", "ReadVariableOp", "Snapshot", "Switch"))
# A factor below is part of a formula, such as the 2 of a mean squared error.
LEAST_SCALE = 8.0


def trains_unscaled(traced: Program, running: Program) -> bool:
    """Whether float16 gradients of a loss that nothing scales are written to their variables.

    Args:
        traced: A program as it was written, which tells best what scales the loss.
        running: The same as it runs, which tells what is computed in float16.
    """
    # Most programs do not train, and need no more than this.
    if not any(map(_is_write, traced.nodes())):
        return False
    low = {node.name for node in running.nodes() if _is_low_gradient(node)}
    if not low:
        return False
    flow = DataFlow(traced)
    gradients = [place for place, node in flow.nodes.items() if node.name in low]
    made_of = flow.back(gradients)
    written = {
        place: flow.sources(flow.makers[place][0])
        for place, node in flow.nodes.items()
        if _is_write(node)
    }

    def onward(place: Place) -> Iterable[Place]:
        # What a slot is given comes out again where it is read.
        slots = written.get(place, set()).difference(made_of)
        return (*flow.readers.get(place, ()), *slots)

    reached = set(walk(gradients, onward))
    trained = [place for place in written if place in reached and made_of & written[place]]
    if not trained:
        return False
    unscaled = set(walk(_unscaling(flow, reached, made_of), onward))
    return not unscaled.issuperset(trained)


def computes_gradients(running: Program) -> bool:
    """Whether a program computes gradients in float16."""
    return any(map(_is_low_gradient, running.nodes()))


def gives_gradients(running: Program) -> bool:
    """Whether a program does so and trains nothing itself."""
    return computes_gradients(running) and not any(map(_is_write, running.nodes()))


def _is_write(node: NodeDef) -> bool:
    return is_assignment(node.op) and any(
        name in node.attr and node.attr[name].type == DT_FLOAT for name in ("dtype", "T")
    )


def _is_low_gradient(node: NodeDef) -> bool:
    """Whether a node computes a gradient in float16."""
    return (
        _OF_GRADIENT.search(node.name) is not None
        and node.op != "Cast"
        and any(value.type == DT_HALF for value in node.attr.values())
    )


def _unscaling(flow: DataFlow, reached: set[Place], made_of: set[Place]) -> Iterator[Place]:
    """The nodes that divide what gradients made by a scale that went into them."""
    constants = _constant_factors(flow, made_of)

    def is_scale(factor: Factor, *, divides: bool) -> bool:
        if not isinstance(factor, float):
            return divides and factor in made_of
        scale = factor if divides else _power_of_two_under(factor)
        return scale >= LEAST_SCALE and scale in constants

    for place in reached:
        node = flow.nodes.get(place)
        if node is None or not (node.op == "Mul" or node.op in DIVISIONS):
            continue
        for port, maker in enumerate(flow.makers[place]):
            if maker in reached:
                continue
            factors = _factors(flow, maker, divides=port == 1 and node.op in DIVISIONS)
            if any(is_scale(factor, divides=divides) for factor, divides in factors):
                yield place


def _constant_factors(flow: DataFlow, places: set[Place]) -> set[float]:
    """The constants by which something is multiplied."""
    found: set[float] = set()
    for place in places:
        node = flow.nodes.get(place)
        if node is not None and node.op == "Mul":
            for maker in flow.makers[place]:
                constant = flow.nodes.get(maker)
                if constant is not None and (value := _scalar(constant)) is not None:
                    found.add(value)
    return found


def _factors(flow: DataFlow, start: Place, *, divides: bool) -> Iterator[tuple[Factor, bool]]:
    """What a value is a product of, and which of that it is divided by."""

    def behind(part: tuple[Place, bool]) -> Iterator[tuple[Place, bool]]:
        place, divides = part
        node, makers = flow.nodes.get(place), flow.makers.get(place, [])
        for port, maker in enumerate(makers):
            if node is None or node.op == "Mul":
                yield maker, divides
            elif node.op in DIVISIONS:
                yield maker, divides != (port == 1)
            elif node.op in _RECIPROCALS:
                yield maker, not divides
            elif (node.op == "Merge" or (node.op in _HAND_ON and port == 0)) and _hands_on(node):
                yield maker, divides

    for place, is_divisor in walk([(start, divides)], behind):
        if flow.makers.get(place):
            continue
        node = flow.nodes.get(place)
        if node is None or node.op != "Const":
            yield place, is_divisor
        elif (value := _scalar(node)) is not None:
            yield value, is_divisor


def _hands_on(node: NodeDef) -> bool:
    """Whether it is a value in float32, or the variable of one, that a node hands on."""
    return any(value.type in (DT_FLOAT, DT_RESOURCE) for value in node.attr.values())


def _scalar(node: NodeDef) -> float | None:
    """The value of a floating-point constant of one element, None of any other node."""
    if node.op != "Const" or node.attr["dtype"].type not in (DT_FLOAT, DT_HALF):
        return None
    value = node.attr["value"].tensor
    if math.prod(dim.size for dim in value.tensor_shape.dim) != 1:
        return None
    return float(tensor_util.MakeNdarray(value).item())


def _power_of_two_under(value: float) -> float:
    """The power of two of which a value is the reciprocal, else 0.

    By no other constant: a learning rate of 0.01 does not unscale what was multiplied by 100.
    """
    return 1 / value if value > 0 and math.frexp(value)[0] == 0.5 else 0.0
