"""A call tree as one graph, and the same tree taken apart again.

In the joined graph the nodes of every body stand beside those of the main graph. A calling node
reads, besides its own inputs, what the called bodies give, and a body's argument is another name
for what the calling node takes. One type attribute of the calling node then stands for all places
of a value that must have one dtype: input, argument, result and output. Painting, planning
and verification need no other notion of a call.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2, op_def_pb2
from tensorflow.python.framework import op_def_registry

from graph_passes.call_graph import Call, Region
from graph_passes.op_registry import OpType, registered_op_type
from graph_passes.view import JOINED_ARGUMENT, Shape, Shapes

_ARGUMENT, _RESULT = "_Arg", "_Retval"
MARK = "@"
"""In the names of all nodes of bodies. It is not legal in names of nodes, so that no name of the
main graph is like one of a body."""


@dataclasses.dataclass(frozen=True)
class Joined:
    """A call tree as one graph.

    Attributes:
        proto: the joined graph. Tensors have the names they have in their bodies, after a prefix.
        op_defs: definitions of the op types that stand for calls.
        boundary: names of the nodes that stand for arguments and results of a main graph that is
            itself a function; they must not change.
        prefixes: region -> the prefix of its nodes' names.
    """

    proto: graph_pb2.GraphDef
    op_defs: dict[str, op_def_pb2.OpDef]
    boundary: tuple[str, ...]
    prefixes: dict[Region, str]

    def shapes(self, of_regions: Mapping[Region, Shapes | None]) -> Shapes:
        """The static shapes of the joined graph, from those of its regions."""
        known = {self.prefixes[region]: shapes for region, shapes in of_regions.items()}

        def shapes_of(node: str) -> Sequence[Shape | None]:
            prefix = _prefix_of(node)
            shapes = known[prefix]
            return () if shapes is None else shapes(node[len(prefix) :])

        return shapes_of


def join(root: Region) -> Joined:
    """Makes one graph of a call tree; nothing of the tree is changed."""
    joined = Joined(graph_pb2.GraphDef(), {}, (), _prefixes(root))
    _Joiner(joined).add_main(root)
    if isinstance(root.proto, graph_pb2.GraphDef):
        joined.proto.versions.CopyFrom(root.proto.versions)
        return joined
    ends = (_ARGUMENT, _RESULT)
    return dataclasses.replace(
        joined, boundary=tuple(n.name for n in joined.proto.node if n.op in ends)
    )


def _prefixes(root: Region) -> dict[Region, str]:
    prefixes = {root: ""}
    for region in root.walk():
        for call in region.calls:
            for callee in call.callees:
                name = callee.proto.signature.name  # type: ignore[union-attr]
                prefixes[callee] = f"{name}{MARK}{len(prefixes)}/"
    return prefixes


class _Joiner:
    def __init__(self, joined: Joined) -> None:
        self._nodes = joined.proto.node
        self._op_defs = joined.op_defs
        self._prefixes = joined.prefixes

    def add_main(self, root: Region) -> None:
        main = root.proto
        if isinstance(main, graph_pb2.GraphDef):
            self._add_bodies(root)
            return
        for arg in main.signature.input_arg:
            self._nodes.add(name=arg.name, op=_ARGUMENT).attr["T"].type = arg.type
        self._add_bodies(root)
        for arg in main.signature.output_arg:
            # A result may bear the name of a node; "@" keeps this name out of the way.
            node = self._nodes.add(name=f"{arg.name}{MARK}", op=_RESULT, input=[main.ret[arg.name]])
            node.attr["T"].type = arg.type

    def _add_bodies(self, root: Region) -> None:
        for region in root.walk():
            prefix = self._prefixes[region]
            calls = {call.node: call for call in region.calls}
            calling = {}
            for node in region.nodes:
                new = self._nodes.add()
                new.CopyFrom(node)
                if prefix:
                    _rename(new, prefix)
                if calls and node.name in calls:
                    calling[node.name] = new
            for name, call in calls.items():
                self._add_call(call, calling[name])

    def _add_call(self, call: Call, node: node_def_pb2.NodeDef) -> None:
        kind = call.kind
        results: list[str] = []
        groups = 0
        for callee in call.callees:
            function: function_pb2.FunctionDef = callee.proto  # type: ignore[assignment]
            prefix = self._prefixes[callee]
            for position, arg in enumerate(function.signature.input_arg):
                alias = self._nodes.add(name=prefix + arg.name, op=JOINED_ARGUMENT)
                alias.attr["call"].s = node.name.encode()
                alias.attr["port"].i = kind.leading + position
            if callee.callee_of[0] != kind.predicate:
                groups += 1
                results.extend(
                    prefix + function.ret[arg.name] for arg in function.signature.output_arg
                )
        op = f"{node.op}+{groups}"
        if op not in self._op_defs:
            self._op_defs[op] = _call_op(node.op, kind.results, groups)
        node.op = op
        data = [name for name in node.input if name[0] != "^"]
        controls = [name for name in node.input if name[0] == "^"]
        del node.input[:]
        node.input.extend([*data, *results, *controls])


def _call_op(op: str, results: str, groups: int) -> op_def_pb2.OpDef:
    """The definition of an op with as many inputs more as the bodies have results."""
    op_def = copy.deepcopy(op_def_registry.get(op))
    for group in range(groups):
        op_def.input_arg.add(name=f"results_{group}", type_list_attr=results)
    return op_def


def _rename(node: node_def_pb2.NodeDef, prefix: str) -> None:
    node.name = prefix + node.name
    node.input[:] = [
        f"^{prefix}{name[1:]}" if name[0] == "^" else prefix + name for name in node.input[:]
    ]


def take_apart(root: Region, joined: Joined, rewritten: graph_pb2.GraphDef) -> Region:
    """The call tree with the bodies that a rewritten joined graph has.

    Args:
        root: the tree that was joined.
        joined: what `join` made of it.
        rewritten: the joined graph after the rewrite.

    Returns:
        A new tree of the same form. The dtypes in a body's signature are those that its calling
        node has now; names of functions are the old ones.

    Raises:
        KeyError: a node reads a tensor that no node of its own body makes.
    """
    return _Divider(joined, rewritten).main(root)


class _Divider:
    def __init__(self, joined: Joined, rewritten: graph_pb2.GraphDef) -> None:
        self._prefixes = joined.prefixes
        self._op_defs = joined.op_defs
        self._nodes: dict[str, list[node_def_pb2.NodeDef]] = {
            prefix: [] for prefix in joined.prefixes.values()
        }
        for node in rewritten.node:
            self._nodes[_prefix_of(node.name)].append(node)

    def main(self, root: Region) -> Region:
        """The main graph's region."""
        old = root.proto
        if isinstance(old, graph_pb2.GraphDef):
            graph_def = graph_pb2.GraphDef(versions=old.versions, library=old.library)
            new = Region(graph_def)
            self._fill(new, root, lambda tensor: tensor)
            return new
        results = {
            node.name[: -len(MARK)]: node.input[0] for node in self._nodes[""] if node.op == _RESULT
        }
        taken = [arg.type for arg in old.signature.input_arg]
        given = [arg.type for arg in old.signature.output_arg]
        names = [results[arg.name] for arg in old.signature.output_arg]
        return self._function(root, taken, given, names)

    def _function(
        self, old: Region, taken: list[int], given: list[int], results: list[str]
    ) -> Region:
        function = function_pb2.FunctionDef()
        function.CopyFrom(old.proto)  # type: ignore[arg-type]
        del function.node_def[:]
        new = Region(function, callee_of=old.callee_of)
        prefix = self._prefixes[old]
        local = _Namer(prefix, self._nodes[prefix], function).local
        for arg, dtype in zip(function.signature.input_arg, taken, strict=True):
            arg.type = dtype
        if results:  # a predicate's are not among the calling node's inputs
            for arg, dtype, tensor in zip(
                function.signature.output_arg, given, results, strict=True
            ):
                arg.type = dtype
                function.ret[arg.name] = local(tensor)
        self._fill(new, old, local)
        return new

    def _fill(self, new: Region, old: Region, local: Callable[[str], str]) -> None:
        prefix = self._prefixes[old]
        calls = {prefix + call.node: call for call in old.calls}
        is_function = isinstance(new.proto, function_pb2.FunctionDef)
        pseudo = (JOINED_ARGUMENT, _ARGUMENT, _RESULT) if is_function else ()
        add = new.nodes.add  # type: ignore[attr-defined]
        for node in self._nodes[prefix]:
            if node.op in pseudo:
                continue
            kept = add()
            kept.CopyFrom(node)
            call = calls.get(node.name)
            if call is not None:
                kept.op = self._op_defs[node.op].name
                inputs, callees = self._divide_call(call, node)
                kept.input[:] = inputs
                new.calls.append(Call(call.node, call.kind, callees))
            if is_function:
                kept.name = node.name[len(prefix) :]
                kept.input[:] = list(map(local, kept.input[:]))

    def _divide_call(
        self, call: Call, node: node_def_pb2.NodeDef
    ) -> tuple[list[str], list[Region]]:
        """The calling node's own inputs, and the bodies with the dtypes it has now."""
        kind = call.kind
        taken = list(node.attr[kind.arguments].list.type)
        given = list(node.attr[kind.results].list.type)
        data = [name for name in node.input if name[0] != "^"]
        controls = [name for name in node.input if name[0] == "^"]
        own = kind.leading + len(taken)
        rest = data[own:]
        callees = []
        for callee in call.callees:
            results: list[str] = []
            if callee.callee_of[0] != kind.predicate:
                results, rest = rest[: len(given)], rest[len(given) :]
            callees.append(self._function(callee, taken, given, results))
        return [*data[:own], *controls], callees


