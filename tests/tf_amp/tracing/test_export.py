"""A planned model in the formats of Model Explorer and TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef

from graph_passes import PrecisionConfig
from tf_amp.tracing.export import GRAPHS, NODE_DATA, write_model_explorer, write_tensorboard
from tf_amp.tracing.jobs import Job, jobs_of
from tf_amp.tracing.models import plan_model
from tf_amp.tracing.trace import TracedGraph

CONFIG = PrecisionConfig(target_dtype="float16", device="GPU")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, x, name="product")

    @tf.function
    def outer(x: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("scope"):
            y = tf.exp(inner(x), name="exp")
        with tf.control_dependencies([tf.raw_ops.NoOp(name="first")]):
            return tf.identity(y, name="waits")

    graph = outer.get_concrete_function(tf.TensorSpec([64, 64])).graph
    path = tmp_path_factory.mktemp("model") / "model.pb"
    path.write_bytes(graph.as_graph_def().SerializeToString())
    (found,) = jobs_of([plan_model(path, CONFIG)])
    return found


def as_function(job: Job) -> Job:
    """The job with its graph as the function host traces it: a function in a library."""
    (graph,) = job.graphs
    body, *_ = graph.graph.library.function
    proto = GraphDef(library={"function": [body]})
    traced = TracedGraph(graph.remarks, graph.config, lambda: proto)
    return Job(job.traces, (type(job.functions[0])(traced, job.functions[0].figures, ()),))


def test_model_explorer(job: Job, tmp_path: Path) -> None:
    write_model_explorer([job], tmp_path / "made")
    graphs = json.loads((tmp_path / "made" / GRAPHS).read_text())["graphs"]
    main, called = ({node["id"]: node for node in graph["nodes"]} for graph in graphs)
    exp = main["scope/exp"]
    assert (exp["label"], exp["namespace"]) == ("Exp", "scope")
    (call,) = [node for node in main.values() if node["label"].endswith("PartitionedCall")]
    assert call["subgraphIds"] == [graphs[1]["id"]]
    for nodes in (main, called):  # every edge ends at a node
        edges = [edge for node in nodes.values() for edge in node["incomingEdges"]]
        assert edges
        assert {edge["sourceNodeId"] for edge in edges} <= nodes.keys()
    (controlled,) = [e for e in main["waits"]["incomingEdges"] if e["targetNodeInputId"] == "1"]
    assert controlled["sourceNodeOutputId"] == "control"
    assert called["x"]["namespace"] == "arguments"
    data: dict[str, Any] = json.loads((tmp_path / "made" / NODE_DATA).read_text())
    assert data.keys() <= {graph["id"] for graph in graphs}
    values = {n: r["value"] for of in data.values() for n, r in of["results"].items()}
    assert (values["product"], values["scope/exp"]) == (1, 0)


@pytest.mark.parametrize("of_function", [False, True])
def test_tensorboard(job: Job, tmp_path: Path, of_function: bool) -> None:
    write_tensorboard([as_function(job) if of_function else job], tmp_path)
    ops: dict[str, set[str]] = {}
    told = ""
    for path in tmp_path.rglob("events.*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            if event.graph_def:
                graph = GraphDef.FromString(event.graph_def)
                functions = (n for f in graph.library.function for n in f.node_def)
                ops[path.parent.name] = {node.op for node in (*graph.node, *functions)}
                assert graph.node
            for value in event.summary.value:
                told += value.tensor.string_val[0].decode()
    assert ops.keys() == {"before", "after"}
    assert "MatMul" in ops["before"] & ops["after"]
    assert "products low" in told
