"""Sums of weight gradients leave loops under the function host, and training goes on as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from environments import CONVERTS, RunPython

pytestmark = pytest.mark.slow
CODE = Path(__file__).with_name("function_loop_sums_cases.py").read_text()
ENV = {
    **CONVERTS,
    # What is measured here is so small that the cost table would leave it in float32.
    "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_RULES_DISABLE": "cost",
}


@pytest.fixture(scope="module")
def plain(run_forked: RunPython) -> dict[str, Any]:
    return json.loads(run_forked(CODE, args=("float32",)).stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def amp(run_forked: RunPython) -> dict[str, Any]:
    return json.loads(run_forked(CODE, ENV, args=("amp",)).stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ["gradient", "second", "through a function", "inside XLA"])
def test_gradients_are_those_of_float32(
    plain: dict[str, Any], amp: dict[str, Any], case: str
) -> None:
    wanted, got = np.array(plain[case]), np.array(amp[case])
    assert 0 < np.abs(wanted - got).max() < 0.05 * np.abs(wanted).max()


def test_sums_leave_the_loops_of_each_function(plain: dict[str, Any], amp: dict[str, Any]) -> None:
    assert plain["moved"] == []
    assert {line.rpartition(": ")[2] for line in amp["moved"]} == {"bfloat16"}
    names = " ".join(amp["moved"])
    for part in ("inference_gradient", "__backward_recurrence", "one_step_on_data"):
        assert part in names


def test_training_goes_on(plain: dict[str, Any], amp: dict[str, Any]) -> None:
    assert amp["fit"] != plain["fit"]
    assert amp["fit"] == pytest.approx(plain["fit"], rel=0.02)
    assert amp["fit"][-1] < amp["fit"][0]
