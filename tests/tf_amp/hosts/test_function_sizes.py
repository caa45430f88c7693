"""Functions that were traced with an unknown batch: what is planned when a call shows it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cluster_ports import free_ports
from session_facts import RunPython, facts_of
from tensorflow.core.framework import function_pb2

from tf_amp.hosts.function_size_sources import Source
from tf_amp.hosts.function_sizes import FunctionSizes, Sized

FLOAT, BFLOAT16 = 1, 14


def facts(run_python: RunPython, call: str, *args: str) -> dict[str, dict[str, Any]]:
    return facts_of(run_python, call, args=args)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("exported"))


@pytest.fixture(scope="module")
def seen(run_forked: RunPython, table: str, exported: str) -> dict[str, dict[str, Any]]:
    return facts(run_forked, "sizes_cases.arguments()", table, exported)


def test_the_size_of_an_argument_chooses_what_runs(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["traced"]["types"] == [FLOAT]
    assert seen["few"] == {"ran": [FLOAT], "variants": {}}
    assert seen["many"] == {"ran": [BFLOAT16], "variants": {"3000": [BFLOAT16]}}
    again = seen["again"]
    assert (again["few"], again["many"], again["dtype"]) == ([FLOAT], [BFLOAT16], "float32")
    assert 0.0 < again["error"] < 0.5


def test_a_function_counts_once(seen: dict[str, dict[str, Any]]) -> None:
    status = seen["again"]["status"]
    # The product and the Identity behind it.
    assert (status["nodes_converted"], status["graphs_failed"]) == (2, 0)


def test_a_size_that_does_not_last_is_not_planned_for(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["odd one"]["variants"].keys() == {"3000"}
    assert seen["two of them"]["variants"].keys() == {"3000"}  # the plan is that of 32


def test_a_function_is_said_once_and_as_it_runs(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["not said"]["lines"] == []  # nothing has run
    (line,) = seen["said"]["lines"]
    assert (
        line == "__call__: MatMul 0 of 1 in bfloat16, 0 casts; 1 MatMul stays float32: slower here"
    )


def test_variants_are_not_exported(seen: dict[str, dict[str, Any]]) -> None:
    assert (seen["exported"]["names"], seen["exported"]["types"]) == ([], [FLOAT])


@pytest.mark.usefixtures("seen")
def test_a_loaded_function_is_said_by_its_first_call(
    run_forked: RunPython, table: str, exported: str
) -> None:
    loaded = facts(run_forked, "sizes_cases.loaded()", table, exported)
    assert loaded["loaded"] == {"lines": [], "named": [], "planned": []}
    assert loaded["called"]["planned"] == [3000]
    (line,) = loaded["called"]["lines"]
    assert "signature_wrapper" in line
    assert ", sizes near 3000: MatMul 1 of 1 in bfloat16" in line
    assert line.partition(":")[0] in loaded["called"]["named"]


@pytest.mark.usefixtures("seen")
def test_what_is_loaded_waits_for_a_call_whatever_costs(
    run_forked: RunPython, exported: str
) -> None:
    loaded = facts(run_forked, "sizes_cases.loaded()", "off", exported)
    assert loaded["loaded"]["planned"] == []
    assert loaded["called"]["planned"] == [32]


def test_what_is_only_exported_is_not_planned(
    run_forked: RunPython, table: str, tmp_path: Path
) -> None:
    found = facts(run_forked, "sizes_cases.exported_only()", table, str(tmp_path / "model"))
    assert found["written"] == {"planned": [], "rows": []}


def test_variants_go_with_amp_and_with_their_function(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["off"]["ran"] == [FLOAT]
    assert seen["gone"]["variants"] == {}


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
@pytest.mark.parametrize(
    ("given", "first"),
    [("data set", [BFLOAT16]), ("arrays", [BFLOAT16]), ("generator", [FLOAT, BFLOAT16])],
)
def test_fit_runs_as_for_its_batch(
    run_forked: RunPython, table: str, library: str, given: str, first: list[int]
) -> None:
    """At once where the batch can be told beforehand, else as soon as it was seen."""
    seen = facts(run_forked, f"sizes_cases.iterators({library!r}, {given!r})", table)["fit"]
    assert seen["first"] == first
    assert seen["rest"] == [BFLOAT16]
    assert seen["after"] == [BFLOAT16]
    assert seen["plans"] == ([32, 2048] if given == "generator" else [2048])
    # What was planned for the assumed size is called where nobody tells the batch.
    assert seen["sizes"] == (["2048", "32"] if given == "generator" else ["2048"])
    (line,) = seen["said"]
    assert "sizes near 2048: MatMul 2 of 2 in bfloat16" in line
    assert seen["moved"]
    assert seen["finite"]


@pytest.fixture(scope="module")
def loops(run_forked: RunPython, table: str) -> dict[str, dict[str, Any]]:
    return facts(run_forked, "sizes_cases.loops()", table)


@pytest.mark.parametrize("kind", ["argument", "captured", "iterator", "break", "calls"])
def test_a_loop_over_batches_runs_as_its_data_set_tells(
    loops: dict[str, dict[str, Any]], kind: str
) -> None:
    seen = loops[kind]
    # Of 2,048 rows, of 2, of what a generator gives, which nobody tells, and of 2,048 once more.
    # The product of a `map` within the function prepares data.
    many = [FLOAT, BFLOAT16] if kind == "break" else [BFLOAT16]
    several = [many, [FLOAT], [FLOAT], many]
    assert seen["seen"] == (several[:1] if kind == "captured" else several)
    assert 32 not in seen["plans"]
    assert any("sizes near 2048: MatMul 1 of 1 in bfloat16" in line for line in seen["said"])
    assert 1e-6 < seen["error"] < 0.05


def test_a_loop_beside_an_iterator_is_planned_for_its_rows(
    run_forked: RunPython, table: str
) -> None:
    seen = facts(run_forked, "sizes_cases.beside()", table)["beside"]
    assert seen["ran"] == [BFLOAT16]
    (line,) = seen["said"]
    assert "step, sizes near 2048: MatMul 2 of 2 in bfloat16" in line


@pytest.mark.parametrize("kind", ["rebatch", "within"])
def test_a_batch_that_is_split_again_tells_nothing(
    loops: dict[str, dict[str, Any]], kind: str
) -> None:
    assert loops[kind]["seen"] == [[FLOAT]]


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_a_data_set_tells_its_batch_within_a_call_of_keras(
    run_forked: RunPython, table: str, library: str
) -> None:
    seen = facts(run_forked, f"sizes_cases.in_callback({library!r})", table)
    assert seen["callback"]["seen"] == [FLOAT]


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_steps_in_one_call_run_as_for_their_batch(
    run_forked: RunPython, table: str, library: str
) -> None:
    seen = facts(run_forked, f"sizes_cases.steps_per_execution({library!r})", table)["steps"]
    assert seen["seen"] == [BFLOAT16]
    (line,) = seen["said"]
    # Keras 3.4 unrolls the two steps.
    assert re.search("sizes near 2048: MatMul (2 of 2|4 of 4) in bfloat16", line)


def test_features_do_not_count_where_no_length_is_known(run_forked: RunPython, table: str) -> None:
    """As of a `Sequence` for tf_keras; here of 256 series of 64 steps with 16 features."""
    seen = facts(run_forked, "sizes_cases.sequence()", table)["sequence"]
    assert ", sizes near 128: MatMul" in seen["said"][-1]


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_replicas_run_as_for_their_part_of_the_batch(
    run_forked: RunPython, table: str, library: str
) -> None:
    seen = facts(run_forked, f"sizes_cases.replicas({library!r})", table)["replicas"]
    assert (seen["first"], seen["rest"], seen["finite"]) == ([FLOAT], [BFLOAT16], True)
    trained, evaluated = seen["said"]
    assert "sizes near 2048: MatMul 4 of 4 in bfloat16" in trained
    assert "sizes near 2048: MatMul 2 of 2 in bfloat16" in evaluated


@pytest.mark.slow
def test_a_worker_in_another_process_is_asked_once(run_python: RunPython, table: str) -> None:
    ports = map(str, free_ports(2))
    seen = facts(run_python, "sizes_cases.servers()", table, *ports)["servers"]
    assert seen["calls"] == [[FLOAT], [BFLOAT16], [BFLOAT16]]
    assert seen["errors"][0] < 1e-4 < seen["errors"][1] < 1
    (line,) = seen["said"]
    assert "step, sizes near 2048: MatMul 1 of 1 in bfloat16" in line


def test_handlers_may_call_a_function_that_is_planned(run_forked: RunPython, table: str) -> None:
    seen = facts(run_forked, "sizes_cases.reentrant()", table)["reentrant"]
    assert seen["of_handler"] == [0.0]  # by the plan in force
    assert 0.0 < seen["error"] < 0.5
    assert seen["sizes"] == []  # it was planned for these alone
    assert seen["waited"] == [False]
    (line,) = seen["said"]
    assert ", sizes near 3000: MatMul 1 of 1 in bfloat16" in line


def test_a_small_batch_runs_in_float32_where_a_larger_one_does_not(
    run_forked: RunPython, table: str
) -> None:
    seen = facts(run_forked, "sizes_cases.small()", table)
    assert seen["small"] == {"middling": [BFLOAT16], "few": [FLOAT]}


def test_a_caller_of_known_shape_plans_what_it_calls_for_that(
    run_forked: RunPython, table: str
) -> None:
    seen = facts(run_forked, "sizes_cases.known_callers()", table)
    for kind in ("call", "deep", "loop", "gradient"):
        assert seen[kind]["seen"] == {"2048": [BFLOAT16], "2": [FLOAT]}, kind
    assert seen["alone"]["ran"] == [FLOAT]  # its own plan is another
    assert sum("MatMul 1 of 1 in bfloat16" in line for line in seen["alone"]["said"]) == 3


def test_a_batch_near_the_assumed_one_has_a_plan_too(run_forked: RunPython, table: str) -> None:
    seen = facts(run_forked, "sizes_cases.near()", table)["near"]
    assert seen == {"assumed": [FLOAT], "seen": [BFLOAT16]}


def test_seeded_random_numbers_are_those_of_the_program(run_forked: RunPython, table: str) -> None:
    seen = facts(run_forked, "sizes_cases.seeds()", table)["seeds"]
    assert len(set(seen["plain"])) == 5
    assert seen["drawn"] == seen["plain"]


def test_what_kernels_keep_is_that_of_the_program(run_forked: RunPython, table: str) -> None:
    seen = facts(run_forked, "sizes_cases.states()", table)
    assert seen["iterator"]["counted"] == [0, 1, 2, 3, 4]
    (line,) = seen["iterator"]["said"]
    assert line.endswith("its OneShotIterator keeps a state that a variant of it would begin anew.")
    # What has a name is the same for all.
    assert seen["variable"] == {"counted": [7] * 5, "said": []}
    assert seen["table"] == {"counted": [0] * 5, "said": []}


def test_that_seeds_keep_a_function_as_it_is_is_said_of_what_is_called(
    run_forked: RunPython, table: str, tmp_path: Path
) -> None:
    said = facts(run_forked, "sizes_cases.saved_with_seeds()", table, str(tmp_path))["said"]
    assert len(said["called"]) == 1
    assert said["saved_and_loaded"] == []


def test_a_fault_costs_the_plan_alone(run_forked: RunPython, table: str) -> None:
    seen = facts(run_forked, "sizes_cases.faults()", table)
    assert seen["fault"] == {"error": 0.0, "failed": 1}
    assert seen["later"] == {"error": 0.0, "failed": 2}
    assert seen["low"]["ran"] == [BFLOAT16]
    (line,) = seen["low"]["said"]
    assert "stays as it was: the function host failed on it" in line


def test_the_plan_that_runs_is_in_the_trace(
    run_forked: RunPython, table: str, tmp_path: Path
) -> None:
    found = facts(run_forked, "sizes_cases.traced()", table, str(tmp_path))["traced"]["found"]
    assert "inner" not in found
    assert found["inner, sizes near 2048"] == [2048, ["converted"]]
    assert "outer, sizes near 2048" in found
    assert "one_step_on_data (fit), sizes near 2048" in found
    assert found["any_rows, sizes near 2048"] == [2048, ["converted"]]
    assert not any("XLA" in name for name in found)


def test_what_is_called_by_another_has_no_row_of_its_own(run_forked: RunPython, table: str) -> None:
    found = facts(run_forked, "sizes_cases.called_later()", table)
    assert found["inner"]["rows"] == ["inner, sizes near 3000"]
    assert found["outer"]["rows"] == ["outer, sizes near 3000"]


def sized(plan: Any, say: Any, size: int = 32) -> Sized:
    """How to plan a function of rows that its argument shows."""
    planned = function_pb2.FunctionDef()
    return Sized(
        source=Source((0,), argument=0),
        size=size,
        planned=lambda: planned,
        plan=plan,
        add=lambda functions: None,
        try_out=None,
        say=say,
        expect=lambda inputs: None,
        once=False,
    )


@dataclasses.dataclass
class Calls:
    """What became of calls of a function `f` with some numbers of rows."""

    size: int = 32
    said: int = 0
    plans: list[int] = dataclasses.field(default_factory=list)

    def plan(self, size: int) -> Any:
        self.plans.append(size)
        proto = function_pb2.FunctionDef()
        proto.signature.description = "another plan"
        return SimpleNamespace(proto=proto, failure=None, extra_functions=())

    def say(self) -> None:
        self.said += 1

    def of(self, rows: Sequence[int]) -> list[bytes]:
        """The names of the functions that ran."""

        def run(name: bytes, inputs: Sequence[Any], outputs: int) -> list[bytes]:
            return [name]

        function = type("Function", (), {"name": b"f"})()
        sizes = FunctionSizes(lambda name, error: pytest.fail(f"{name}: {error}"))
        sizes.watch(function, sized(self.plan, self.say, self.size))
        return [sizes.call(run, b"f", [np.empty((size, 2))], 1)[0] for size in rows]


def test_calls_of_a_size_that_lasts_decide_nothing() -> None:
    calls = Calls()
    ran = calls.of([*[32] * 5, *[3000] * 5, *[32] * 5])
    assert ran == [*[b"f"] * 5, *[b"f__tf_amp_size_3000"] * 5, *[b"f"] * 5]
    assert calls.plans == [3000]
    assert calls.said == 6  # twice for each size


def test_a_function_planned_for_the_size_it_was_told_is_planned_for_others_that_last() -> None:
    calls = Calls(size=3000)
    ran = calls.of([3000, 3000, 32, 3000, 32, 32, 3000])
    assert ran == [*[b"f"] * 5, b"f__tf_amp_size_32", b"f"]
    assert calls.plans == [32]
