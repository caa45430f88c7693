"""Replacing parts of a graph: new nodes in, tensors redirected, what nobody reads out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from graph_passes.op_registry import registered_op_type
from graph_passes.view import GraphView

Proto = TypeVar("Proto", graph_pb2.GraphDef, function_pb2.FunctionDef)


def output_name(view: GraphView, node: str, op: str, port: int) -> str:
    """The name of an output of a single-tensor-per-argument op, as readers in this graph write it.

    Raises:
        KeyError: the op type is not registered.
    """
    if not view.is_function:
        return node if port == 0 else f"{node}:{port}"
    op_type = registered_op_type(op)
    if op_type is None:
        raise KeyError(op)
    return f"{node}:{op_type.op_def.output_arg[port].name}:0"


def replace_tensors(
    proto: Proto,
    view: GraphView,
    *,
    redirect: Mapping[str, str],
    inputs: Mapping[str, Sequence[str]],
    new_nodes: Sequence[node_def_pb2.NodeDef],
    preserve: Collection[str],
) -> Proto:
    """A copy of a graph in which tensors come from elsewhere.

    Args:
        proto: the GraphDef or FunctionDef; it is not changed.
        view: its view.
        redirect: tensor -> the tensor that its readers shall read instead.
        inputs: node -> all its new inputs.
        new_nodes: nodes to add; their inputs are redirected too.
        preserve: nodes that must stay even if nothing reads them.

    Returns:
        The copy. Nodes that made redirected tensors or fed replaced inputs, and that nothing reads
        any more, are gone with all that only they read.
    """
    copy = type(proto)()
    copy.CopyFrom(proto)
    nodes = copy.node_def if view.is_function else copy.node  # type: ignore[union-attr]
    nodes.extend(new_nodes)
    orphans = {view.split(tensor)[0] for tensor in redirect}
    for node in nodes:
        if node.name in inputs:
            orphans.update(view.split(name)[0] for name in node.input if name[0] != "^")
            controls = [name for name in node.input if name[0] == "^"]
            del node.input[:]
            node.input.extend((*inputs[node.name], *controls))
            if node.op == "AddN":
                node.attr["N"].i = len(inputs[node.name])
        for port, name in enumerate(node.input):
            target = redirect.get(name)
            if target is not None:
                node.input[port] = target
    kept = set(preserve)
    if view.is_function:
        for result, name in copy.ret.items():  # type: ignore[union-attr]
            copy.ret[result] = redirect.get(name, name)  # type: ignore[union-attr]
            kept.add(copy.ret[result].partition(":")[0])  # type: ignore[union-attr]
        kept.update(copy.control_ret.values())  # type: ignore[union-attr]
    dead = _unread(nodes, orphans, kept)
    remaining = [node for node in nodes if node.name not in dead]
    result = type(proto)()
    result.CopyFrom(copy)
    target_nodes = result.node_def if view.is_function else result.node  # type: ignore[union-attr]
    del target_nodes[:]
    target_nodes.extend(remaining)
    return result


def _unread(
    nodes: Sequence[node_def_pb2.NodeDef], orphans: Collection[str], kept: Collection[str]
) -> set[str]:
    """The orphans that nothing reads, and what only such nodes read, one after another."""
    makers: dict[str, list[str]] = {}
    reads: dict[str, int] = {}
    ops: dict[str, str] = {}
    for node in nodes:
        names = [name.lstrip("^").partition(":")[0] for name in node.input]
        makers[node.name] = names
        ops[node.name] = node.op
        for name in names:
            reads[name] = reads.get(name, 0) + 1
    dead: set[str] = set()
    pending = [name for name in orphans if name in makers]
    while pending:
        name = pending.pop()
        if name in dead or reads.get(name) or name in kept or _has_effect(ops[name]):
            continue
        dead.add(name)
        for maker in makers[name]:
            reads[maker] -= 1
            if maker in makers:
                pending.append(maker)
    return dead


def _has_effect(op: str) -> bool:
    op_type = registered_op_type(op)
    return op_type is None or op_type.op_def.is_stateful or op == "Placeholder"
