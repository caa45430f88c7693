"""Both hosts under many threads that open and close sessions."""

from __future__ import annotations

from typing import Any

import pytest
from session_facts import RunPython, facts_of


def _check(facts: dict[str, Any], graphs: int) -> None:
    assert facts["alive"] == 0
    assert facts["failures"] == []
    assert facts["log_errors"] == []
    assert facts["finished"] == graphs
    assert facts["largest_error"] < 0.02
    assert facts["sessions_without_casts"] == 0
    # Every session and every function has at least one graph that is rewritten.
    assert facts["rewritten"] >= graphs


def test_threads_that_change_inside_callbacks(run_forked: RunPython) -> None:
    call = "session_stress.main(24, switch_interval=2e-5)"
    _check(facts_of(run_forked, call, timeout=120)["stress"], 24)


@pytest.mark.slow
def test_two_hundred_graphs(run_forked: RunPython) -> None:
    _check(facts_of(run_forked, "session_stress.main()", timeout=280)["stress"], 200)


@pytest.mark.slow
def test_sixteen_threads(run_forked: RunPython) -> None:
    call = "session_stress.main(128, switch_interval=1e-4, threads=16)"
    _check(facts_of(run_forked, call, timeout=280)["stress"], 128)
