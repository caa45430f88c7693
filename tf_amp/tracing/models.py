"""Models in files, planned without being run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

from graph_passes import FunctionRemarks, PrecisionConfig
from tf_amp.hosts.dumps import Origin, known_shapes
from tf_amp.hosts.function_shapes import called_shapes, static_shapes
from tf_amp.hosts.process_record import variables_set
from tf_amp.model_files import (
    ModelError,
    ends,
    keras_inputs,
    load_keras,
    read_graph,
    read_message,
    saved_model_file,
)
from tf_amp.tracing.trace import ReadShapes, Trace, TracedGraph


def plan_model(path: Path, config: PrecisionConfig, here: str = "") -> Trace:
    """Plans the graphs of a model.

    Of a SavedModel every signature is planned, of a Keras model the call for inference. Nothing is
    run. What is fed or fetched is known of signatures; of a bare GraphDef, every node that none
    reads counts as fetched.

    Args:
        path: a SavedModel's directory, a GraphDef or MetaGraphDef, or a `.keras` file.
        config: what to plan with.
        here: why nothing would be converted on this machine, if it is so.

    Raises:
        ModelError: it cannot be read, or there is nothing in it to plan.
    """
    graphs = [_planned(name, config, *graph) for name, *graph in read_graphs(path)]
    process = {
        "variables": variables_set(),
        "settings": {
            "reason": f"planned for {config.target_dtype} on {config.device}, not run"
            + (f"; on this machine {here}" if here else ""),
            "cost_table": config.cost_table.device_class if config.cost_table else "none",
            "why": f"sizes that are not known count as {config.unknown_dimension}",
            "list_edits": [f"{e.list_name} {e.action} {e.op}" for e in config.list_edits],
            "loss_scaling_reason": "nothing is trained",
        },
    }
    return Trace(path.name, process, {}, tuple(graphs))


def _planned(
    name: str, config: PrecisionConfig, graph: GraphDef, shapes: ReadShapes | None = None
) -> TracedGraph:
    empty = FunctionRemarks(
        name=name,
        target_dtype=config.target_dtype,
        device=config.device,
        total_nodes=len(graph.node),
    )
    traced = TracedGraph(empty, config, lambda: graph, shapes, ends(graph))
    return dataclasses.replace(traced, remarks=traced.plan(config))


def read_graphs(path: Path) -> Sequence[tuple[Any, ...]]:
    """The graphs of a model: a name, the graph, and how to get shapes if they are known.

    Raises:
        ModelError: it cannot be read, or nothing in it calls its functions.
    """
    if not path.exists():
        raise ModelError(f"There is no file or directory {str(path)!r}.")
    if path.is_dir():
        saved = read_message(saved_model_file(path), SavedModel)
        for meta in saved.meta_graphs:
            # What no signature calls is in no graph: it waits for Python to call it.
            only_functions = meta.object_graph_def.concrete_functions
            if only_functions and meta.signature_def.keys() <= {"__saved_model_init_op"}:
                raise ModelError(
                    f"{str(path)!r} has functions, but no signature that would call one. Save it "
                    "with some: tf.saved_model.save(model, DIRECTORY, signatures=model.FUNCTION), "
                    "where FUNCTION has an input_signature."
                )
        return [(" ".join(m.meta_info_def.tags), m.graph_def) for m in saved.meta_graphs]
    if path.suffix == ".keras":
        return [(path.stem, *_keras_graph(path))]
    graph = read_graph(path)
    return [(path.stem, getattr(graph, "graph_def", graph))]


def _keras_graph(path: Path) -> tuple[GraphDef, ReadShapes]:
    """The graph of a Keras model's call, as it is traced for inference."""
    import tensorflow as tf

    model = load_keras(path)
    specs = [tf.TensorSpec(x.shape, x.dtype, name=x.name) for x in keras_inputs(model, path)]
    call = tf.function(lambda *inputs: model([*inputs] if len(inputs) > 1 else inputs[0]))
    traced = call.get_concrete_function(*specs).graph
    graph = traced.as_graph_def()
    # The graph alone does not tell the shapes of variables.
    origin = Origin(shapes=static_shapes(traced), function_shapes=called_shapes(traced._functions))
    return graph, lambda: known_shapes(graph, origin)
