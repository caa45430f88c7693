"""Writes graphs to disk as they were before and after the rewrite, with the lists in force."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from google.protobuf import text_format
from tensorflow.core.framework import function_pb2, graph_pb2

from graph_passes.policy.op_lists import LIST_NAMES, load_op_lists

if TYPE_CHECKING:
    from graph_passes import PrecisionConfig, RewriteResult

_log = logging.getLogger("tf_amp")
Proto: TypeAlias = graph_pb2.GraphDef | function_pb2.FunctionDef

# File systems commonly end a name at 255 bytes; prefix, number and suffix need the rest.
_NAME_LENGTH = 150


class Dumps:
    """The dump files of one installation. Every method may be called from any thread.

    Args:
        directory: where everything is written, made if it does not exist. Each process writes to
            a new folder in it, named by time and process number, so that nothing is overwritten.
            None writes failed rewrites alone, to a new temporary directory.
        config: what graphs are rewritten with.
    """

    def __init__(self, directory: str | None, config: PrecisionConfig) -> None:
        self._config = config
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._gave_up = False
        self._parent = self._usable(directory) if directory else None
        self._folder: tuple[int, Path] | None = None

    def write(self, name: str, result: RewriteResult, original: Proto | None) -> Path | None:
        """Writes one rewrite, if dumps are asked for or the rewrite failed.

        The files are ``graphdef_preop_<name>_<n>.pb`` and ``.pb.txt`` (before),
        ``graphdef_AutoMixedPrecision_<name>_<n>.pb`` and ``.pb.txt`` (after; of a failed rewrite:
        what was rejected), ``paintbuckets_AutoMixedPrecision_<name>_<n>.txt`` (the four lists) and
        ``report_AutoMixedPrecision_<name>_<n>.json``. A function is written as a GraphDef that has
        it in its library.

        Args:
            name: the graph's name; what a file name cannot hold is replaced.
            result: what the pass returned.
            original: the graph before. None if the host no longer has it.

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
        try:
            _write_graph(directory / f"graphdef_preop_{stem}", original)
            _write_graph(
                directory / f"graphdef_AutoMixedPrecision_{stem}", after, result.extra_functions
            )
            lists = directory / f"paintbuckets_AutoMixedPrecision_{stem}.txt"
            lists.write_text(self._lists_in_force(), encoding="utf-8")
            report = {"name": name, "failure": result.failure, **result.report.to_dict()}
            (directory / f"report_AutoMixedPrecision_{stem}.json").write_text(
                json.dumps(report, indent=1, default=str), encoding="utf-8"
            )
        except OSError as error:
            self._give_up(directory, error)
            return None
        return directory

    def _usable(self, directory: str) -> Path | None:
        path = Path(os.path.expanduser(directory))
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

    def _lists_in_force(self) -> str:
        lists = load_op_lists(self._config)
        return "\n".join(
            f"{list_name}:\n" + "".join(f"  {op}\n" for op in sorted(lists.ops(list_name)))
            for list_name in LIST_NAMES
        )


def _write_graph(
    stem: Path, proto: Proto | None, functions: Iterable[function_pb2.FunctionDef] = ()
) -> None:
    if proto is None:
        return
    graph = graph_pb2.GraphDef()
    if isinstance(proto, function_pb2.FunctionDef):
        graph.library.function.append(proto)
    else:
        graph.CopyFrom(proto)
    for function in functions:
        graph.library.function.append(function)
    stem.with_name(f"{stem.name}.pb").write_bytes(graph.SerializeToString(deterministic=True))
    text = text_format.MessageToString(graph)
    stem.with_name(f"{stem.name}.pb.txt").write_text(text, encoding="utf-8")