def _prefix_of(name: str) -> str:
    head, mark, tail = name.partition(MARK)
    if not mark or not tail:
        return ""
    return f"{head}{mark}{tail.partition('/')[0]}/"


class _Namer:
    """Gives tensors of the joined graph the names they have in one function's body."""

    def __init__(
        self, prefix: str, nodes: list[node_def_pb2.NodeDef], function: function_pb2.FunctionDef
    ) -> None:
        self._cut = len(prefix)
        self._arguments = {arg.name for arg in function.signature.input_arg}
        self._op_of = {node.name[self._cut :]: node.op for node in nodes}

    def local(self, tensor: str) -> str:
        """The local name; a tensor of a node that the rewrite added has a GraphDef's name yet."""
        if tensor[0] == "^":
            return f"^{tensor[1 + self._cut :]}"
        name = tensor[self._cut :]
        node, _, port = name.partition(":")
        if node in self._arguments or (port and not port.isdigit()):
            return name
        op_type = registered_op_type(self._op_of[node])
        if op_type is None:
            raise KeyError(self._op_of[node])
        return f"{node}:{_output_arg(op_type, int(port or 0))}"


def _output_arg(op_type: OpType, port: int) -> str:
    """`arg:0`, for an op type whose outputs are single tensors."""
    return f"{op_type.op_def.output_arg[port].name}:0"
