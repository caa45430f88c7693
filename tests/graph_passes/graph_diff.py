"""What a rewrite did to a graph, read from the graphs before and after it alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tensorflow.core.framework import attr_value_pb2, graph_pb2, node_def_pb2, types_pb2
from tensorflow.python.framework import op_def_registry


class Retyped(NamedTuple):
    """One type attribute that a rewrite changed."""

    function: str
    node: str
    attr: str
    dtype: str


def all_nodes(
    graph_def: graph_pb2.GraphDef,
) -> dict[tuple[str, str], node_def_pb2.NodeDef]:
    """(function, name) -> node; the function is "" in the main graph."""
    nodes = {("", node.name): node for node in graph_def.node}
    for function in graph_def.library.function:
        nodes |= {(function.signature.name, node.name): node for node in function.node_def}
    return nodes


def retyped(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef) -> set[Retyped]:
    """The type attributes that differ, of nodes that are in both graphs."""
    old = all_nodes(before)
    found = set()
    for key, node in all_nodes(after).items():
        if key in old:
            types = dict(_types(old[key]))
            found |= {
                Retyped(*key, attr, types_pb2.DataType.Name(dtype))
                for attr, dtype in _types(node)
                if attr in types and types[attr] != dtype
            }
    return found


def added(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef) -> list[node_def_pb2.NodeDef]:
    """The nodes that a rewrite added."""
    old = all_nodes(before)
    return [node for key, node in all_nodes(after).items() if key not in old]


def differences(ours: graph_pb2.GraphDef, theirs: graph_pb2.GraphDef) -> list[str]:
    """How two graphs differ in nodes, ops, data inputs, devices or types; [] if they do not.

    The order of nodes does not count, nor does a function that nothing calls, which the oracle
    throws away.
    """
    called = {"", *(function.signature.name for function in theirs.library.function)}
    left = {key: _text(node) for key, node in all_nodes(ours).items() if key[0] in called}
    right = {key: _text(node) for key, node in all_nodes(theirs).items()}
    return [
        f"{key}: {left.get(key, 'absent')} | oracle: {right.get(key, 'absent')}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    ]


def _text(node: node_def_pb2.NodeDef) -> str:
    # TensorFlow drops a control input that a data input makes superfluous: leave these out.
    inputs = ", ".join(name for name in node.input if not name.startswith("^"))
    types = " ".join(f"{k}={types_pb2.DataType.Name(t)}" for k, t in sorted(_types(node)))
    return f"{node.op}({inputs}) {types} {node.device}".strip()


def _types(node: node_def_pb2.NodeDef) -> Iterator[tuple[str, int]]:
    attrs: dict[str, attr_value_pb2.AttrValue] = {}
    op_def = op_def_registry.get(node.op)
    for attr in op_def.attr if op_def else ():
        attrs[attr.name] = attr.default_value
    attrs.update(node.attr)
    for name, value in attrs.items():
        if name.startswith("_"):
            continue
        if value.WhichOneof("value") == "type":
            yield name, value.type
        for index, dtype in enumerate(value.list.type):
            yield f"{name}[{index}]", dtype
