"""Traces: graphs with their remarks, from the directory of LOG_PATH or planned here."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.graph_pb2 import GraphDef

from graph_passes import (
    FunctionRemarks,
    PrecisionConfig,
    RewriteResult,
    rewrite_function_def,
    rewrite_graph_def,
)
from graph_passes.ir.graph_view import FunctionShapes, Shapes
from graph_passes.plan_remarks import Lines
from graph_passes.remarks import RemarksError
from tf_amp.env_variables import ENABLE, LOG_PATH
from tf_amp.hosts.dumps import STATUS
from tf_amp.hosts.function_names import SIZES_NEAR
from tf_amp.hosts.offline import InferredShapes
from tf_amp.hosts.process_record import PROCESS, config_of
from tf_amp.hosts.session import TITLE, config_of_sessions
from tf_amp.loss_scale.history import LOSS_SCALE_EVENTS
from tf_amp.tool_error import ToolError

_REMARKS = re.compile(r"remarks_(.*_(\d+))\.jsonl(\.gz)?")


ReadShapes: TypeAlias = Callable[[], Mapping[str, Mapping[str, Any]]]


class TraceError(ToolError):
    """There is no trace, or none that this release can read."""


@dataclasses.dataclass(frozen=True)
class TracedGraph:
    """One graph that was planned.

    Attributes:
        remarks: what was decided.
        config: what it was planned with.
        read: gives the graph as it was before; a function is the first one of its library.
        read_shapes: gives the shapes that were known: function, "" for the graph itself -> node ->
            those of its outputs. None: they are inferred from the graph.
        preserve: names of its nodes that are fed, fetched or otherwise to be left alone.
    """

    remarks: FunctionRemarks
    config: PrecisionConfig
    read: Callable[[], GraphDef]
    read_shapes: ReadShapes | None = None
    preserve: tuple[str, ...] = ()

    @functools.cached_property
    def graph(self) -> GraphDef:
        """The graph as it was before."""
        return self.read()

    @functools.cached_property
    def _library(self) -> dict[str, FunctionDef]:
        return {function.signature.name: function for function in self.graph.library.function}

    @functools.cached_property
    def _shapes(self) -> tuple[Shapes, FunctionShapes]:
        """The shapes of the graph itself, and those of the functions that it calls."""
        if self.read_shapes is not None:
            known = {name: _lookup(of_node) for name, of_node in self.read_shapes().items()}
            return known.get("", lambda _: ()), known.get
        inferred = InferredShapes(self.graph)
        return inferred.of_graph, inferred.of_function

    def plan(self, config: PrecisionConfig, *, products_only: bool = False) -> FunctionRemarks:
        """Plans the graph again; with remarks on products and Casts alone if that is enough."""
        return self._rewrite(config).remarks(self.remarks.name, products_only=products_only)

    @functools.cached_property
    def _lines(self) -> Lines:
        """The Python lines of its nodes, as they were known when it was traced."""
        known = {(r.function, r.node): r.lines for r in self.remarks.remarks if r.lines}
        return lambda function, node: known.get((function, node), ())

    def after(self) -> GraphDef:
        """The graph as it is rewritten, by rewriting it again."""
        result = self._rewrite(self.config)
        if isinstance(result.proto, GraphDef):
            return result.proto
        return GraphDef(library={"function": [result.proto, *result.extra_functions]})

    def _rewrite(self, config: PrecisionConfig) -> RewriteResult:
        shapes, function_shapes = self._shapes
        if self.graph.node:
            return rewrite_graph_def(
                self.graph,
                config,
                preserve=self.preserve,
                shapes=shapes,
                function_shapes=function_shapes,
                lines=self._lines,
            )
        return rewrite_function_def(
            self.graph.library.function[0],
            config,
            library=self._library.get,
            shapes=shapes,
            function_shapes=function_shapes,
            name=self.remarks.name,
            lines=self._lines,
        )


def _lookup(of_node: Mapping[str, Any]) -> Shapes:
    return lambda node: [None if s is None else tuple(s) for s in of_node.get(node, ())]


@dataclasses.dataclass(frozen=True)
class Trace:
    """What one process did.

    Attributes:
        name: what to call it, for people.
        process: the process, as `process_record.describe` has it; {} for what was planned here.
        status: its counters at the end, {} where it has none (it was killed, or runs still).
        graphs: in the order in which they were planned.
        scale_events: what its loss scales did, as `LOSS_SCALE_EVENTS` describes it.
    """

    name: str
    process: Mapping[str, Any]
    status: Mapping[str, Any]
    graphs: tuple[TracedGraph, ...]
    scale_events: tuple[Mapping[str, Any], ...] = ()

    @property
    def rank(self) -> str:
        """Which task of a distributed training it is, such as "worker 0"; "" if it is none."""
        return str(self.process.get("rank", ""))


def in_force(graphs: Sequence[TracedGraph]) -> list[TracedGraph]:
    """Leaves out what was planned for an assumed batch and then again for that of its calls."""
    again = {
        name for name, near, _ in (g.remarks.name.partition(SIZES_NEAR) for g in graphs) if near
    }
    return [graph for graph in graphs if graph.remarks.name not in again]


def read_traces(directory: Path) -> list[Trace]:
    """Reads a trace directory, or the folder of one process in it.

    Args:
        directory: what `TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LOG_PATH` named.

    Returns:
        A trace for each process, the oldest first.

    Raises:
        TraceError: it holds no trace, or one that this release cannot read.
    """
    is_there = directory.is_dir()
    below = sorted(path for path in directory.iterdir() if path.is_dir()) if is_there else ()
    folders = [directory, *below]
    traces = [_read_folder(folder) for folder in folders if (folder / PROCESS).exists()]
    if not traces:
        raise TraceError(
            f"{str(directory)!r} {'holds no trace' if is_there else 'is no directory'}. A program "
            f"that runs with {ENABLE}=1 and {LOG_PATH}={directory} writes one there, unless it "
            "says that every graph stays in float32."
        )
    return traces


def _read_folder(folder: Path) -> Trace:
    process = _read_json(folder / PROCESS)
    status = _read_json(folder / STATUS) if (folder / STATUS).exists() else {}
    found = [(path, name) for path in folder.iterdir() if (name := _REMARKS.fullmatch(path.name))]
    found.sort(key=lambda pair: int(pair[1][2]))
    configs = functools.cache(
        lambda compiled: config_of(folder, process["config"], compiled=compiled)
    )
    graphs = []
    for path, name in found:
        remarks = _read_remarks(path)
        try:
            config = configs(remarks.compiled)
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(
                f"{str(folder / PROCESS)!r} tells of no configuration that this release knows: "
                f"{error}."
            ) from error
        if remarks.unknown_dimension is not None:
            config = dataclasses.replace(config, unknown_dimension=remarks.unknown_dimension)
        if remarks.name.startswith(TITLE):
            config = config_of_sessions(config)
        before = folder / f"graphdef_preop_{name[1]}.pb"
        shapes = folder / f"shapes_{name[1]}.json.gz"
        for part in (before, shapes):
            if not part.exists():
                raise TraceError(
                    f"{str(part)!r} is missing, which {path.name!r} needs beside it. Give the "
                    "whole directory, or delete all files of that graph."
                )
        read = functools.partial(_read_graph, before)
        read_shapes = functools.partial(_read_json, shapes)
        preserved = folder / f"preserved_{name[1]}.json"
        kept = json.loads(_content(preserved)) if preserved.exists() else ()
        graphs.append(TracedGraph(remarks, config, read, read_shapes, tuple(kept)))
    title = f"{process.get('script') or folder.name}, process {process.get('process')}"
    return Trace(title, process, status, tuple(_without_parts(graphs)), _read_events(folder))


def _read_events(folder: Path) -> tuple[Mapping[str, Any], ...]:
    """What loss scales did; of a process that runs or was killed the last line may be cut off."""
    path = folder / LOSS_SCALE_EVENTS
    if not path.exists():
        return ()
    *lines, _ = path.read_text().split("\n")
    try:
        return tuple(json.loads(line) for line in lines)
    except ValueError as error:
        raise TraceError(f"{str(path)!r} cannot be read: {error}.") from error


def _without_parts(graphs: list[TracedGraph]) -> Iterable[TracedGraph]:
    """Leaves out bodies that were planned with their callers too, in whose remarks they are."""
    parts = {remark.function for graph in graphs for remark in graph.remarks.remarks}
    readable = {re.sub(r"_\d+$", "", name) for name in parts} - {""}
    return (g for g in graphs if g.remarks.name.partition(" (")[0] not in readable)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(_content(path)))
    except (OSError, EOFError, TypeError, ValueError) as error:
        raise TraceError(f"{str(path)!r} cannot be read: {error}.") from error


def _read_remarks(path: Path) -> FunctionRemarks:
    try:
        return FunctionRemarks.from_lines(_content(path).split("\n"))
    except (OSError, EOFError, UnicodeDecodeError, RemarksError) as error:
        raise TraceError(f"{str(path)!r} cannot be read: {error}") from error


def _content(path: Path) -> str:
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()


def _read_graph(path: Path) -> GraphDef:
    try:
        return GraphDef.FromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise TraceError(f"{str(path)!r} cannot be read: {error}.") from error
