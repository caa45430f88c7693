"""Files of a rewrite."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import json
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest
from tensorflow.core.framework import function_pb2, graph_pb2, types_pb2

from graph_passes import (
    FunctionRemarks,
    PrecisionConfig,
    RewriteResult,
    rewrite_function_def,
    rewrite_graph_def,
)
from tf_amp.hosts import dumps as dumps_module
from tf_amp.hosts.dumps import STATUS, Dumps, Origin

CONFIG = PrecisionConfig(target_dtype="bfloat16", device="CPU")


@pytest.fixture
def graph() -> graph_pb2.GraphDef:
    graph = graph_pb2.GraphDef()
    graph.node.add(name="given", op="Placeholder").attr["dtype"].type = types_pb2.DT_FLOAT
    product = graph.node.add(name="product", op="MatMul", input=["given", "given"])
    product.attr["T"].type = types_pb2.DT_FLOAT
    return graph


@pytest.fixture
def result(graph: graph_pb2.GraphDef) -> RewriteResult:
    result = rewrite_graph_def(graph, CONFIG)
    assert result.changed
    return result


@pytest.fixture
def failure(graph: graph_pb2.GraphDef, result: RewriteResult) -> RewriteResult:
    return dataclasses.replace(
        result, proto=graph, changed=False, failure="planted", rejected=result.proto
    )


def _read(path: Path) -> graph_pb2.GraphDef:
    return graph_pb2.GraphDef.FromString(path.read_bytes())


def test_files_of_a_graph(tmp_path: Path, graph: graph_pb2.GraphDef, result: RewriteResult) -> None:
    parent = tmp_path / "made" / "for it"
    directory = Dumps(str(parent)).write("train/step:0", result, graph)
    assert directory is not None
    assert directory.parent == parent
    stem = "train_step_0_0000"
    assert {path.name for path in directory.iterdir()} == {
        f"graphdef_preop_{stem}.pb",
        f"graphdef_AutoMixedPrecision_{stem}.pb",
        f"remarks_{stem}.jsonl",
        f"shapes_{stem}.json.gz",
    }
    assert _read(directory / f"graphdef_preop_{stem}.pb") == graph
    assert _read(directory / f"graphdef_AutoMixedPrecision_{stem}.pb") == result.proto
    remarks = FunctionRemarks.from_lines(
        (directory / f"remarks_{stem}.jsonl").read_text().splitlines()
    )
    assert remarks == result.report.remarks("train/step:0")


def test_a_function_is_written_as_a_graph_with_a_library(tmp_path: Path) -> None:
    function = function_pb2.FunctionDef()
    function.signature.name = "f"
    function.signature.input_arg.add(name="x", type=types_pb2.DT_FLOAT)
    function.signature.output_arg.add(name="y", type=types_pb2.DT_FLOAT)
    product = function.node_def.add(name="product", op="MatMul", input=["x", "x"])
    product.attr["T"].type = types_pb2.DT_FLOAT
    function.ret["y"] = "product:product:0"
    result = rewrite_function_def(function, CONFIG, library=lambda _: None)
    directory = Dumps(str(tmp_path)).write("f", result, function)
    assert directory is not None
    assert list(_read(directory / "graphdef_preop_f_0000.pb").library.function) == [function]
    after = _read(directory / "graphdef_AutoMixedPrecision_f_0000.pb").library.function
    assert list(after) == [result.proto]


def test_nothing_is_written_unless_asked_for(
    graph: graph_pb2.GraphDef, result: RewriteResult
) -> None:
    assert Dumps(None).write("step", result, graph) is None


def test_a_failure_is_written_without_being_asked_for(
    graph: graph_pb2.GraphDef, failure: RewriteResult
) -> None:
    dumps = Dumps(None)
    directory = dumps.write("step", failure, graph)
    try:
        assert directory is not None
        assert dumps.write("next", failure, graph) == directory
        assert _read(directory / "graphdef_preop_step_0000.pb") == graph
        after = _read(directory / "graphdef_AutoMixedPrecision_step_0000.pb")
        assert after == failure.rejected
        lines = (directory / "remarks_step_0000.jsonl").read_text().splitlines()
        assert FunctionRemarks.from_lines(lines).failure == "planted"
    finally:
        shutil.rmtree(str(directory))


def test_after_a_failure_successes_are_still_not_written(
    graph: graph_pb2.GraphDef, result: RewriteResult, failure: RewriteResult
) -> None:
    dumps = Dumps(None)
    directory = dumps.write("step", failure, graph)
    try:
        assert dumps.write("step", result, graph) is None
    finally:
        shutil.rmtree(str(directory))


def test_a_directory_that_cannot_be_made_is_one_warning(
    tmp_path: Path,
    graph: graph_pb2.GraphDef,
    result: RewriteResult,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "tf_amp"):
        dumps = Dumps(str(tmp_path / "file" / "below"))
        assert dumps.write("step", result, graph) is None
    (record,) = caplog.records
    assert str(tmp_path / "file" / "below") in record.getMessage()
    assert "Not a directory" in record.getMessage()


def test_a_directory_that_goes_away_is_one_warning(
    tmp_path: Path,
    graph: graph_pb2.GraphDef,
    result: RewriteResult,
    caplog: pytest.LogCaptureFixture,
) -> None:
    dumps = Dumps(str(tmp_path / "gone"))
    (tmp_path / "gone").rmdir()
    with caplog.at_level(logging.WARNING, "tf_amp"):
        assert dumps.write("step", result, graph) is None
        assert dumps.write("step", result, graph) is None
    assert len(caplog.records) == 1


def test_a_program_may_change_its_directory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    graph: graph_pb2.GraphDef,
    result: RewriteResult,
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    dumps = Dumps("trace")
    folders = []
    for directory in ("elsewhere", ".."):
        monkeypatch.chdir(directory)
        folders.append(dumps.write("step", result, graph))
    first, second = folders
    assert first == second and first is not None
    assert first.parent == tmp_path / "trace"


def test_long_names_and_threads(
    tmp_path: Path, graph: graph_pb2.GraphDef, result: RewriteResult
) -> None:
    dumps = Dumps(str(tmp_path))
    threads = [
        threading.Thread(target=dumps.write, args=("name/" * 200, result, graph)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (directory,) = tmp_path.iterdir()
    assert len(list(directory.iterdir())) == 8 * 4


def test_a_handler_may_trace_while_the_folder_is_made(
    tmp_path: Path, graph: graph_pb2.GraphDef, result: RewriteResult
) -> None:
    def interrupted() -> dict[str, str]:
        dumps.write("of_a_handler", result, graph)
        return {}

    dumps = Dumps(str(tmp_path), interrupted)
    thread = threading.Thread(target=dumps.write, args=("step", result, graph), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert len([*tmp_path.rglob("remarks_*")]) == 2


def test_no_process_overwrites_what_another_wrote(
    tmp_path: Path, graph: graph_pb2.GraphDef, result: RewriteResult
) -> None:
    dumps = Dumps(str(tmp_path))
    first = dumps.write("step", result, graph)
    child = os.fork()
    if child == 0:
        os._exit(0 if dumps.write("step", result, graph) != first else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert dumps.write("next", result, graph) == first
    # The next start in a container has the same process number, and maybe the same second.
    assert Dumps(str(tmp_path)).write("step", result, graph) != first
    assert len(list(tmp_path.iterdir())) == 3
    assert len(list(tmp_path.rglob("*.pb"))) == 8


def test_functions_stand_behind_the_one_that_calls_them(
    tmp_path: Path, result: RewriteResult
) -> None:
    caller, callee, inner = (function_pb2.FunctionDef() for _ in range(3))
    library = {"callee": callee, "inner": inner}
    for function, name, called in ((caller, "caller", "callee"), (callee, "callee", "inner")):
        function.signature.name = name
        call = function.node_def.add(name="call", op="PartitionedCall")
        call.attr["f"].func.name = called
    inner.signature.name = "inner"
    known = {"call": [(2, None)]}
    origin = Origin(library.get, lambda node: known.get(node, ()), lambda _: None)
    inner.node_def.add(name="again", op="callee")  # recursion ends
    directory = Dumps(str(tmp_path)).write("f", result, caller, origin=origin)
    assert directory is not None
    written = graph_pb2.GraphDef.FromString(
        (directory / "graphdef_preop_f_0000.pb").read_bytes()
    ).library.function
    assert [function.signature.name for function in written] == ["caller", "callee", "inner"]
    with gzip.open(directory / "shapes_f_0000.json.gz", "rt") as shapes:
        assert json.load(shapes) == {"": {"call": [[2, None]]}}


def test_many_remarks_are_compressed(
    tmp_path: Path,
    graph: graph_pb2.GraphDef,
    result: RewriteResult,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dumps_module, "GZIP_FROM", 10)
    directory = Dumps(str(tmp_path)).write("step", result, graph)
    assert directory is not None
    with gzip.open(directory / "remarks_step_0000.jsonl.gz", "rt") as lines:
        assert FunctionRemarks.from_lines(lines) == result.report.remarks("step")


def test_a_trace_is_bounded(
    tmp_path: Path,
    graph: graph_pb2.GraphDef,
    result: RewriteResult,
    caplog: pytest.LogCaptureFixture,
) -> None:
    dumps = Dumps(str(tmp_path), max_bytes=4_000)
    with caplog.at_level(logging.WARNING, "tf_amp"):
        written = [dumps.write("step", result, graph) is not None for _ in range(9)]
    assert written[0]
    assert not written[-1]
    assert written == sorted(written, reverse=True)
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 4_000
    assert len(list(tmp_path.glob("*/*"))) == 4 * sum(written)
    assert len(caplog.records) == 1


def test_the_process_describes_itself_once_and_leaves_its_state(
    tmp_path: Path, graph: graph_pb2.GraphDef, result: RewriteResult
) -> None:
    asked = iter(["first"])
    dumps = Dumps(str(tmp_path), lambda: {"process.json": next(asked)})
    dumps.finish(dict)  # there is no folder yet
    assert not list(tmp_path.iterdir())
    directory = dumps.write("step", result, graph)
    assert dumps.write("step", result, graph) == directory
    assert directory is not None
    assert (directory / "process.json").read_text() == "first"
    dumps.finish(lambda: {"casts": 2})
    assert json.loads((directory / STATUS).read_text()) == {"casts": 2}


def test_lines_are_added_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dumps_module, "MAX_LINES", 3)
    dumps = Dumps(str(tmp_path))
    with caplog.at_level(logging.WARNING, "tf_amp"):
        for number in range(5):
            dumps.append("events.jsonl", {"number": number})
    (file,) = tmp_path.glob("*/events.jsonl")
    assert [json.loads(line)["number"] for line in file.read_text().splitlines()] == [0, 1, 2]
    assert len(caplog.records) == 1
    Dumps(None).append("events.jsonl", {})  # no trace is asked for


def test_a_full_disk_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    dumps = Dumps(str(tmp_path))
    dumps.append("events.jsonl", {"number": 0})
    with caplog.at_level(logging.WARNING, "tf_amp"), monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        for number in range(5):
            dumps.append("events.jsonl", {"number": number})
    (said,) = caplog.messages
    assert "No space left on device" in said
