"""TensorFlow's own `auto_mixed_precision` pass, as an oracle for parity mode.

The pass reads its environment once a process, and the variable that lets it plan for a GPU on a
machine without one must be absent in CPU mode. So each mode has a process of its own, which
answers one graph after another over its pipes; starting it costs an import of TensorFlow.

Run as a script, this module is that process.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import meta_graph_pb2

from tf_amp.tracing.upstream import with_fetches as meta_graph

__all__ = ["MODES", "Mode", "Oracle", "OracleError", "fetches_of", "meta_graph"]

_SIMULATE_GPU = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_SIMULATE_GPU"
_PREFIX = "TF_AUTO_MIXED_PRECISION"
_HEADER = struct.Struct("<?dQ")  # whether it failed, seconds, bytes that follow
_LENGTH = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to run the pass, with the same choice in terms of `PrecisionConfig`."""

    target_dtype: str
    device: str
    field: str
    env: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.target_dtype


MODES = {
    "float16": Mode("float16", "GPU", "auto_mixed_precision", ((_SIMULATE_GPU, "1"),)),
    "bfloat16": Mode("bfloat16", "CPU", "auto_mixed_precision_onednn_bfloat16"),
}


class OracleError(Exception):
    """TensorFlow's pass refused the graph, or its process died."""


def fetches_of(meta: meta_graph_pb2.MetaGraphDef) -> list[str]:
    """The nodes that the pass preserves in a MetaGraphDef."""
    return list(meta.collection_def["train_op"].node_list.value)


class Oracle:
    """The pass of one mode, in a process that lives until `close`."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self._process: subprocess.Popen[bytes] | None = None
        self._log: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`

    def rewrite(self, meta: meta_graph_pb2.MetaGraphDef) -> graph_pb2.GraphDef:
        """The graph as TensorFlow's pass rewrites it.

        Raises:
            OracleError: the pass refused the graph, or its process died (the next call has a
                fresh one).
        """
        return self.timed_rewrite(meta)[0]

    def timed_rewrite(self, meta: meta_graph_pb2.MetaGraphDef) -> tuple[graph_pb2.GraphDef, float]:
        """The rewritten graph, and the seconds that the call of the pass took."""
        process = self._started()
        request = meta.SerializeToString()
        try:
            process.stdin.write(_LENGTH.pack(len(request)) + request)
            process.stdin.flush()
            failed, seconds, length = _HEADER.unpack(_read(process.stdout, _HEADER.size))
            payload = _read(process.stdout, length)
        except (BrokenPipeError, EOFError) as error:
            code = process.wait(timeout=60)
            self._process = None
            self._log.seek(0)
            raise OracleError(
                f"the process of the {self.mode} pass exited with {code}: "
                f"{self._log.read().decode(errors='replace')[-2000:]}"
            ) from error
        if failed:
            raise OracleError(payload.decode())
        return graph_pb2.GraphDef.FromString(payload), seconds

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(timeout=60)
            self._process = None
        self._log.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            env = {k: v for k, v in os.environ.items() if not k.startswith(_PREFIX)}
            env |= {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"} | dict(self.mode.env)
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), self.mode.field],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
            )
        return self._process


def _read(pipe: BinaryIO, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = pipe.read(size - len(data))
        if not chunk:
            raise EOFError(f"the pipe ended after {len(data)} of {size} bytes")
        data += chunk
    return data


def _serve(field: str) -> None:
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints to stdout must not get between the answers
    from tensorflow.python.grappler import tf_optimizer

    from tf_amp.tracing.upstream import only

    config = only(field)
    while header := requests.read(_LENGTH.size):
        meta = meta_graph_pb2.MetaGraphDef.FromString(_read(requests, *_LENGTH.unpack(header)))
        start = time.perf_counter()
        try:
            failed, payload = False, tf_optimizer.OptimizeGraph(config, meta)
            seconds = time.perf_counter() - start
            payload = payload.SerializeToString()
        except Exception as error:  # whatever it is, the caller is told
            failed, payload, seconds = True, f"{type(error).__name__}: {error}".encode(), 0.0
        answers.write(_HEADER.pack(failed, seconds, len(payload)) + payload)
        answers.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
