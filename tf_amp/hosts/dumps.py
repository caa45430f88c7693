"""The trace directory: what was decided about each graph, and the graphs before and after."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tensorflow.core.framework import function_pb2, graph_pb2

from graph_passes.functions.call_tree import Library, no_library
from graph_passes.ir.graph_view import FunctionShapes, Shapes, no_shapes
from graph_passes.plan_remarks import Lines, no_lines
from tf_amp.hosts.function_redirects import with_callees
from tf_amp.whole_files import write_whole

if TYPE_CHECKING:
    from graph_passes import RewriteResult

_log = logging.getLogger("tf_amp")
Proto: TypeAlias = graph_pb2.GraphDef | function_pb2.FunctionDef


@dataclasses.dataclass(frozen=True)
class Origin:
    """What is known of a graph besides its proto, so that it can be planned again.

    Attributes:
        library: gives the functions that it calls.
        shapes: gives the static shapes of its tensors.
        function_shapes: gives those of the functions that it calls.
        lines: gives the Python lines of its nodes.
        preserve: its nodes that are fed, fetched or otherwise to be left alone.
    """

    library: Library = no_library
    shapes: Shapes | None = None
    function_shapes: FunctionShapes = no_shapes
    lines: Lines = no_lines
    preserve: tuple[str, ...] = ()


UNKNOWN = Origin()
"""The origin of a graph of which nothing else is known."""

# File systems commonly end a name at 255 bytes; prefix, number and suffix need the rest.
_NAME_LENGTH = 150

MAX_BYTES = 1 << 30
"""How much one process writes. Graphs are traced until then; a warning says when it is reached."""
MAX_LINES = 10_000
"""How many lines a file that grows gets, some 3 MB; a warning says when it has them."""
GZIP_FROM = 1 << 20
"""From how many bytes on remarks are compressed."""
STATUS = "status.json"
"""The file of the final counters, written when AMP or the process ends."""


class Dumps:
    """The dump files of one installation. Every method may be called from any thread.

    Args:
        directory: where everything is written, made if it does not exist. Each process writes to
            a new folder in it, named by time and process number, so that nothing is overwritten.
            None writes failed rewrites alone, to a new temporary directory.
        describe: gives the files that tell of the process, name -> text; asked once for a folder.
        max_bytes: how much a process may write; see `MAX_BYTES`.
    """

    def __init__(
        self,
        directory: str | None,
        describe: Callable[[], Mapping[str, str]] = dict,
        *,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._describe = describe
        self._max_bytes, self._written = max_bytes, 0
        self._numbers = itertools.count()
        self._lines: Counter[str] = Counter()
        # A handler of a signal or of the log may trace a function while this thread is in here.
        self._lock = threading.RLock()
        self._gave_up = False
        self._parent = self._usable(directory) if directory else None
        self._folder: tuple[int, Path] | None = None

    def write(
        self,
        name: str,
        result: RewriteResult,
        original: Proto | None,
        *,
        origin: Origin = UNKNOWN,
    ) -> Path | None:
        """Writes one rewrite, if a trace is asked for or the rewrite failed.

        The files are ``graphdef_preop_<name>_<n>.pb`` (before),
        ``graphdef_AutoMixedPrecision_<name>_<n>.pb`` (after; of a failed rewrite: what was
        rejected), ``remarks_<name>_<n>.jsonl`` (or ``.jsonl.gz``),
        ``shapes_<name>_<n>.json.gz`` and, where nodes are preserved, ``preserved_<name>_<n>.json``.
        A function is written as a GraphDef that has it in its library, the first one there; those
        that it calls stand behind it. A file is there whole or not at all.

        Args:
            name: the graph's name; what a file name cannot hold is replaced.
            result: what the pass returned.
            original: the graph before. None if the host no longer has it.
            origin: what else is known of the graph.

        Returns:
            The directory written to, None if nothing was (or could be) written.
        """
        failed = result.failure is not None
        with self._lock:
            directory = self._folder_of_process() if self._parent or failed else None
            number = next(self._numbers)
        if directory is None:
            return None
        stem = f"{re.sub('[^A-Za-z0-9_.-]+', '_', name)[-_NAME_LENGTH:]}_{number:04d}"
        after = result.rejected if failed else result.proto
        remarks = result.remarks(name, lines=origin.lines)
        callees = _callees(original, origin.library)
        shapes = json.dumps(known_shapes(original, origin, callees)).encode()
        files = {
            **_graph_file(f"graphdef_preop_{stem}", original, callees),
            **_graph_file(f"graphdef_AutoMixedPrecision_{stem}", after, result.extra_functions),
            f"shapes_{stem}.json.gz": gzip.compress(shapes),
        }
        if origin.preserve:
            files[f"preserved_{stem}.json"] = json.dumps(origin.preserve).encode()
        text = "\n".join(remarks.to_lines()).encode()
        large = len(text) > GZIP_FROM
        files[f"remarks_{stem}.jsonl{'.gz' if large else ''}"] = (
            gzip.compress(text) if large else text
        )
        return directory if self._put(directory, files) else None

    def append(self, name: str, entry: Mapping[str, Any]) -> None:
        """Adds a line to a file of this process, if a trace is asked for.

        Whoever reads the file meanwhile may find the last line cut off.

        Args:
            name: the file's name.
            entry: what becomes a JSON object.
        """
        line = json.dumps(entry, default=str) + "\n"
        with self._lock:
            folder = self._folder_of_process() if self._parent else None
            if folder is None or self._written + len(line) > self._max_bytes:
                return
            self._lines[name] += 1
            if self._lines[name] > MAX_LINES:
                return
            self._written += len(line)
            try:
                with (folder / name).open("a") as file:
                    file.write(line)
            except OSError as error:
                self._give_up(folder, error)
                return
            if self._lines[name] == MAX_LINES:
                _log.warning("%s has %d lines, and gets no more.", folder / name, MAX_LINES)

    def finish(self, status: Callable[[], Mapping[str, Any]]) -> None:
        """Writes the final state to the folder of this process, if it has one.

        Args:
            status: gives the state, as `tf_amp.status()` does.
        """
        if self._parent and self._folder is not None and self._folder[0] == os.getpid():
            text = json.dumps(status(), indent=1, default=str)
            self._put(self._folder[1], {STATUS: text.encode()})

    def _put(self, directory: Path, files: Mapping[str, bytes]) -> bool:
        """Writes files, all of them unless the process has written enough."""
        with self._lock:
            size = sum(map(len, files.values()))
            if self._written > self._max_bytes:
                return False
            if self._written + size > self._max_bytes:
                self._written = self._max_bytes + 1
                _log.warning(
                    "The trace in %s has reached %d MB, so no further graph is written to it.",
                    directory,
                    self._max_bytes >> 20,
                )
                return False
            self._written += size
        try:
            for file_name, content in files.items():
                write_whole(directory / file_name, content)
        except OSError as error:
            self._give_up(directory, error)
            return False
        return True

    def _usable(self, directory: str) -> Path | None:
        # Programs change their directory, between two graphs as well.
        path = Path(os.path.expanduser(directory)).absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Creating a file is the only test that holds for every file system and user.
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            self._give_up(path, error)
            return None
        return path

    def _folder_of_process(self) -> Path | None:
        """The folder of this process; one that was forked off gets its own."""
        if self._gave_up:
            return None
        process = os.getpid()
        if self._folder is None or self._folder[0] != process:
            parent = self._parent or Path(tempfile.gettempdir())
            stem = time.strftime("%Y%m%d-%H%M%S") if self._parent else "tf_amp"
            try:
                # Process numbers repeat, in containers above all: the name ends at random.
                folder = Path(tempfile.mkdtemp(prefix=f"{stem}_{process}_", dir=parent))
                if self._parent:
                    folder.chmod(0o755)
            except OSError as error:
                self._give_up(parent, error)
                return None
            self._folder = process, folder
            self._written = 0
            self._lines.clear()
            described = self._describe() if self._parent else {}
            try:
                for name, text in described.items():
                    write_whole(folder / name, text.encode())
            except OSError as error:
                self._give_up(folder, error)
                return None
        return self._folder[1]

    def _give_up(self, directory: Path, error: OSError) -> None:
        if not self._gave_up:
            _log.warning(
                "Graphs cannot be written to %s (%s), so none will be. The program runs on; "
                "choose a directory that this user may write to.",
                directory,
                error.strerror or error,
            )
        self._gave_up = True


def _callees(proto: Proto | None, library: Library) -> list[function_pb2.FunctionDef]:
    """The functions that a function calls, directly or not."""
    if not isinstance(proto, function_pb2.FunctionDef):
        return []
    return list(with_callees((proto,), library))[1:]


def known_shapes(
    proto: Proto | None, origin: Origin, callees: Iterable[function_pb2.FunctionDef] = ()
) -> dict[str, dict[str, Any]]:
    """Collects the static shapes in a graph and in functions.

    Args:
        proto: the graph, whose library counts, or function.
        origin: gives the shapes.
        callees: further functions.

    Returns:
        Function, "" for the graph itself -> node -> the shapes of its outputs.
    """
    if proto is None:
        return {}
    is_function = isinstance(proto, function_pb2.FunctionDef)
    bodies = {"": (_nodes_and_arguments(proto), origin.shapes)}
    for callee in (*callees, *(() if is_function else proto.library.function)):
        name = callee.signature.name
        bodies[name] = (_nodes_and_arguments(callee), origin.function_shapes(name))
    return {
        name: {node: known for node in nodes if (known := list(shapes(node)))}
        for name, (nodes, shapes) in bodies.items()
        if shapes is not None
    }


def _nodes_and_arguments(proto: Proto) -> list[str]:
    if isinstance(proto, graph_pb2.GraphDef):
        return [node.name for node in proto.node]
    return [*(a.name for a in proto.signature.input_arg), *(n.name for n in proto.node_def)]


def _graph_file(
    stem: str, proto: Proto | None, functions: Iterable[function_pb2.FunctionDef] = ()
) -> dict[str, bytes]:
    """A graph as a GraphDef: file name -> content, nothing for None."""
    if proto is None:
        return {}
    graph = graph_pb2.GraphDef()
    if isinstance(proto, function_pb2.FunctionDef):
        graph.library.function.append(proto)
    else:
        graph.CopyFrom(proto)
    for function in functions:  # naming the library would make an empty one
        graph.library.function.append(function)
    return {f"{stem}.pb": graph.SerializeToString(deterministic=True)}
