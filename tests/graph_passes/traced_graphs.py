"""Functions traced to GraphDefs, which are rewritten with their static shapes and run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from graph_passes import PrecisionConfig, RewriteResult, rewrite_graph_def
from graph_passes.ir.graph_view import Shape
from graph_passes.ir.view import view_body
from graph_passes.units.fusion import Fusion, find_units
from tf_amp.hosts.function_shapes import static_shapes


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced function.

    Attributes:
        graph_def: its graph; arguments are placeholders.
        arguments: the tensors to feed.
        results: the tensors to fetch.
        shapes: static shapes of the graph.
    """

    graph_def: graph_pb2.GraphDef
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    shapes: Callable[[str], tuple[Shape | None, ...]]

    def find(self, config: PrecisionConfig, preserve: Iterable[str] = ()) -> Fusion:
        """The units of the graph."""
        view = view_body(self.graph_def, self.shapes)
        return find_units(self.graph_def, view, config, {*self.results, *preserve})

    def rewrite(self, config: PrecisionConfig, preserve: Collection[str] = ()) -> RewriteResult:
        """The rewritten graph; a rewrite that was given up fails the test."""
        kept = {*self.results, *self.arguments, *preserve}
        result = rewrite_graph_def(self.graph_def, config, preserve=kept, shapes=self.shapes)
        assert result.failure is None
        return result

    def run(self, graph_def: graph_pb2.GraphDef, *values: np.ndarray) -> list[np.ndarray]:
        """The results of a graph that was made from this one."""
        with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
            tf.import_graph_def(graph_def, name="")
            fed = dict(zip(self.arguments, values, strict=True))
            return session.run(list(self.results), fed)  # type: ignore[no-any-return]


def trace(function: Callable[..., Any], *specs: tf.TensorSpec) -> Traced:
    """Traces a function of tensors."""
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    return Traced(
        graph_def=traced.graph.as_graph_def(),
        arguments=tuple(tensor.name for tensor in traced.inputs),
        results=tuple(tensor.name for tensor in traced.outputs),
        shapes=static_shapes(traced.graph),
    )


def of_op(graph_def: graph_pb2.GraphDef, op: str) -> list[node_def_pb2.NodeDef]:
    """The nodes of an op type."""
    return [node for node in graph_def.node if node.op == op]


def node_types(fusion: Fusion) -> list[str]:
    """The pattern of each unit, sorted."""
    return sorted(unit.partition(":")[0] for unit in fusion.units)
