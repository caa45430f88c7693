"""The session host at work: what v1 scripts do with sessions, and what is said when it fails."""

from __future__ import annotations

import math
from typing import Any

import pytest
from session_facts import RunPython, facts_of

Facts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def features(run_forked: RunPython) -> Facts:
    return facts_of(run_forked, "session_feature_cases.main()")


@pytest.fixture(scope="module")
def failures(run_forked: RunPython) -> Facts:
    return facts_of(run_forked, "session_failure_cases.main()")


@pytest.mark.parametrize("kind", ["ref", "resource"])
def test_training_computes_matmuls_low_and_updates_in_float32(features: Facts, kind: str) -> None:
    facts = features[f"train_{kind}_variables"]
    assert len(facts["matmuls"]) == 5
    assert all(entry.endswith(":bfloat16") for entry in facts["matmuls"])
    assert facts["updates"] == ["float32"]
    plain, low = map(float, facts["last"])
    assert math.isclose(plain, low, rel_tol=0.02)
    assert low < float(facts["first"][1])


@pytest.mark.parametrize(
    "case",
    [
        "feed_any_node",
        "dynamic_rnn",
        "state_in_ref_variable",
        "cond",
        "control_flow_v2",
        "function_in_v1_graph",
        "compiled_function_in_v1_graph",
        "v1_saved_model",
        "grpc_server",
        "monitored_grpc_server",
    ],
)
def test_graph_runs_low_with_float32_results(features: Facts, case: str) -> None:
    assert features[case]["error"] < 0.02
    assert features[case]["dtypes"]
    assert all(entry.endswith(":bfloat16") for entry in features[case]["dtypes"])


def test_fed_node_gives_float32_to_the_caller(features: Facts) -> None:
    assert features["feed_any_node"]["value_dtype"] == "float32"
    assert len(features["feed_any_node"]["dtypes"]) == 1


def test_fetched_inner_node_is_left_alone(features: Facts) -> None:
    facts = features["fetch_inner_node"]
    assert (facts["exact"], facts["inner"]) == (True, "float32")
    assert 0 < facts["error"] < 0.02


def test_partial_runs_and_callables_of_one_session(features: Facts) -> None:
    assert 0 < features["partial_run"]["error"] < 0.02
    assert features["partial_run"]["same"]


def test_queue_runners(features: Facts) -> None:
    assert 0 < features["queue_runners"]["error"] < 0.02


def test_many_threads_on_one_session(features: Facts) -> None:
    assert features["many_threads_one_session"] == {"same": True, "count": 8}


def test_monitored_session_trains_and_saver_restores_float32(features: Facts) -> None:
    facts = features["monitored_session_and_saver"]
    if "unsupported" in facts:
        pytest.skip(f"this TensorFlow cannot write graphs with this protobuf: {facts}")
    first, last, restored = map(float, facts["losses"])
    assert restored <= last < first
    assert facts["rewritten"] == 1
    assert facts["dtypes"] == ["float32"]


def test_switching_off_and_on_again(features: Facts) -> None:
    facts = features["uninstalled"]
    assert facts["on"] == ["MatMul:bfloat16"]
    assert facts["off"] == ["MatMul:float32"]
    assert facts["again"] == ["MatMul:float16"]


def test_each_host_rewrites_its_own_graph_once(features: Facts) -> None:
    assert features["both_hosts"] == {"session_casts": 1, "by_session": 1, "by_function": 1}


@pytest.mark.parametrize(
    ("case", "text", "dump"),
    [
        ("pass_raises", "ZeroDivisionError: made by the test", True),
        ("unfuse_raises", "ZeroDivisionError: made by the test", True),
        ("pass_makes_invalid_graph", "VerificationError", True),
        ("record_raises", "ZeroDivisionError: made by the test", False),
        ("pass_returns_nothing", "the rewritten graph is empty", False),
    ],
)
def test_failure_runs_the_original_and_says_so_once(
    failures: Facts, case: str, text: str, dump: bool
) -> None:
    facts = failures[case]
    assert facts["exact"]
    assert facts["dtypes"] == ["MatMul:float32"]
    (line,) = facts["errors"]
    assert text in line
    assert "original graph runs" in line or "runs as it was" in line
    assert bool(facts["dumps"]) == dump
    assert all("preop" in files for files in facts["dumps"])
    rejected = ["AutoMixedPrecision", "preop"] in facts["dumps"]
    assert ("Both graphs are in" in line, "The graph is in" in line) == (rejected, dump > rejected)


def test_an_interrupt_while_a_graph_is_planned_is_not_lost(failures: Facts) -> None:
    assert failures["interrupt"] == {"raised": True, "said": [], "dtypes": ["MatMul:float32"]}


def test_rejected_graph_is_dumped_beside_the_original(failures: Facts) -> None:
    assert failures["pass_makes_invalid_graph"]["dumps"] == [["AutoMixedPrecision", "preop"]]


def test_graphs_of_the_other_host_or_device_are_left(failures: Facts) -> None:
    assert failures["other_device"] == {"other": None, "function": None, "recorded": 0}


def test_graph_broken_by_the_remapper_is_named_with_a_remedy_that_works(failures: Facts) -> None:
    facts = failures["remapper_leaves_nameless_op"]
    if "MatMul:float32" not in facts["dtypes"]:
        pytest.skip("this TensorFlow's remapper handles MatMul + BiasAdd + AddV2 + Relu")
    assert facts["dtypes"] == ["MatMul:float32", "MatMul:float32", "MatMul:bfloat16"]
    (line,) = facts["said"]
    assert "without an op" in line
    assert "rewrite_options.remapping" in line


def test_graph_that_reads_what_was_taken_away_is_named_with_a_remedy_that_works(
    failures: Facts,
) -> None:
    facts = failures["arithmetic_optimizer_takes_a_read_node_away"]
    if "MatMul:float32" not in facts["dtypes"]:
        pytest.skip("this TensorFlow's arithmetic optimizer handles a stack of reshaped tensors")
    assert facts["dtypes"] == ["MatMul:float32", "MatMul:float32", "MatMul:bfloat16"]
    (line,) = facts["said"]
    assert "which is still read" in line
    assert "rewrite_options.arithmetic_optimization" in line
    assert (facts["failed"], facts["errors"]) == (0, [])


def test_late_switch_on_is_said_and_reaches_new_sessions(failures: Facts) -> None:
    facts = failures["late"]
    assert facts["before"] == ["MatMul:float32"]
    assert facts["new"] == ["MatMul:bfloat16"]
    (line,) = facts["said"]
    assert "before the first session" in line
