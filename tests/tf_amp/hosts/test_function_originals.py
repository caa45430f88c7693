"""Exports made while AMP is on hold the float32 originals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from session_facts import RunPython, facts_of

FLOAT, BFLOAT16 = 1, 14
Facts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def facts(run_forked: RunPython, directory: Path) -> Facts:
    return facts_of(run_forked, f"function_export_cases.saved_models({str(directory)!r})")


def test_saved_model_is_float32(facts: Facts) -> None:
    saved = facts["saved"]
    assert saved["error"] > 0.0  # what was exported did run in low precision
    assert (saved["types"], saved["casts"]) == ([FLOAT], 0)
    assert saved["stacks"]


def test_saved_model_loads_in_a_process_without_tf_amp(
    facts: Facts, run_forked: RunPython, directory: Path
) -> None:
    assert facts["saved"]
    call = f"function_export_cases.without_tf_amp({str(directory)!r})"
    assert facts_of(run_forked, call)["without_tf_amp"]["error"] == 0.0


def test_loaded_saved_model_runs_rewritten(facts: Facts) -> None:
    assert facts["loaded"]["types"] == [BFLOAT16]
    assert 0.0 < facts["loaded"]["error"] < 0.5


def test_gradient_of_a_loaded_loop_equals_that_of_the_traced_one(facts: Facts) -> None:
    assert facts["gradient"]["scale"] > 1.0
    assert facts["gradient"]["error"] < 0.02 * facts["gradient"]["scale"]


def test_frozen_graph_is_float32(facts: Facts) -> None:
    assert facts["frozen"] == {"types": [FLOAT], "running": [BFLOAT16]}


def test_v1_saved_model_runs_rewritten(facts: Facts) -> None:
    assert facts["v1_saved_model"]["types"] == [BFLOAT16]
    assert 0.0 < facts["v1_saved_model"]["error"] < 0.5
