"""Which functions are rewritten, seen on their definitions and on XLA's HLO."""

from __future__ import annotations

from typing import Any

import pytest
from session_facts import RunPython, facts_of

FLOAT, BFLOAT16 = 1, 14
Facts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def facts(run_forked: RunPython) -> Facts:
    return facts_of(run_forked, "function_cases.main()")


@pytest.fixture(scope="module")
def keras(run_forked: RunPython) -> Facts:
    return facts_of(run_forked, "function_cases.keras()")


@pytest.fixture(scope="module")
def off(run_forked: RunPython) -> Facts:
    return facts_of(run_forked, "function_cases.off_again()")


@pytest.mark.parametrize(
    "start",
    ["plain", "backward of plain", "while_body", "cond_true", "cond_false"],
)
def test_function_runs_in_the_target_dtype(facts: Facts, start: str) -> None:
    functions = facts["tracing"]["functions"]
    types = [found for name, found in functions.items() if name.startswith(start)]
    assert types
    assert all(found == [BFLOAT16] for found in types)


@pytest.mark.parametrize("part", ["while_body", "cond_true", "cond_false"])
def test_gradient_of_a_loop_or_branch_runs_in_the_target_dtype(facts: Facts, part: str) -> None:
    functions = facts["tracing"]["functions"]
    types = [t for name, t in functions.items() if name.startswith(part) and "grad" in name]
    assert types == [[BFLOAT16]]


def test_no_function_computes_in_float32(facts: Facts) -> None:
    assert set(map(tuple, facts["tracing"]["functions"].values())) == {(BFLOAT16,)}


def test_xla_is_given_the_rewritten_function(facts: Facts) -> None:
    assert facts["tracing"]["hlo"] == ["bf16"]


def test_boundaries_stay_float32(facts: Facts) -> None:
    seen = facts["tracing"]
    assert seen["outputs"] == [FLOAT]
    assert seen["gradient_dtypes"] == ["float32"]
    assert seen["variable_dtype"] == "float32"


def test_result_is_close_and_not_exact(facts: Facts) -> None:
    assert 0.0 < facts["tracing"]["error"] < 0.5


def test_what_runs_is_low_and_what_is_read_is_what_was_traced(facts: Facts) -> None:
    assert facts["tracing"]["runs"] == [BFLOAT16]
    assert facts["tracing"]["function_def"] == [FLOAT]
    assert facts["tracing"]["traced_graph"] == [FLOAT]


def test_v1_graph_copies_the_float32_original(facts: Facts) -> None:
    assert [FLOAT] in facts["v1_graphs"]["library"]
    assert [BFLOAT16] not in facts["v1_graphs"]["library"]


def test_wrap_function_with_a_branch_runs_rewritten(facts: Facts) -> None:
    assert 0.0 < facts["v1_graphs"]["wrapped_error"] < 0.5


def test_originals_are_forgotten_with_their_function(facts: Facts) -> None:
    assert facts["removal"] == {"kept": True, "kept_after": False}


def test_extra_functions_live_as_long_as_their_caller(facts: Facts) -> None:
    assert facts["extra_functions"] == {"present": True, "error": 0.0, "present_after": False}


def test_tracing_from_many_threads(facts: Facts) -> None:
    assert facts["threads"] == {"errors": [], "traced": 48, "types": [f"[{BFLOAT16}]"]}


def test_nothing_failed(facts: Facts) -> None:
    assert facts["status"]["failed"] == 0
    assert facts["status"]["rewritten"] > 50


@pytest.mark.parametrize("name", ["keras", "keras_jit", "tf_keras"])
def test_keras_computes_in_the_target_dtype(keras: Facts, name: str) -> None:
    seen = keras[name]
    assert seen["types"] == [BFLOAT16]
    assert seen["rewritten"] >= 3  # fit, evaluate, predict
    assert (seen["predicted"], seen["weights"]) == ("float32", ["float32"])


def test_functions_traced_after_uninstall_are_byte_identical(off: Facts) -> None:
    seen = off["off_again"]
    assert seen["changed"]
    assert seen["same"]
    assert seen["hlo"] == [["f32"], ["bf16"], ["f32"]]
    assert seen["hook_gone"]


def test_rewritten_functions_run_in_float32_after_uninstall(off: Facts) -> None:
    seen = off["off_again"]
    assert seen["error_on"] > 0.0
    errors = [seen[f"error_{which}"] for which in ("of_older", "around", "of_newer")]
    assert errors == [0.0, 0.0, 0.0]


def test_switching_on_again_gives_the_same_functions(off: Facts) -> None:
    assert off["on_again"]["same"]
    assert off["on_again"]["rewritten"] > 0
