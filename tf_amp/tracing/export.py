"""Traces for the viewers that people have: Model Explorer and TensorBoard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from graph_passes import Remark
from tf_amp.tracing.columns import shapes_text
from tf_amp.tracing.jobs import Job
from tf_amp.tracing.text import overview
from tf_amp.whole_files import write_whole

GRAPHS, NODE_DATA = "graphs.json", "node_data.json"
_ENDS = {"_Arg": "arguments", "_Retval": "results"}
_LOW, _FLOAT32 = "#2467c9", "#c8741a"


def write_model_explorer(jobs: Iterable[Job], folder: Path) -> None:
    """Writes the graphs as they were, and which of their nodes were converted.

    `graphs.json` is a graph collection of Model Explorer: a graph for each traced function, and one
    for each function that it calls. `node_data.json` lays over it 1 for a node in the target dtype
    and 0 for one in float32.

    Args:
        jobs: what to write.
        folder: where; it is made if it does not exist.

    Raises:
        OSError: they cannot be written.
    """
    graphs: list[dict[str, Any]] = []
    data: dict[str, Any] = {}
    for graph in (graph for job in jobs for graph in job.graphs):
        title = f"{len(graphs)} {graph.remarks.name}"
        of_function: dict[str, dict[str, Remark]] = {}
        for remark in graph.remarks.remarks:
            if remark.kind in ("converted", "kept"):
                of_node = of_function.setdefault(remark.function, {})
                # One of the type attributes is enough to be low.
                if remark.kind == "converted" or remark.node not in of_node:
                    of_node[remark.node] = remark
        for name, nodes in _bodies(graph.graph):
            known = of_function.get(name, {})
            called = {function.signature.name for function in graph.graph.library.function}
            made = [_node(node, known.get(node.name), title, called) for node in nodes]
            identity = f"{title}/{name}" if name else title
            graphs.append({"id": identity, "nodes": made})
            results = {
                node: {"value": int(low := remark.kind == "converted"),
                       "bgColor": _LOW if low else _FLOAT32, "textColor": "#ffffff"}
                for node, remark in known.items()
            }  # fmt: skip
            data[identity] = {"name": graph.config.target_dtype, "results": results}
    folder.mkdir(parents=True, exist_ok=True)
    collection = {"label": "tf_amp", "graphs": graphs}
    write_whole(folder / GRAPHS, json.dumps(collection).encode())
    write_whole(folder / NODE_DATA, json.dumps(data).encode())


def _bodies(graph: GraphDef) -> Iterator[tuple[str, Sequence[NodeDef]]]:
    """The nodes of a graph and of the functions that it calls, by name; "" is the graph itself."""
    functions = list(graph.library.function)
    if graph.node:
        yield "", list(graph.node)
    else:
        yield "", _nodes_of(functions.pop(0))
    for function in functions:
        yield function.signature.name, _nodes_of(function)


def _nodes_of(function: FunctionDef) -> list[NodeDef]:
    given = [NodeDef(name=arg.name, op="_Arg") for arg in function.signature.input_arg]
    results = [
        NodeDef(name=f"{name}_RetVal", op="_Retval", input=[tensor])
        for name, tensor in function.ret.items()
    ]
    return [*given, *function.node_def, *results]


def _node(node: NodeDef, remark: Remark | None, title: str, called: set[str]) -> dict[str, Any]:
    told = {"op": node.op, "device": node.device}
    if remark is not None:
        told |= {
            "why": remark.reason,
            "blocked by": " -> ".join(remark.path),
            "shape": shapes_text(remark),
            "line": ", in ".join(remark.lines),
        }
    edges = []
    for place, tensor in enumerate(node.input):
        name, _, port = tensor.partition(":")
        edges.append(
            {
                "sourceNodeId": name.lstrip("^"),
                "sourceNodeOutputId": "control" if name.startswith("^") else port or "0",
                "targetNodeInputId": str(place),
            }
        )
    names = [node.op, *(value.func.name for value in node.attr.values())]
    return {
        "id": node.name,
        "label": node.op,
        "namespace": _ENDS.get(node.op, node.name.rpartition("/")[0]),
        "attrs": [{"key": key, "value": value} for key, value in told.items() if value],
        "incomingEdges": edges,
        "subgraphIds": [f"{title}/{name}" for name in names if name in called],
    }


def write_tensorboard(jobs: Iterable[Job], folder: Path) -> None:
    """Writes event files: each graph before and after the rewrite, and the overview as text.

    Each is a run of its own, "<number> <function>/before" and ".../after", because TensorBoard
    shows one graph of a run.

    Args:
        jobs: what to write.
        folder: the log directory.

    Raises:
        OSError: they cannot be written.
    """
    import tensorflow as tf

    try:
        _write_events(jobs, folder)
    except tf.errors.OpError as error:
        raise OSError(error.message) from error


def _write_events(jobs: Iterable[Job], folder: Path) -> None:
    import tensorflow as tf

    text = tf.compat.v1.SummaryMetadata()
    text.plugin_data.plugin_name = "text"
    number = 0
    for job in jobs:
        for graph in job.graphs:
            run = re.sub(r"[^\w .()-]+", "_", f"{number} {graph.remarks.name}")
            for when, proto in (("before", graph.graph), ("after", graph.after())):
                _write_graph(folder / run / when, proto)
            number += 1
        with tf.summary.create_file_writer(str(folder / "overview")).as_default():
            # `tf.summary.text` needs the package tensorboard, this does not.
            told = "\n\n".join(f"    {line}".replace("\n", "\n    ") for line in overview(job))
            tf.summary.write(job.name, tf.constant(told), step=0, metadata=text)


def _write_graph(folder: Path, graph: GraphDef) -> None:
    import tensorflow as tf

    shown = graph
    if not graph.node:
        # A function in the library is drawn only where it is called.
        first, *others = graph.library.function
        shown = GraphDef(node=_nodes_of(first), library={"function": others})
    with tf.summary.create_file_writer(str(folder)).as_default():
        tf.summary.graph(shown)
