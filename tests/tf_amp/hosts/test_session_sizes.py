"""Sessions with an unknown batch: for which size their graphs are planned, and what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from session_facts import RunPython, facts_of

from tf_amp.tracing.trace import read_traces

MANY = 2048
UNTOLD = "(its batch is not known: planned for 32 rows)"
LOW, FLOAT = "MatMul 1 of 1 in bfloat16", "MatMul 0 of 1 in bfloat16"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def fed(run_forked: RunPython, table: str, traces: Path) -> dict[str, dict[str, Any]]:
    return facts_of(run_forked, "session_sizes_cases.fed()", args=[table, str(traces)])


@pytest.mark.parametrize(
    ("case", "size", "planned"),
    [
        ("first 2048", 2048, LOW),
        ("first 1", 1, FLOAT),
        ("callable", 2048, LOW),
        ("inner", 2048, LOW),
        ("two axes", 45, LOW),
        ("beside a default", 2048, LOW),
        ("any rank", 2048, LOW),
        ("beside a state", 2048, LOW),
    ],
)
def test_what_the_first_run_feeds_decides(
    fed: dict[str, dict[str, Any]], case: str, size: int, planned: str
) -> None:
    (line,) = fed[case]["said"]
    assert f", sizes near {size}: {planned}" in line


def test_a_trace_plans_again_for_the_size_that_was_fed(
    fed: dict[str, dict[str, Any]], traces: Path
) -> None:
    (trace,) = read_traces(traces)
    sizes = [graph.config.unknown_dimension for graph in trace.graphs]
    assert sizes == [2048, 1, 2048, 2048, 45, 2048, 2048, 2048]


def test_each_thread_plans_for_what_it_feeds(
    run_forked: RunPython, table: str, tmp_path: Path
) -> None:
    facts_of(run_forked, "session_sizes_cases.threads()", args=[table, str(tmp_path)])
    (trace,) = read_traces(tmp_path)
    names = {graph.remarks.name.partition(" (")[2] for graph in trace.graphs}
    assert names == {f"of_{rows}:0), sizes near {rows}" for rows in (1, 2048, 8, 600, 2, 4000)}


def test_what_feeds_nothing_yet_is_planned_as_ever_and_says_so(
    run_forked: RunPython, table: str
) -> None:
    seen = facts_of(run_forked, "session_sizes_cases.untold()", args=[table])
    for case in ("callable", "partial_run"):
        (line,) = seen[case]["said"]
        assert f"{UNTOLD}: {FLOAT}" in line
    (line,) = seen["known"]["said"]
    assert "rows" not in line
    assert "sizes" not in line


@pytest.fixture(scope="module")
def data_sets(run_forked: RunPython, table: str) -> dict[str, dict[str, Any]]:
    return facts_of(run_forked, "session_sizes_cases.data_sets()", args=[table])


@pytest.mark.parametrize(
    "case", ["initializable", "map_and_batch", "one_shot", "from_structure", "queue", "monitored"]
)
def test_a_data_set_tells_the_batch(data_sets: dict[str, dict[str, Any]], case: str) -> None:
    (line,) = data_sets[case]["said"]
    assert f", sizes near 2048: {LOW}" in line


@pytest.mark.parametrize("case", ["by_handle", "fed_size", "within"])
def test_a_batch_that_is_no_constant_of_the_graph_is_not_told(
    data_sets: dict[str, dict[str, Any]], case: str
) -> None:
    (line,) = data_sets[case]["said"]
    assert f"{UNTOLD}: {FLOAT}" in line


def test_graphs_of_the_same_names_are_told_apart(run_forked: RunPython, table: str) -> None:
    seen = facts_of(run_forked, "session_sizes_cases.same_names()", args=[table])
    assert f", sizes near {MANY}: {LOW}" in seen[f"rows {MANY}"]["said"][0]
    assert f", sizes near 1: {FLOAT}" in seen["rows 1"]["said"][0]
