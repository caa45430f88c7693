"""Where values go in a graph, through the functions that it calls and through variables."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from tensorflow.core.framework import function_pb2
from tensorflow.core.framework.node_def_pb2 import NodeDef

from graph_passes.functions.call_tree import CALL_KINDS, CallKind, Library, function_names
from graph_passes.ir.adjacency import walk
from graph_passes.ir.copying import Graph, nodes_of
from graph_passes.ir.function_references import named_functions

Place: TypeAlias = tuple[str, str, int]
"""The function ("" for the graph), a node or an argument, and which output of a node that calls.

The outputs of any other node are one place: what goes in may come out of each.
"""


@dataclasses.dataclass(frozen=True)
class Program:
    """A graph with what it calls.

    Attributes:
        graph: The graph or function.
        find: Gives a function by name, None for one that is not to be looked into.
    """

    graph: Graph
    find: Library

    def bodies(self) -> Iterator[tuple[str, Graph]]:
        """The graph, named "", and the functions that it calls, directly or not, each once."""
        pending = {"": self.graph}
        seen = set(pending)
        while pending:
            name, body = pending.popitem()
            yield name, body
            for _, called in named_functions(nodes_of(body)):
                function = None if called in seen else self.find(called)
                seen.add(called)
                if function is not None:
                    pending[called] = function

    def nodes(self) -> Iterator[NodeDef]:
        """The nodes of all bodies."""
        for _, body in self.bodies():
            yield from nodes_of(body)


class DataFlow:
    """The places of a program; each function counts once.

    What a function is given that runs otherwise than by a call, such as the body of a loop over a
    dataset, comes from nowhere.

    Attributes:
        nodes: The nodes that call nothing.
        makers: Place -> the places of its inputs, in their order; of what goes into a function or
            comes out of one, of all that it may be.
        readers: The other way round.
    """

    def __init__(self, program: Program) -> None:
        """Reads a program."""
        self.nodes: dict[Place, NodeDef] = {}
        self.makers: dict[Place, list[Place]] = defaultdict(list)
        self.readers: dict[Place, list[Place]] = defaultdict(list)
        self._bodies = {name: _Body(name, body) for name, body in program.bodies()}
        for body in self._bodies.values():
            for node in nodes_of(body.graph):
                self._add(body, node)
        for place, makers in self.makers.items():
            for maker in makers:
                self.readers[maker].append(place)

    def _add(self, body: _Body, node: NodeDef) -> None:
        inputs = [body.place(name) for name in node.input if not name.startswith("^")]
        kind = body.calls.get(node.name)
        if kind is None:
            place = (body.name, node.name, 0)
            self.nodes[place] = node
            self.makers[place] = inputs
            return
        arguments = inputs[kind.leading :]
        outputs = [(body.name, node.name, port) for port in range(_count(node, kind.results))]
        if kind.is_loop:
            for output, argument in zip(outputs, arguments, strict=False):
                self.makers[output].append(argument)
            arguments = outputs  # those of each round but the first, and they are of that too
        for attr, _, name in function_names(node, kind):
            callee = self._bodies.get(name)
            if callee is None:
                for output in outputs:
                    self.makers[output] += arguments
                continue
            for place, argument in zip(callee.arguments, arguments, strict=False):
                self.makers[place].append(argument)
            if attr != kind.predicate:
                for output, result in zip(outputs, callee.results, strict=False):
                    self.makers[output].append(result)

    def back(self, starts: Iterable[Place]) -> set[Place]:
        """Some places and all that their values are made of."""
        return set(walk(starts, lambda place: self.makers.get(place, ())))

    def sources(self, place: Place) -> set[Place]:
        """Where a variable comes from that is handed on by its handle or reference."""

        def step(place: Place) -> list[Place]:
            makers = self.makers.get(place, [])
            return makers[:1] if place in self.nodes else makers

        return {found for found in walk([place], step) if not self.makers.get(found)}


class _Body:
    """A graph, or the body of a function."""

    def __init__(self, name: str, graph: Graph) -> None:
        self.name, self.graph = name, graph
        self.calls: Mapping[str, CallKind] = {
            node.name: CALL_KINDS[node.op] for node in nodes_of(graph) if node.op in CALL_KINDS
        }
        self.arguments: list[Place] = []
        self.results: list[Place] = []
        if isinstance(graph, function_pb2.FunctionDef):
            signature = graph.signature
            self.arguments = [(name, argument.name, 0) for argument in signature.input_arg]
            self.results = [self.place(graph.ret[result.name]) for result in signature.output_arg]

    def place(self, tensor: str) -> Place:
        """Where a tensor comes from, "node", "node:1" or "node:output:1"."""
        name, _, output = tensor.partition(":")
        port = output.rpartition(":")[2] if name in self.calls else ""
        return self.name, name, int(port or 0)


def _count(node: NodeDef, attr: str) -> int:
    return len(node.attr[attr].list.type) if attr in node.attr else 0
