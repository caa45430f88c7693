"""Functions that were traced inside another one: when they are rewritten, and when they are not."""

from __future__ import annotations

from typing import Any

import pytest
from session_facts import RunPython, facts_of

FLOAT, BFLOAT16 = 1, 14
Facts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def facts(run_forked: RunPython) -> Facts:
    return facts_of(run_forked, "function_deferred_cases.main()")


def test_functions_inside_others_are_planned_once(facts: Facts) -> None:
    assert facts["chain"]["graphs"] == 1


def test_a_function_called_by_itself_is_rewritten_then_and_not_counted_again(facts: Facts) -> None:
    seen = facts["called_later"]
    assert (seen["before"], seen["after"]) == ([FLOAT], [BFLOAT16])
    assert 0.0 < seen["error"] < 0.5
    assert not seen["counted_again"]


def test_what_a_plan_leaves_as_it_is_is_not_planned_by_itself(facts: Facts) -> None:
    assert facts["planned_float32"]["error"] < 1e-4


@pytest.mark.parametrize("case", ["before", "between"])
def test_nor_where_it_is_called_by_itself_as_well(facts: Facts, case: str) -> None:
    seen = facts[f"planned_float32_{case}"]
    assert seen["error"] < 1e-3 < 1e-2 < seen["low"]


def test_a_line_tells_of_each_function_that_is_called_once(facts: Facts) -> None:
    what = "MatMul 1 of 1 in bfloat16"
    assert facts["lines"]["said"] == dict.fromkeys(("in_loop", "in_both", "beside"), what)


def test_a_frozen_graph_and_a_model_of_tensorflow_1_are_told_of(facts: Facts) -> None:
    seen = facts["of_tensorflow_1"]
    # The model's line is the same, and so is not said again.
    assert seen["said"] == ["pruned: MatMul 1 of 1 in bfloat16, 2 casts"]
    assert seen["rows"] == [1, 1]


def test_gradient_of_a_function_called_by_itself(facts: Facts) -> None:
    assert 0.0 < facts["gradient"]["error"] < 0.5


def test_xla_shows_the_rewritten_function(facts: Facts) -> None:
    assert facts["compiled"]["hlo"] == ["bf16"]


def test_a_pipeline_keeps_float32(facts: Facts) -> None:
    seen = facts["pipeline"]
    assert seen["first"] == seen["again"] == 0.0
    assert seen["types"] == [FLOAT]  # nothing but the pipeline ran it
    assert 0.0 < seen["alone"] < 0.5


def test_what_a_pipeline_traced_is_rewritten_for_other_callers(facts: Facts) -> None:
    seen = facts["traced_by_a_pipeline"]
    assert seen["first"] == seen["again"] == 0.0
    assert 0.0 < seen["alone"] < 0.5


def test_export_is_float32(facts: Facts) -> None:
    assert facts["export"]["types"] == [FLOAT]


def test_a_function_whose_graph_is_gone_is_rewritten(facts: Facts) -> None:
    assert 0.0 < facts["lost_graph"]["error"] < 0.5


def test_threads_that_call_it_first_run_the_same(facts: Facts) -> None:
    assert facts["threads"]["calls"] == 32
    assert len(facts["threads"]["errors"]) == 1


def test_what_is_said_of_a_function_is_said_when_others_may_be_planned(facts: Facts) -> None:
    assert facts["heard"]["waited"] == [False]


@pytest.mark.parametrize("how", ["called", "asked_for"])
def test_the_first_trace_of_a_function_that_makes_variables_waits(facts: Facts, how: str) -> None:
    seen = facts[f"makes_variables_{how}"]
    assert 0.0 < seen["error"] < 0.5
    assert seen["graphs"] == 2  # one sets the variable, one is the function


def test_a_first_trace_that_is_run_is_rewritten(facts: Facts) -> None:
    assert 0.0 < facts["makes_variables_not_lifted"]["error"] < 0.5


@pytest.mark.parametrize("during", ["planning", "adding"])
def test_a_function_whose_rewrite_was_interrupted_is_rewritten_by_its_next_call(
    facts: Facts, during: str
) -> None:
    found = facts[f"interrupted_{during}"]
    assert found["raised"]
    assert 0.0 < found["error"] < 0.5


def test_after_uninstall_it_runs_in_float32(facts: Facts) -> None:
    assert facts["switched_off"]["error"] == 0.0


def test_nothing_failed(facts: Facts) -> None:
    assert facts["status"]["failed"] == 0
