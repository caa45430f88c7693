"""What the function host leaves as it is: messages, tf.data, other options, faulty graphs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from session_facts import RunPython, facts_of

Facts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def facts(run_forked: RunPython) -> Facts:
    return facts_of(run_forked, "function_surroundings_cases.main()")


def test_error_messages_keep_the_python_stack(facts: Facts) -> None:
    off, on = facts["messages"]["off"], facts["messages"]["on"]
    assert "in failing" in off[0]
    assert "in inner" in off[0]

    def without_call_site(texts: list[str]) -> list[str]:
        return [re.sub(r"line \d+, in (messages|_message)\b", "", text) for text in texts]

    assert without_call_site(on) == without_call_site(off)
    assert on[1::2] == ["False", "False"]


def test_added_casts_have_the_stack_of_what_they_cast(facts: Facts) -> None:
    assert facts["cast_stack"] == {"added": 3, "known": 3, "suffixes": False}


@pytest.mark.parametrize(
    "kind", ["map", "branch", "loop", "called", "called_deeper", "filter", "interleave"]
)
def test_pipelines_give_the_same_bits(facts: Facts, kind: str) -> None:
    assert facts["pipelines"]["same"][kind]


def test_a_function_used_by_a_pipeline_stays_rewritten_for_the_model(facts: Facts) -> None:
    assert 0.0 < facts["pipelines"]["error_before"] == facts["pipelines"]["error_after"]


def test_a_loop_over_a_dataset_is_no_pipeline(facts: Facts) -> None:
    """TensorFlow makes one of it, with functions that are marked like those of any other."""
    seen = facts["dataset_loops"]
    assert seen["kinds"] == {"in the loop": ["bfloat16"], "in pipelines": ["float32"]}
    assert seen["error"] > 0.0
    assert seen["exact"]
    assert seen["told"] == ["epoch"]


def test_upstream_options_are_held_off_while_on(facts: Facts) -> None:
    seen = facts["upstream"]
    assert (seen["asked_before"], seen["asked_after"], seen["once_off"]) == (False, False, True)
    assert seen["others"] == [7, False]


def test_a_fault_leaves_the_function_in_float32(facts: Facts) -> None:
    seen = facts["faults"]
    assert (seen["raised"], seen["refused"], seen["failed"]) == (0.0, 0.0, 2)
    assert seen["calls"] == 2  # the refused definition, then the original
    assert seen["working"] > 0.0
