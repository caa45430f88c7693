"""Which functions a graph calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tensorflow.core.framework import graph_pb2, node_def_pb2


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


def reachable_functions(graph_def: graph_pb2.GraphDef) -> frozenset[str]:
    """Names of the library's functions that a run of the main graph may call.

    Gradient functions of the library count with the functions they belong to.
    """
    library = {function.signature.name: function for function in graph_def.library.function}
    gradients = {g.function_name: g.gradient_func for g in graph_def.library.gradient}
    if not library:
        return frozenset()
    found: set[str] = set()
    pending: list[Iterable[node_def_pb2.NodeDef]] = [graph_def.node]
    while pending:
        for node in pending.pop():
            for name in called_functions(node):
                for called in (name, gradients.get(name, "")):
                    if called in library and called not in found:
                        found.add(called)
                        pending.append(library[called].node_def)
    return frozenset(found)
