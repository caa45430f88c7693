"""Static shapes of the nodes of traced functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graph_passes.ir.graph_view import FunctionShapes, Shape, Shapes


def static_shapes(graph: Any) -> Shapes:
    """Returns a function from a node's name to the shapes of its outputs.

    Args:
        graph: the FuncGraph that was traced, or a Graph.

    Returns:
        A function that gives one shape per output: a tuple with None for an unknown dimension, or
        None for an unknown rank. A node that the graph does not have gives an empty tuple.
    """

    def shapes(node: str) -> tuple[Shape | None, ...]:
        try:
            outputs = graph.get_operation_by_name(node).outputs
        except KeyError:
            return ()
        return tuple(map(shape_of, outputs))

    return shapes


def traced_shapes(graph: Any, definition: Any) -> Shapes:
    """The same for a function's definition, where arguments have names of their own.

    Args:
        graph: the FuncGraph that was traced.
        definition: the FunctionDef that TensorFlow made of it.
    """
    of_node = static_shapes(graph)
    names = [argument.name for argument in definition.signature.input_arg]
    if len(names) != len(graph.inputs):  # the gradient of a loop adds inputs to graphs it finds
        return of_node
    arguments = dict(zip(names, ((shape_of(tensor),) for tensor in graph.inputs), strict=True))
    return lambda node: arguments.get(node) or of_node(node)


def called_shapes(functions: Mapping[str, Any]) -> FunctionShapes:
    """Returns a function from a function's name to the shapes of its body's tensors.

    Args:
        functions: name -> AtomicFunction or `_DefinedFunction`, as a FuncGraph holds those that it
            calls, directly or through others.

    Returns:
        A function that gives None for a function that is not among them or has no traced graph.
    """

    def shapes_of(name: str) -> Shapes | None:
        function = functions.get(name)
        graph = getattr(function, "graph", None)
        if function is None or graph is None:  # a `Defun` of TensorFlow 1, as in ctc_loss, has none
            return None
        return traced_shapes(graph, function.cached_definition)

    return shapes_of


def shape_of(tensor: Any) -> Shape | None:
    """The static shape of a tensor: None for an unknown rank, in it None for an unknown length."""
    return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())
