"""Functions of a session's graph: Grappler hands over their signatures and keeps the bodies.

What is left of a function that was not inlined is a FunctionDef without nodes, whose results come
from nowhere. The calls to it are part of the graph, so the pass has to know the signature; the
body must reach TensorFlow again as it came.
"""

from __future__ import annotations

from collections.abc import Mapping

from tensorflow.core.framework import function_pb2, graph_pb2


def fill_stubs(
    graph: graph_pb2.GraphDef,
) -> tuple[graph_pb2.GraphDef, Mapping[str, function_pb2.FunctionDef]]:
    """Gives each function without a body one of placeholders, in which nothing can be converted.

    Args:
        graph: A graph as Grappler hands it over; not changed.

    Returns:
        A graph whose functions are all valid, the same object when they are already; and the
        functions as they came, by name, for `empty_stubs`.
    """
    stubs = {f.signature.name: f for f in graph.library.function if _is_stub(f)}
    if not stubs:
        return graph, {}
    filled = graph_pb2.GraphDef()
    filled.CopyFrom(graph)
    for function in filled.library.function:
        if function.signature.name in stubs:
            for result in function.signature.output_arg:
                node = function.node_def.add(name=f"{result.name}_body", op="Placeholder")
                node.attr["dtype"].type = result.type
                function.ret[result.name] = f"{node.name}:output:0"
    return filled, stubs


def empty_stubs(
    graph: graph_pb2.GraphDef, stubs: Mapping[str, function_pb2.FunctionDef]
) -> graph_pb2.GraphDef:
    """Puts the functions back as they came.

    Args:
        graph: The rewritten graph; its library is changed.
        stubs: What `fill_stubs` returned.

    Returns:
        The same graph.
    """
    for function in graph.library.function:
        if (stub := stubs.get(function.signature.name)) is not None:
            function.CopyFrom(stub)
    return graph


def _is_stub(function: function_pb2.FunctionDef) -> bool:
    return not function.node_def and not all(
        function.ret.get(result.name) for result in function.signature.output_arg
    )
