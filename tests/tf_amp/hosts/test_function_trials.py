"""Trials of rewritten functions against their originals."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from session_facts import RunPython, facts_of
from tensorflow.core.framework import function_pb2

from tf_amp.hosts import function_trials
from tf_amp.hosts.function_trials import Contest, FunctionTrials, digest_of

FLOAT, BFLOAT16 = 1, 14
LOW, FLOAT32 = b"step", b"step__float32"


class Function:
    """What a trial ends with."""


def unexpected(name: str, error: Exception) -> None:
    raise AssertionError(name) from error


class Clock:
    """A clock that only calls of functions move on."""

    def __init__(self, seconds: dict[bytes, Sequence[float]]) -> None:
        self.now = 0.0
        self.called: list[bytes] = []
        self._seconds = {name: iter(times) for name, times in seconds.items()}

    def run(self, name: bytes, inputs: Sequence[Any], outputs: int) -> Any:
        self.now += next(self._seconds[name])
        self.called.append(name)
        return [*inputs, outputs]


def contest(digest: str = "digest", lose: Callable[[], None] = lambda: None) -> Contest:
    return Contest("step", "bfloat16", lambda: FLOAT32, lambda: digest, lose)


def tried(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    directory: Path | None = None,
    calls: int = 8,
    lose: Callable[[], None] = lambda: None,
) -> list[bytes]:
    monkeypatch.setattr(function_trials.time, "perf_counter", lambda: clock.now)
    trials = FunctionTrials(2, directory, unexpected)
    function = Function()
    trials.watch(function, LOW, contest(lose=lose))
    for _ in range(calls):
        assert trials.call(clock.run, LOW, [1], 2) == [1, 2]
    return clock.called


FAST, SLOW = [9.0, *[1.0] * 20], [0.1, *[2.0] * 20]
"""The first call makes the kernels, and does not count."""


@pytest.mark.parametrize(
    ("low", "float32", "winner"),
    [(FAST, SLOW, LOW), (SLOW, FAST, FLOAT32), (FAST, FAST, LOW)],
)
def test_the_faster_one_stays(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    low: list[float],
    float32: list[float],
    winner: bytes,
) -> None:
    caplog.set_level(logging.INFO, "tf_amp")
    lost: list[None] = []
    clock = Clock({LOW: low, FLOAT32: float32})
    called = tried(clock, monkeypatch, lose=lambda: lost.append(None))
    assert len(lost) == (winner == FLOAT32)
    assert called == [LOW, FLOAT32, FLOAT32, LOW, LOW, FLOAT32, winner, winner]
    (said,) = caplog.messages
    kept = "bfloat16" if winner == LOW else "float32"
    assert said.startswith("step: a call takes ")
    assert said.endswith(f"rewritten to bfloat16: {kept} stays.")


def test_who_hears_of_the_winner_may_call_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tf_amp")
    monkeypatch.setattr(function_trials.tf.test.experimental, "sync_devices", lambda: None)
    trials, function, called = FunctionTrials(1, None, unexpected), Function(), []
    trials.watch(function, LOW, contest())

    def call() -> None:
        trials.call(lambda name, *_: called.append(name), LOW, [], 0)

    monkeypatch.setattr(caplog.handler, "emit", lambda _: call())
    thread = threading.Thread(target=lambda: [call() for _ in range(4)], daemon=True)
    thread.start()
    thread.join(60)
    assert len(called) == 5


def test_an_outcome_is_remembered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "tf_amp")
    clock = Clock({LOW: SLOW, FLOAT32: FAST})
    tried(clock, monkeypatch, tmp_path)
    assert json.loads((tmp_path / "digest.json").read_text()) == {"low_s": 2.0, "float32_s": 1.0}
    assert tried(Clock({LOW: [], FLOAT32: FAST}), monkeypatch, tmp_path) == [FLOAT32] * 8
    assert ", as tried before: float32 stays." in caplog.messages[-1]


@pytest.mark.parametrize("text", ["", "{}", '{"low_s": "?", "float32_s": 1}', "[1]"])
def test_what_cannot_be_read_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    (tmp_path / "digest.json").write_text(text)
    called = tried(Clock({LOW: FAST, FLOAT32: SLOW}), monkeypatch, tmp_path)
    assert set(called) == {LOW, FLOAT32}


def fails(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Path, "mkdir"),
        (Path, "read_text"),
        (tempfile, "mkstemp"),
        (os, "fdopen"),
        (os, "replace"),
    ],
)
def test_a_cache_that_fails_is_one_warning_and_trials_still_count(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    owner: Any,
    name: str,
    number: int,
) -> None:
    monkeypatch.setattr(owner, name, fails(number))
    monkeypatch.setattr(function_trials.time, "perf_counter", lambda: clock.now)
    trials, functions = FunctionTrials(2, tmp_path / "trials", unexpected), []
    for which in (b"a", b"b"):
        clock = Clock({which: SLOW, FLOAT32: FAST})
        functions.append(Function())
        trials.watch(functions[-1], which, contest(which.decode()))
        for _ in range(8):
            trials.call(clock.run, which, [1], 2)
        assert clock.called[-1] == FLOAT32
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert os.strerror(number) in said.getMessage()
    assert not list(tmp_path.glob("trials/.*"))


def test_a_full_disk_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The device that is always full stands for a disk that becomes so while a file is written."""
    (tmp_path / "digest.json").write_text("{}")
    original = os.fdopen

    def on_a_full_device(handle: int, mode: str) -> Any:
        os.close(handle)
        return original(os.open("/dev/full", os.O_WRONLY), mode)

    monkeypatch.setattr(os, "fdopen", on_a_full_device)
    called = tried(Clock({LOW: SLOW, FLOAT32: FAST}), monkeypatch, tmp_path)
    assert called[-1] == FLOAT32
    assert [path.name for path in tmp_path.iterdir()] == ["digest.json"]
    assert (tmp_path / "digest.json").read_text() == "{}"
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize(
    ("broken", "tried"),
    [("add_float32", []), ("lose", [LOW, FLOAT32, FLOAT32, LOW, LOW, FLOAT32])],
)
def test_what_cannot_be_tried_runs_rewritten(
    broken: str, tried: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, function = Clock({LOW: SLOW, FLOAT32: FAST}), Function()
    monkeypatch.setattr(function_trials.time, "perf_counter", lambda: clock.now)
    faults: list[str] = []
    trials = FunctionTrials(2, None, lambda name, _: faults.append(name))
    trials.watch(function, LOW, dataclasses.replace(contest(), **{broken: fails(errno.EIO)}))
    for _ in range(len(tried) + 3):
        trials.call(clock.run, LOW, [1], 2)
    assert clock.called == [*tried, LOW, LOW, LOW]
    assert faults == ["step"]


def test_a_trial_ends_with_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = FunctionTrials(2, None, unexpected)
    function = Function()
    trials.watch(function, LOW, contest())
    del function
    clock = Clock({LOW: FAST})
    for _ in range(4):
        trials.call(clock.run, LOW, [], 0)
    assert set(clock.called) == {LOW}


def definition(name: str, callee: str, op: str = "MatMul") -> function_pb2.FunctionDef:
    made = function_pb2.FunctionDef()
    made.signature.name = name
    made.node_def.add(name="product", op=op).attr["T"].type = 1
    made.node_def.add(name="call", op="PartitionedCall").attr["f"].func.name = callee
    return made


def test_a_digest_is_that_of_the_graph_and_of_what_it_calls() -> None:
    def digest(name: str, op: str, *more: object) -> str:
        library = {f"callee_{name}": definition(f"callee_{name}", "", op)}
        return digest_of(definition(name, f"callee_{name}"), library.get, *more)

    assert digest("a_1", "Conv2D", 1) == digest("b_2", "Conv2D", 1)
    assert len({digest("a", "Conv2D", 1), digest("a", "MatMul", 1), digest("a", "MatMul", 2)}) == 3


def test_every_call_runs_one_of_the_two(run_forked: RunPython, tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    seen = facts_of(run_forked, "trials_cases.main()", env)
    for case in ("arguments", "iterator"):
        types = seen[case]["types"]
        assert sorted(types[:6]) == [[FLOAT]] * 3 + [[BFLOAT16]] * 3
        assert types[6] == types[7]
        assert seen[case]["count"] == 8
    assert seen["iterator"]["shape"] == [3, 64]
    assert len(list((tmp_path / "tf-amp" / "trials").glob("*.json"))) == 2
    again = facts_of(run_forked, "trials_cases.main()", env)
    for case in ("arguments", "iterator"):
        assert len(set(map(tuple, again[case]["types"]))) == 1


@pytest.mark.parametrize("batched", [False, True])
def test_what_lost_is_not_counted_as_converted(
    run_forked: RunPython, tmp_path: Path, batched: bool
) -> None:
    seen = facts_of(run_forked, f"trials_cases.lost({batched})", {"XDG_CACHE_HOME": str(tmp_path)})
    # The product and what it gives; then two of each, and the call between them.
    assert seen["planned"]["converted"] == [1, 2]
    assert (seen["lost"]["converted"], seen["lost"]["types"]) == ([0, 0], [FLOAT])
    assert seen["called by another"]["converted"] == [1, 5]


def test_what_stays_float32_for_a_size_is_not_tried_for_it(
    run_forked: RunPython, tmp_path: Path, table: str
) -> None:
    seen = facts_of(run_forked, f"trials_cases.kept({table!r})", {"XDG_CACHE_HOME": str(tmp_path)})
    for tried, rows in enumerate((1, 3000, 20000)):
        found = seen[f"{rows} rows"]
        assert found["tried"] == tried
        assert found["counted"] == [[f"step, sizes near {rows}", 0]]  # once, by the last
