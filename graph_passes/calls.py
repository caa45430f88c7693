"""Which functions a graph calls."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from graph_passes.op_registry import registered_op_type


def called_functions(node: node_def_pb2.NodeDef) -> Iterator[str]:
    """Names of the functions that a node's attrs name, and the op type, which may be one."""
    yield node.op
    for value in node.attr.values():
        kind = value.WhichOneof("value")
        if kind == "func":
            yield value.func.name
        elif kind == "list":
            for function in value.list.func:
                yield function.name


def reachable_functions(
    graph_def: graph_pb2.GraphDef, added: Iterable[function_pb2.FunctionDef] = ()
) -> frozenset[str]:
    """Names of the functions that a run of the main graph may call.

    Gradient functions of the library count with the functions they belong to.

    Args:
        graph_def: the graph with its library.
        added: functions that are to come to the library.
    """
    functions = (*graph_def.library.function, *added)
    library = {function.signature.name: function for function in functions}
    gradients = {g.function_name: g.gradient_func for g in graph_def.library.gradient}
    if not library:
        return frozenset()
    found: set[str] = set()
    names_functions = functools.cache(may_name_functions)  # asked of every node
    pending: list[Iterable[node_def_pb2.NodeDef]] = [graph_def.node]
    while pending:
        for node in [node for node in pending.pop() if names_functions(node.op)]:
            for name in called_functions(node):
                for called in (name, gradients.get(name, "")):
                    if called in library and called not in found:
                        found.add(called)
                        pending.append(library[called].node_def)
    return frozenset(found)


def may_name_functions(op: str) -> bool:
    """Whether nodes of an op may name functions; an unknown op may, and may be one."""
    op_type = registered_op_type(op)
    return op_type is None or op_type.runs_functions
