"""Graphs to rewrite with all that the pass is told of them: those of a corpus, and traced ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import tensorflow as tf
from tensor_shapes import body_shapes, static_shapes
from workloads import WORKLOADS

from graph_passes import PrecisionConfig, RewriteResult, rewrite_graph_def

MODES = ("training", "inference")


@dataclasses.dataclass(frozen=True)
class SampleGraph:
    """One graph.

    Attributes:
        name: for the table.
        graph_def: the graph, with its functions.
        preserve: what is fetched.
        shapes: function name, "" for the graph itself -> node name -> shapes of its outputs (None
            for an unknown rank, -1 for an unknown dimension).
        batch: what stands for an unknown dimension.
    """

    name: str
    graph_def: Any
    preserve: tuple[str, ...]
    shapes: dict[str, dict[str, Any]]
    batch: int

    def rewrite(self, config: PrecisionConfig) -> RewriteResult:
        """The graph as the pass makes it.

        Raises:
            RuntimeError: the rewrite was given up.
        """
        result = rewrite_graph_def(
            self.graph_def,
            config,
            preserve=self.preserve,
            shapes=static_shapes(self.shapes.get("", {})),
            function_shapes=body_shapes(self.graph_def.library.function, self.shapes),
        )
        if result.failure is not None:
            raise RuntimeError(f"The rewrite of {self.name!r} was given up: {result.failure}")
        return result


def corpus_graphs(directory: Path, names: list[str] | None = None) -> Iterator[SampleGraph]:
    """Reads the graphs of a corpus, as `cast_bytes.py` describes it, one after another.

    Args:
        directory: of the corpus.
        names: the graphs to read; None for all.
    """
    for name in oracle.corpus_names(directory) if names is None else names:
        meta_graph = oracle.read_graph(directory, name)
        batch, shapes = oracle.read_shapes(directory, name)
        fetched = tuple(oracle.fetches(meta_graph))
        yield SampleGraph(name, meta_graph.graph_def, fetched, shapes, batch)


def traced_graphs(names: list[str] | None = None) -> Iterator[SampleGraph]:
    """Traces a graph that calls a function, a training step or inference, of each workload.

    Args:
        names: the networks to trace; None for all.
    """
    for name, workload in WORKLOADS.items():
        if names is not None and name not in names:
            continue
        model, (x, y) = workload.compiled(jit_compile=False)
        model.optimizer.build(model.trainable_variables)
        model.compute_loss(tf.constant(x[:1]), tf.constant(y[:1]), model(x[:1]))
        steps = {
            "training": lambda x, y, m=model: m.train_step((x, y))["loss"],
            "inference": lambda x, _, m=model: m(x, training=False),
        }
        for mode in MODES:
            step = tf.function(steps[mode], autograph=False)
            # Some rules are for functions alone: of a graph anything may be fetched.
            calls_it = tf.function(lambda x, y, step=step: step(x, y), autograph=False)
            concrete = calls_it.get_concrete_function(
                tf.TensorSpec.from_tensor(tf.constant(x)), tf.TensorSpec.from_tensor(tf.constant(y))
            )
            yield _of_function(f"{name}, {mode}", concrete, len(x))


def _of_function(name: str, concrete: Any, batch: int) -> SampleGraph:
    graph = concrete.graph
    shapes = {"": _shapes_of(graph)}
    shapes |= {name: _shapes_of(f.graph) for name, f in graph._functions.items()}
    fetched = {tensor.op.name for tensor in concrete.outputs}
    fetched |= {op.name for op in graph.control_outputs}
    return SampleGraph(name, graph.as_graph_def(), tuple(sorted(fetched)), shapes, batch)


def _shapes_of(graph: tf.Graph) -> dict[str, list[list[int] | None]]:
    return {
        op.name: [
            None if t.shape.rank is None else [-1 if d is None else d for d in t.shape.as_list()]
            for t in op.outputs
        ]
        for op in graph.get_operations()
    }
