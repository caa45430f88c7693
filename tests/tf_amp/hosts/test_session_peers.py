"""TensorFlow's own Python suite of its pass, run through sessions; dtypes of what really ran."""

from __future__ import annotations

from typing import Any

import pytest
from cpu_units import bfloat16_errors_behind_products
from session_facts import RunPython, facts_of

CASES = (
    *("conv_bn", "conv3d_bn", "conv3d", "conv_bn_dropout", "conv_pool", "depthwise"),
    *("simple_loop", "loop_with_vars_intertwined", "multi_paths", "multi_paths_2"),
    *("recurrent_lstm", "noninlined_funcdef", "ingraph_train_loop"),
    *(f"loop_{number}" for number in range(1, 9)),
)
# Bounds on the relative error of any output or gradient, by Euclidean norm: a few rounding
# steps of the dtype (2^-8 and 2^-11), more where a maximum changes its place (as much, on the
# same graph, with the pass of TensorFlow itself: 0.072 in bfloat16).
TOLERANCE = {"bfloat16": 0.015, "float16": 0.003}
LOOSER = {"multi_paths": 6}


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def suite(request: pytest.FixtureRequest, run_forked: RunPython) -> tuple[str, dict[str, Any]]:
    return request.param, facts_of(run_forked, f"session_peer_graphs.main({request.param!r})")


def test_every_case_ran(suite: tuple[str, dict[str, Any]]) -> None:
    assert set(suite[1]) == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_dtypes_casts_and_values(suite: tuple[str, dict[str, Any]], case: str) -> None:
    dtype, facts = suite[0], suite[1][case]
    assert facts["low"]
    assert facts["low"] == dict.fromkeys(facts["low"], dtype)
    assert facts["full"] == dict.fromkeys(facts["full"], "float32")
    if facts["expected_casts"]:
        assert facts["casts"] == facts["expected_casts"]
    tolerance = TOLERANCE[dtype] * LOOSER.get(case, 1)
    if dtype == "bfloat16":
        tolerance *= bfloat16_errors_behind_products()
    assert 0 < facts["error"] < tolerance
    assert facts["usual_error"] < tolerance
