"""The tree of calls below a graph: each call that is planned with its caller has bodies of its own.

TensorFlow's own pass sees the calls of a graph inlined and its loops lowered. Here a call keeps its
function, but every call gets a private copy of the body, so that two callers never have to agree
on a dtype. Calls that could gain nothing from that are left alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from tensorflow.core.framework import (
    attr_value_pb2,
    function_pb2,
    graph_pb2,
    node_def_pb2,
    types_pb2,
)

from graph_passes.ir.adjacency import walk
from graph_passes.ir.copying import Graph, nodes_of
from graph_passes.ops.node_types import NodeTypeTable

Library: TypeAlias = Callable[[str], function_pb2.FunctionDef | None]

MUST_COMPILE = "_XlaMustCompile"
"""The attr of a function, and of a node that calls one, that XLA compiles as a whole."""

GROWTH = 4
"""Private copies may make the graph this many times as large; calls beyond that are left alone."""

# Attrs by which TensorFlow replaces one function by another of the same signature, or runs it in
# a data pipeline.
_PINNED_SIGNATURE = ("api_implements", "_tf_data_function")

# XLA compiles no function inline, and keeps nothing in kernels.
_NO_INLINE = "_noinline"

# Lists of tensors are variants.
_MAY_BE_FLOAT32 = frozenset((types_pb2.DT_FLOAT, types_pb2.DT_VARIANT))


def no_library(_: str) -> None:
    """The library of a graph that calls no function."""


@dataclasses.dataclass(frozen=True)
class CallKind:
    """How an op calls functions.

    Attributes:
        functions: the attrs that name the functions, in order.
        arguments: the `list(type)` attr of what the functions take.
        results: the `list(type)` attr of what they give.
        leading: inputs of the op before those that the functions take.
        predicate: the attr among `functions` whose result is no output of the op.
    """

    functions: tuple[str, ...]
    arguments: str = "Tin"
    results: str = "Tout"
    leading: int = 0
    predicate: str = ""

    @property
    def is_loop(self) -> bool:
        """Whether the outputs are the inputs of the next round."""
        return self.arguments == self.results


_LOOP = CallKind(("cond", "body"), "T", "T", predicate="cond")
_BRANCHES = CallKind(("then_branch", "else_branch"), leading=1)
_CASES = CallKind(("branches",), leading=1)
_PLAIN = CallKind(("f",))

CALL_KINDS = {
    "While": _LOOP,
    "StatelessWhile": _LOOP,
    "If": _BRANCHES,
    "StatelessIf": _BRANCHES,
    "Case": _CASES,
    "StatelessCase": _CASES,
    "PartitionedCall": _PLAIN,
    "StatefulPartitionedCall": _PLAIN,
}
"""The ops that call functions with the dtypes of one attr, by op type."""


@dataclasses.dataclass(eq=False)
class Region:
    """The main graph, or the body of a function as one call has it.

    Attributes:
        proto: the graph or function.
        calls: the calls in it that are planned with it, in node order.
        callee_of: the attr of the calling node that names it and the position within that attr,
            ("", 0) for the main graph.
    """

    proto: Graph
    calls: list[Call] = dataclasses.field(default_factory=list)
    callee_of: tuple[str, int] = ("", 0)

    @property
    def is_main(self) -> bool:
        """Whether it is the main graph."""
        return not self.callee_of[0]

    @property
    def name(self) -> str:
        """The name of the function that it is the body of, "" for a GraphDef."""
        return "" if isinstance(self.proto, graph_pb2.GraphDef) else self.proto.signature.name

    @property
    def nodes(self) -> Sequence[node_def_pb2.NodeDef]:
        """The nodes of the body."""
        return nodes_of(self.proto)

    def walk(self) -> Iterator[Region]:
        """This region and all below it, callers first."""
        pending = [self]
        while pending:
            region = pending.pop()
            yield region
            pending.extend(callee for call in reversed(region.calls) for callee in call.callees)

    def called_apart(self) -> Iterator[str]:
        """The functions that it calls by nodes whose calls are not planned with it."""
        planned = {call.node for call in self.calls}
        return _called_by(node for node in self.nodes if node.name not in planned)

    def with_bodies(self, body_of: Callable[[Region], Graph]) -> Region:
        """A tree of the same form with other bodies.

        Args:
            body_of: gives the new body of a region, with the calling nodes under their old names.
        """
        new: dict[Region, Region] = {}
        for region in reversed(list(self.walk())):
            calls = [
                Call(call.node, call.kind, [new[callee] for callee in call.callees])
                for call in region.calls
            ]
            new[region] = Region(body_of(region), calls, region.callee_of)
        return new[self]


@dataclasses.dataclass(eq=False)
class Call:
    """One calling node.

    Attributes:
        node: its name.
        kind: how its op calls functions.
        callees: the bodies, in the order of `CallKind.functions`.
    """

    node: str
    kind: CallKind
    callees: list[Region]

    def callee(self, attr: str) -> Region:
        """The body that an attr names."""
        return next(region for region in self.callees if region.callee_of[0] == attr)


def function_names(node: node_def_pb2.NodeDef, kind: CallKind) -> list[tuple[str, int, str]]:
    """The functions a node calls: (attr, position within the attr, function name)."""
    found: list[tuple[str, int, str]] = []
    for attr in kind.functions:
        if attr not in node.attr:  # to read it would add it
            continue
        value = node.attr[attr]
        functions = value.list.func or [value.func]
        found.extend((attr, position, func.name) for position, func in enumerate(functions))
    return found


def node_types_with(library: Library) -> NodeTypeTable:
    """An empty table of node_types, for graphs whose ops may be functions of a library."""
    return NodeTypeTable(lambda op: None if (made := library(op)) is None else made.signature)


def is_set(attrs: Mapping[str, attr_value_pb2.AttrValue], name: str) -> bool:
    """Whether an attr is there and true; to ask for one that is not there would add it."""
    return name in attrs and attrs[name].b


class CallTrees:
    """Finds the calls that are worth planning together with their caller.

    A tensor can only stay in low precision across a call where both sides have work for it: the
    caller has ops of its own to convert, or two calls that have, or the call is a loop, which is
    its own neighbour. A graph that merely wraps one call gains nothing, unless XLA compiles that
    and need not, nor does a call without work that gives neither float32 nor a list of tensors: a
    branch that sets a variable, say.

    Args:
        library: gives a function by name, None for an unknown one.
        counts_as_work: whether an op type is one for whose sake others are converted.
        main: the graph at the top.
        others: names of functions for which trees are built, too. Private copies, in all trees
            together, may have `GROWTH` times the nodes of the graph and of all functions called.
    """

    def __init__(
        self,
        library: Library,
        counts_as_work: Callable[[str], bool],
        main: Graph,
        others: Iterable[str] = (),
    ) -> None:
        self._library = functools.cache(library)
        self._counts_as_work = counts_as_work
        nodes = Region(main).nodes
        callees = self._callees_of_all([*others, *_called_by(nodes)])
        bodies = [self._library(name).node_def for name in callees]  # type: ignore[union-attr]
        self._left = GROWTH * (len(nodes) + sum(map(len, bodies)))
        self._working = self._find_working(callees)

    def build(self, main: Graph) -> Region:
        """The main graph's region.

        Calls of recursive functions, of functions without fixed dtypes and of those for whose
        copies there is no room are not in the tree.
        """
        root = Region(main)
        above: set[str] = set()
        pending: list[Iterator[Region]] = [self._expand(root, above)]
        names: list[str] = []
        while pending:
            region = next(pending[-1], None)
            if region is not None:
                names.append(region.name)
                above.add(names[-1])
                pending.append(self._expand(region, above))
                continue
            pending.pop()
            if pending:
                above.remove(names.pop())
        return root

    def _callees_of_all(self, pending: list[str]) -> dict[str, set[str]]:
        """Some functions and those that they call, directly or not -> those that each calls."""
        found: dict[str, set[str]] = {}
        while pending:
            name = pending.pop()
            function = None if name in found else self._library(name)
            if function is not None:
                found[name] = set(_called_by(function.node_def))
                pending.extend(found[name])
        return found

    def _find_working(self, callees: Mapping[str, Collection[str]]) -> set[str]:
        """The functions that have, or call one that has, an op for whose sake others convert."""
        callers: dict[str, list[str]] = {}
        for caller, called in callees.items():
            for name in called:
                callers.setdefault(name, []).append(caller)
        working = (
            name
            for name in callees
            if any(self._counts_as_work(n.op) for n in self._library(name).node_def)  # type: ignore[union-attr]
        )
        return set(walk(working, lambda name: callers.get(name, ())))

    def _expand(self, region: Region, above: Collection[str]) -> Iterator[Region]:
        """Adds the calls of a region to it; yields each callee, to be expanded before the next."""
        calls = [node for node in region.nodes if node.op in CALL_KINDS]
        working = {n.name for n in calls if not self._working.isdisjoint(_called_by((n,)))}
        beside = len(working) > 1 or any(self._counts_as_work(node.op) for node in region.nodes)
        for node in calls:
            kind = CALL_KINDS[node.op]
            works = node.name in working
            is_apart = kind.is_loop or is_set(node.attr, MUST_COMPILE)
            if not (beside or (is_apart and works)):
                continue
            callees = self._callees(node, kind, above, works=works)
            if callees is not None:
                region.calls.append(Call(node.name, kind, callees))
                yield from callees

    def _callees(
        self, node: node_def_pb2.NodeDef, kind: CallKind, above: Collection[str], *, works: bool
    ) -> list[Region] | None:
        if any(attr not in node.attr for attr in (*kind.functions, kind.arguments, kind.results)):
            return None
        taken = list(node.attr[kind.arguments].list.type)
        made = list(node.attr[kind.results].list.type)
        if not works and _MAY_BE_FLOAT32.isdisjoint(made):
            return None
        if "Tcond" in node.attr and node.attr["Tcond"].type == types_pb2.DT_FLOAT:
            return None  # whether it is 0 must not depend on the dtype
        callees = []
        size = 0
        for attr, position, name in function_names(node, kind):
            function = self._library(name)
            if function is None or name in above:
                return None
            if any(attr in function.attr for attr in _PINNED_SIGNATURE):
                return None
            if is_set(function.attr, _NO_INLINE) and not is_set(function.attr, MUST_COMPILE):
                return None  # its calls share kernels, which count what they have drawn
            if [arg.type for arg in function.signature.input_arg] != taken:
                return None
            if attr != kind.predicate and (
                [arg.type for arg in function.signature.output_arg] != made
            ):
                return None
            size += len(function.node_def) + len(taken)
            callees.append(Region(function, callee_of=(attr, position)))
        if size > self._left:
            return None
        self._left -= size
        return callees


def _called_by(nodes: Iterable[node_def_pb2.NodeDef]) -> Iterator[str]:
    for node in nodes:
        if node.op in CALL_KINDS:
            yield from (name for _, _, name in function_names(node, CALL_KINDS[node.op]))
