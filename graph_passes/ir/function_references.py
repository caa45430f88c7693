"""Which functions a graph calls."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator

from tensorflow.core.framework import attr_value_pb2, graph_pb2, node_def_pb2

from graph_passes.ir.adjacency import walk
from graph_passes.ops.op_types import registered_op_type

PIPELINE_MARK = "_tf_data_function"
"""Attr of functions that were traced for a tf.data pipeline."""


def called_functions(node: node_def_pb2.NodeDef) -> Iterator[str]:
    """Names of the functions that a node's attrs name, and the op type, which may be one."""
    yield node.op
    yield from (function.name for function in function_attrs(node))


def function_attrs(node: node_def_pb2.NodeDef) -> Iterator[attr_value_pb2.NameAttrList]:
    """The functions that a node's attrs name, in order of the attrs' names.

    The order of a map of attributes is another in each message.
    """
    for name in sorted(node.attr):
        value = node.attr[name]
        kind = value.WhichOneof("value")
        if kind == "func":
            yield value.func
        elif kind == "list":
            yield from value.list.func


def named_functions(
    nodes: Iterable[node_def_pb2.NodeDef],
) -> Iterator[tuple[node_def_pb2.NodeDef, str]]:
    """Each node that may name functions, with each name: perhaps of no function."""
    names_functions = functools.cache(may_name_functions)  # asked of every node
    for node in [node for node in nodes if names_functions(node.op)]:
        yield from ((node, name) for name in called_functions(node))


class FunctionReferences:
    """What the functions of a graph's library call.

    Attributes:
        library: name -> function.
    """

    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        self.library = {
            function.signature.name: function for function in graph_def.library.function
        }
        # A function's gradient belongs to it.
        self._gradients = {g.function_name: g.gradient_func for g in graph_def.library.gradient}
        bodies = {name: function.node_def for name, function in self.library.items()}
        self._named = {
            name: list(named_functions(nodes))
            for name, nodes in ({**bodies, "": graph_def.node} if bodies else {"": ()}).items()
        }

    def called(self, nodes: Iterable[node_def_pb2.NodeDef]) -> set[str]:
        """The functions of the library that nodes call themselves."""
        if not self.library:
            return set()
        return self._functions(name for _, name in named_functions(nodes))

    def _functions(self, references: Iterable[str]) -> set[str]:
        names = set(references)
        names.update([self._gradients[name] for name in names & self._gradients.keys()])
        return names & self.library.keys()

    def called_apart(
        self, nodes: Iterable[node_def_pb2.NodeDef], planned: Collection[str]
    ) -> set[str]:
        """The functions that nodes call, but those that were planned with them.

        What the plan left as it is keeps its name, and is done with. What that calls may have been
        left out of the plan.
        """
        called = walk(self.called(nodes), self._callees, planned.__contains__)
        return set(called).difference(planned)

    def reachable(self, names: Iterable[str] = ("",)) -> set[str]:
        """Some functions of the library with all that a run of them may call; "" is the graph."""
        return set(walk(names, self._callees)) - {""}

    def _callees(self, name: str) -> set[str]:
        return self._functions(called for _, called in self._named[name])

    def of_pipelines(self) -> set[str]:
        """The functions that run in a tf.data pipeline, with all that those call.

        TensorFlow marks what it traces for one. Other functions may run there by name. The body of
        a loop over a dataset is marked too, but it runs the program and prepares no data.
        """
        roots = {n for n, function in self.library.items() if PIPELINE_MARK in function.attr}
        named = [
            (node, name)
            for node, name in itertools.chain.from_iterable(self._named.values())
            if "Dataset" in node.op or node.op == "OneShotIterator"
        ]
        roots.difference_update(name for node, name in named if _loops_over_dataset(node))
        roots.update(name for node, name in named if not _loops_over_dataset(node))
        return self.reachable(roots & self.library.keys())


def _loops_over_dataset(node: node_def_pb2.NodeDef) -> bool:
    """Whether a node is a loop of a program over a dataset, as AutoGraph makes it.

    The attr tells the runtime that the function is no preprocessing, see `_general_purpose_scan` of
    tensorflow/python/data/ops/dataset_autograph.py.
    """
    attr = "use_default_device"
    return node.op == "ScanDataset" and attr in node.attr and not node.attr[attr].b


def may_name_functions(op: str) -> bool:
    """Whether nodes of an op may name functions; an unknown op may, and may be one."""
    op_type = registered_op_type(op)
    return op_type is None or op_type.runs_functions
