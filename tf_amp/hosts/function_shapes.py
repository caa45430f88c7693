"""Static shapes of the nodes of a traced function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def static_shapes(graph: Any) -> Callable[[str], tuple[tuple[int | None, ...] | None, ...]]:
    """Returns a function from a node's name to the shapes of its outputs.

    Args:
        graph: the FuncGraph that was traced.

    Returns:
        A function that gives one shape per output: a tuple with None for an unknown dimension, or
        None for an unknown rank. A node that the graph does not have gives an empty tuple.
    """

    def shapes(node: str) -> tuple[tuple[int | None, ...] | None, ...]:
        try:
            outputs = graph.get_operation_by_name(node).outputs
        except KeyError:
            return ()
        return tuple(
            None if output.shape.rank is None else tuple(output.shape.as_list())
            for output in outputs
        )

    return shapes
