"""A call tree as one graph, and the same tree taken apart again.

In the inlined graph the nodes of every body stand beside those of the main graph. A calling node
reads, besides its own inputs, what the called bodies give, and a body's argument is another name
for what the calling node takes. One type attribute of the calling node then stands for all places
of a value that must have one dtype: input, argument, result and output. Painting, planning
and verification need no other notion of a call.
"""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2
from tensorflow.python.framework import op_def_registry

from graph_passes.emit.apply import Applied
from graph_passes.functions.call_tree import Call, Region
from graph_passes.functions.loop_invariants import Unchanged
from graph_passes.ir.copying import Graph, nodes_of
from graph_passes.ir.graph_view import ARGUMENT, INLINED_ARGUMENT, RESULT, GraphView, Shape, Shapes
from graph_passes.ir.indexing import concatenated
from graph_passes.ops.op_types import OpType
from graph_passes.policy.config import UNKNOWN_DIMENSION

MARK = "@"
"""In the names of all nodes of bodies. It is not legal in names of nodes, so that no name of the
main graph is like one of a body."""

_MOST_ROUNDS = UNKNOWN_DIMENSION**3
"""What loops in loops count for at most, so that sums of prices stay far from overflowing."""


class Inlined:
    """A call tree as one graph.

    Attributes:
        proto: the inlined graph. Tensors have the names they have in their bodies, after a prefix.
        op_types: op of nodes that stand for calls -> its op type, which has the name of the call's.
        prefixes: region -> the prefix of its nodes' names.
        boundary: names of the nodes that stand for arguments and results of a main graph that is
            itself a function; they must not change.
        starts: region -> the number of its first node.
        arguments: region -> the number of the node that stands for its first argument.
        calling: the numbers of the calling nodes.
        aliases: number of a node that is another name for what a calling node takes -> number and
            input port of that node.
        unchanged: the numbers of nodes in loops of which no round changes what they give.
        rounds: for each node how often one run of the main graph is taken to run it: a loop is as
            long as a dimension that is not known; int64 [nodes].
    """

    def __init__(self, root: Region) -> None:
        """Makes one graph of a call tree; nothing of the tree is changed."""
        self.proto = graph_pb2.GraphDef()
        self._nodes = self.proto.node
        self.op_types: dict[str, OpType] = {}
        self.prefixes = {root: ""}
        self.boundary: list[str] = []
        self.starts: dict[Region, int] = {}
        self.arguments = {root: 0}
        self.calling: list[int] = []
        self.aliases: dict[int, tuple[int, int]] = {}
        main, is_function = root.proto, isinstance(root.proto, function_pb2.FunctionDef)
        for arg in main.signature.input_arg if is_function else ():  # type: ignore[union-attr]
            self._add_end(arg.name, ARGUMENT, arg.type, [])
        for region in root.walk():  # callers first
            self._add_body(region)
        loops = [call for region in self.prefixes for call in region.calls if call.kind.is_loop]
        self.unchanged = frozenset(itertools.chain.from_iterable(map(self._unchanged_in, loops)))
        for arg in main.signature.output_arg if is_function else ():  # type: ignore[union-attr]
            # A result may bear the name of a node; "@" keeps this name out of the way.
            self._add_end(f"{arg.name}{MARK}", RESULT, arg.type, [main.ret[arg.name]])  # type: ignore[union-attr]
        self.rounds = self._count_rounds()

    def _add_end(self, name: str, op: str, dtype: int, read: list[str]) -> None:
        """Adds the node of an argument or a result of the main graph."""
        self._nodes.add(name=name, op=op, input=read).attr["T"].type = dtype
        self.boundary.append(name)

    def _add_body(self, region: Region) -> None:
        prefix, add = self.prefixes[region], self._nodes.add
        calls = {call.node: call for call in region.calls}
        calling = []
        start = self.starts[region] = len(self._nodes)
        for number, node in enumerate(region.nodes, start):
            new = add()
            new.CopyFrom(node)
            if calls and node.name in calls:
                calling.append((calls[node.name], number, new))
                self.calling.append(number)
            if prefix:
                _rename(new, prefix)
        for call, number, new in calling:
            self._add_call(call, number, new)

    def _add_call(self, call: Call, number: int, node: node_def_pb2.NodeDef) -> None:
        kind = call.kind
        results: list[str] = []
        groups = 0
        for callee in call.callees:
            function: function_pb2.FunctionDef = callee.proto  # type: ignore[assignment]
            prefix = f"{function.signature.name}{MARK}{len(self.prefixes)}/"
            self.prefixes[callee], self.arguments[callee] = prefix, len(self._nodes)
            for port, arg in enumerate(function.signature.input_arg, kind.leading):
                self.aliases[len(self._nodes)] = (number, port)
                self._nodes.add(name=prefix + arg.name, op=INLINED_ARGUMENT)
            if callee.callee_of[0] != kind.predicate:
                groups += 1
                ends = function.signature.output_arg
                results.extend(prefix + function.ret[arg.name] for arg in ends)
        op = f"{node.op}+{groups}"
        self.op_types[op] = _call_op_type(node.op, kind.results, groups)
        node.op = op
        data, controls = _divide(node)
        node.input[:] = [*data, *results, *controls]

    def _count_rounds(self) -> np.ndarray:
        of_region: dict[Region, int] = {}
        rounds = np.ones(len(self._nodes), np.int64)
        for region in self.prefixes:  # callers first
            times = of_region.setdefault(region, 1)
            start = self.starts[region]
            rounds[start : start + len(region.nodes)] = times
            for call in region.calls:
                more = UNKNOWN_DIMENSION if call.kind.is_loop else 1
                for callee in call.callees:
                    of_region[callee] = min(times * more, _MOST_ROUNDS)
                    function: function_pb2.FunctionDef = callee.proto  # type: ignore[assignment]
                    first = self.arguments[callee]
                    count = len(function.signature.input_arg)
                    rounds[first : first + count] = of_region[callee]
        return rounds

    def _unchanged_in(self, loop: Call) -> list[int]:
        body = loop.callee("body")
        positions, reads = Unchanged(loop).numbers()
        first, start = self.arguments[body], self.starts[body]
        return [*(first + position for position in positions), *(start + read for read in reads)]

    def shapes(self, of_regions: Mapping[Region, Shapes | None]) -> Shapes:
        """The static shapes of the inlined graph, from those of its regions."""
        known = {self.prefixes[region]: shapes for region, shapes in of_regions.items()}

        def shapes_of(node: str) -> Sequence[Shape | None]:
            prefix = _prefix_of(node)
            shapes = known[prefix]
            return () if shapes is None else shapes(node[len(prefix) :])

        return shapes_of

    def view(
        self, views: Mapping[Region, GraphView], shapes: Mapping[Region, Shapes | None]
    ) -> GraphView:
        """The view of the inlined graph.

        Args:
            views: those of the bodies, which have one table of node_types. What stands for calls,
                arguments and results is read.
            shapes: the static shapes of the regions' tensors, where they are known.
        """
        nodes = list(self.proto.node)
        is_copy = np.zeros(len(nodes), bool)
        moved = []
        for region, view in views.items():
            start, count = self.starts[region], len(region.nodes)
            is_copy[start : start + count] = True
            numbers = np.full(len(view.nodes), -1, np.int32)
            arguments = view.body.start
            numbers[:arguments] = np.arange(arguments) + self.arguments[region]
            numbers[arguments : arguments + count] = np.arange(count) + start
            moved.append(numbers)
        is_copy[self.calling] = False
        anew = np.flatnonzero(~is_copy).tolist()
        node_types = next(iter(views.values())).node_index.node_types
        for op, op_type in self.op_types.items():
            node_types.define(op, op_type)
        bodies = concatenated([(self.prefixes[r], view.node_index) for r, view in views.items()])
        index = bodies.edited(nodes, np.concatenate(moved), anew)
        return GraphView(
            nodes,
            index,
            is_function=False,
            shapes=self.shapes(shapes),
            aliases=self.aliases,
            unchanged=self.unchanged,
            rounds=self.rounds,
        )


