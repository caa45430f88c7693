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

from tensorflow.core.protobuf import meta_graph_pb2

from tf_amp.tracing.upstream import DEVICES, FETCHES, FIELDS, with_fetches
from tf_amp.tracing.upstream import UpstreamError as OracleError
from tf_amp.tracing.upstream import run_upstream as run_oracle

__all__ = [
    "DEVICES",
    "OracleError",
    "corpus_names",
    "fetches",
    "read_graph",
    "read_shapes",
    "run_oracle",
    "timed_oracle",
    "with_fetches",
]


def timed_oracle(meta_graph: meta_graph_pb2.MetaGraphDef, dtype: str) -> float:
    """Runs the pass and returns the seconds that TensorFlow says the pass itself took.

    A call of `run_oracle` takes several times longer: the graph is serialized for it, a session is
    started, and two MLIR stages run that cannot be switched off. None of that is the pass.

    Raises:
        OracleError: as `run_oracle`, or TensorFlow said no time, because the process was started
            with another environment or the CPU has no units for bfloat16.
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
    line = rf"^  {FIELDS[dtype]}: .* time = ([0-9.]+)ms"
    times = re.findall(line, text, flags=re.MULTILINE)
    if not times:
        raise OracleError(
            "TensorFlow's log has no time of the pass. For bfloat16 it runs on a CPU with "
            "AVX512_BF16 or AMX_BF16 alone; elsewhere name other --dtypes."
        )
    return sum(map(float, times)) / 1e3


def fetches(meta_graph: meta_graph_pb2.MetaGraphDef) -> list[str]:
    """Returns the names that both passes must preserve."""
    return list(meta_graph.collection_def[FETCHES].node_list.value)


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
