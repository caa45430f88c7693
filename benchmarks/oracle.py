"""TensorFlow's own mixed-precision pass, run alone on a graph from Python.

For float16 it plans for a GPU, which it need not find if the process was started with
`oracle_environment.oracle_environment`; for bfloat16 it plans for a CPU.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2, rewriter_config_pb2
from tensorflow.python.grappler import tf_optimizer

DEVICES = {"float16": "GPU", "bfloat16": "CPU"}
"""Target dtype -> the device that its plan is for."""

_FIELDS = {
    "float16": "auto_mixed_precision",
    "bfloat16": "auto_mixed_precision_onednn_bfloat16",
}
_FETCHES = "train_op"


class OracleError(RuntimeError):
    """The pass gave no graph: its bfloat16 version makes some graphs with loops invalid."""


def run_oracle(meta_graph: meta_graph_pb2.MetaGraphDef, dtype: str) -> graph_pb2.GraphDef:
    """Runs the pass, every other graph optimizer switched off.

    Args:
        meta_graph: the graph; the collection "train_op" names what is fetched.
        dtype: "float16" or "bfloat16".

    Returns:
        The rewritten graph.

    Raises:
        OracleError: TensorFlow refused what the pass had made of the graph.
    """
    rewriter = rewriter_config_pb2.RewriterConfig
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    for field in options.DESCRIPTOR.fields:
        if field.enum_type is not None and field.enum_type.name == "Toggle":
            setattr(options, field.name, rewriter.OFF)
    options.memory_optimization = rewriter.NO_MEM_OPT
    options.meta_optimizer_iterations = rewriter.ONE
    options.disable_model_pruning = True
    options.min_graph_nodes = -1
    setattr(options, _FIELDS[dtype], rewriter.ON)
    try:
        return tf_optimizer.OptimizeGraph(config, meta_graph)
    except tf.errors.OpError as error:
        raise OracleError(error.message.partition("\n")[0]) from error


def timed_oracle(meta_graph: meta_graph_pb2.MetaGraphDef, dtype: str) -> float:
    """Runs the pass and returns the seconds that TensorFlow says the pass itself took.

    A call of `run_oracle` takes several times longer: the graph is serialized for it, a session is
    started, and two MLIR stages run that cannot be switched off. None of that is the pass.

    Raises:
        OracleError: as `run_oracle`, or TensorFlow said no time, because the process was started
            with another environment.
    """
    with tempfile.TemporaryFile() as log:
        stderr = os.dup(sys.stderr.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
        try:
            run_oracle(meta_graph, dtype)
        finally:
            os.dup2(stderr, sys.stderr.fileno())
            os.close(stderr)
        log.seek(0)
        text = log.read().decode(errors="replace")
    # The summary has one indented line for each time that an optimizer ran.
    line = rf"^  {_FIELDS[dtype]}: .* time = ([0-9.]+)ms"
    times = re.findall(line, text, flags=re.MULTILINE)
    if not times:
        raise OracleError("TensorFlow's log has no time of the pass.")
    return sum(map(float, times)) / 1e3


def fetches(meta_graph: meta_graph_pb2.MetaGraphDef) -> list[str]:
    """Returns the names that both passes must preserve."""
    return list(meta_graph.collection_def[_FETCHES].node_list.value)


def with_fetches(graph_def: graph_pb2.GraphDef, names: list[str]) -> meta_graph_pb2.MetaGraphDef:
    """Wraps a graph for `run_oracle`."""
    meta_graph = meta_graph_pb2.MetaGraphDef()
    meta_graph.graph_def.CopyFrom(graph_def)
    meta_graph.collection_def[_FETCHES].node_list.value.extend(names)
    return meta_graph


def corpus_names(directory: Path) -> list[str]:
    """Returns the names of the graphs NAME.pb of a corpus, sorted."""
    return sorted(Path(path).stem for path in glob.glob(str(directory / "*.pb")))


def read_graph(directory: Path, name: str) -> meta_graph_pb2.MetaGraphDef:
    """Reads NAME.pb."""
    return meta_graph_pb2.MetaGraphDef.FromString((directory / f"{name}.pb").read_bytes())


def read_shapes(directory: Path, name: str) -> tuple[int, dict[str, Any]]:
    """Reads the sidecars of a graph.

    Returns:
        What stands for an unknown dimension, and function name ("" for the graph itself) -> node
        name -> shapes of its outputs (None where the rank is unknown, -1 for a dimension).
    """
    description = json.loads((directory / f"{name}.json").read_text())
    with gzip.open(directory / f"{name}.shapes.json.gz", "rt") as file:
        return int(description.get("batch", 1)), json.load(file)