def _divide(node: node_def_pb2.NodeDef) -> tuple[list[str], list[str]]:
    """The tensors that a node reads, and its control inputs."""
    read = node.input[:]
    end = next((port for port, name in enumerate(read) if name[0] == "^"), len(read))
    return read[:end], read[end:]


@functools.lru_cache(maxsize=256)
def _call_op_type(op: str, results: str, groups: int) -> OpType:
    """The op type with as many inputs more as the bodies have results."""
    op_def = copy.deepcopy(op_def_registry.get(op))
    for group in range(groups):
        op_def.input_arg.add(name=f"results_{group}", type_list_attr=results)
    return OpType(op_def)


def _rename(node: node_def_pb2.NodeDef, prefix: str) -> None:
    node.name = prefix + node.name
    if read := node.input[:]:
        node.input[:] = [
            f"^{prefix}{name[1:]}" if name[0] == "^" else prefix + name for name in read
        ]


def outline(root: Region, inlined: Inlined, applied: Applied) -> Region:
    """The call tree that was inlined, with the bodies that the rewritten inlined graph has.

    Returns:
        A new tree of the same form: copies of the old bodies, with the nodes that were rewritten.
        The dtypes in a body's signature are those that its calling node has now; names of
        functions are the old ones.
    """
    return _Divider(inlined, applied).divide(root)


class _Divider:
    def __init__(self, inlined: Inlined, applied: Applied) -> None:
        self._inlined = inlined
        self._nodes = applied.proto.node  # type: ignore[union-attr]
        self._changed = sorted(applied.touched.union(inlined.calling))
        self._casts: dict[str, list[node_def_pb2.NodeDef]] = {}
        for cast in self._nodes[len(inlined.proto.node) :]:
            self._casts.setdefault(_prefix_of(cast.name), []).append(cast)
        self._is_cast = applied.casts.__contains__
        # What is known of the signature of a body before it is made.
        self._signatures: dict[Region, tuple[list[int], list[int], list[str]]] = {}

    def divide(self, root: Region) -> Region:
        """A tree of the same form with the rewritten bodies."""
        main = root.proto
        if isinstance(main, function_pb2.FunctionDef):
            end = len(self._inlined.proto.node)
            taken = [arg.type for arg in main.signature.input_arg]
            made = [arg.type for arg in main.signature.output_arg]
            results = [node.input[0] for node in self._nodes[end - len(made) : end]]
            self._signatures[root] = taken, made, results
        bodies = {region: self._body(region) for region in root.walk()}  # callers first
        return root.with_bodies(bodies.__getitem__)

    def _body(self, region: Region) -> Graph:
        """A copy of a body with the signature and the nodes that it has now."""
        body = copy.deepcopy(region.proto)
        prefix, start = self._inlined.prefixes[region], self._inlined.starts[region]
        if isinstance(body, function_pb2.FunctionDef):
            taken, made, results = self._signatures[region]
            for arg, dtype in zip(body.signature.input_arg, taken, strict=True):
                arg.type = dtype
            if results:  # a predicate's are not among the calling node's inputs
                ends = zip(body.signature.output_arg, made, results, strict=True)
                for arg, dtype, tensor in ends:
                    arg.type = dtype
                    (body.ret[arg.name],) = self._local([tensor], prefix)
        nodes = nodes_of(body)
        calls = iter(region.calls)
        first, end = (bisect.bisect_left(self._changed, n) for n in (start, start + len(nodes)))
        pairs = [(nodes[n - start], self._nodes[n]) for n in self._changed[first:end]]
        add = nodes.add  # type: ignore[attr-defined]
        pairs += [(add(), cast) for cast in self._casts.get(prefix, ())]
        for kept, node in pairs:
            kept.CopyFrom(node)
            op_type = self._inlined.op_types.get(node.op)
            if op_type is not None:
                kept.op = op_type.name
                kept.input[:] = self._read_call(next(calls), node)
            if isinstance(body, function_pb2.FunctionDef):
                kept.name = node.name[len(prefix) :]
                kept.input[:] = self._local(kept.input[:], prefix)
        return body

    def _local(self, tensors: Sequence[str], prefix: str) -> list[str]:
        """The names that tensors have within a function; a Cast has a GraphDef's name yet."""
        cut = len(prefix)
        return [
            f"^{name[1 + cut :]}"
            if name[0] == "^"
            else name[cut:] + (":y:0" if self._is_cast(name) else "")
            for name in tensors
        ]

    def _read_call(self, call: Call, node: node_def_pb2.NodeDef) -> list[str]:
        """The calling node's own inputs; notes the dtypes that its bodies' signatures have now."""
        kind = call.kind
        taken = list(node.attr[kind.arguments].list.type)
        made = list(node.attr[kind.results].list.type)
        data, controls = _divide(node)
        own = kind.leading + len(taken)
        rest = data[own:]
        for callee in call.callees:
            results: list[str] = []
            if callee.callee_of[0] != kind.predicate:
                results, rest = rest[: len(made)], rest[len(made) :]
            self._signatures[callee] = taken, made, results
        return [*data[:own], *controls]


def split_prefix(name: str) -> tuple[str, str]:
    """The function that a node of an inlined graph is from, "" for the main graph, and its name."""
    prefix = _prefix_of(name)
    return prefix.partition(MARK)[0], name[len(prefix) :]


def _prefix_of(name: str) -> str:
    head, mark, tail = name.partition(MARK)
    if not tail:
        return ""
    return f"{head}{mark}{tail.partition('/')[0]}/"
