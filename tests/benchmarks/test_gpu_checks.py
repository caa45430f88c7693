"""Digests of results: what is told apart, and what is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu.checks import complaint, differences, digest, error, first_step

_VALUES = np.random.default_rng(0).standard_normal((40, 50))


def test_the_same_array_has_no_error_and_a_rounded_one_a_small_error() -> None:
    assert error(digest(_VALUES), digest(_VALUES)) == 0
    assert 0 < error(digest(_VALUES), digest(_VALUES.astype(np.float16))) < 2**-10


@pytest.mark.parametrize(
    "other",
    [
        _VALUES * 1.1,
        _VALUES.T.reshape(40, 50),
        _VALUES[::-1],
        _VALUES[:20],
        np.where(_VALUES > 2, np.nan, _VALUES),
        np.zeros_like(_VALUES),
    ],
)
def test_another_array_is_told_apart(other: np.ndarray) -> None:
    assert error(digest(_VALUES), digest(other)) > 2**-4


def test_zeros_are_equal_to_zeros_alone() -> None:
    zeros = digest(np.zeros(10))
    assert error(zeros, zeros) == 0
    assert error(zeros, digest(np.full(10, 1e-9))) == float("inf")


def _step(loss: float = 2.0, gradient: float = 1.0, count: int = 1) -> dict[str, Any]:
    before = {"kernel": _VALUES, "seed": np.array([0, 1])}
    after = {"kernel": _VALUES - 0.01 * gradient, "seed": np.array([count, 1])}
    return first_step(before, [np.array(loss)], after)


@pytest.mark.parametrize(
    ("found", "dtype", "said"),
    [
        (_step(), "float32", None),
        (_step(loss=2.02), "float32", None),
        (_step(loss=2.1), "float32", "an output differs by 0.05"),
        (_step(loss=2.1), "bfloat16", None),
        (_step(loss=float("nan")), "bfloat16", "an output differs by inf"),
        (_step(gradient=1.5), "float16", "updates differ by 0.5"),
        (_step(gradient=0.0), "bfloat16", "updates differ by 1"),
        (_step(count=2), "bfloat16", "integers differ: seed"),
    ],
)
def test_a_step_is_judged_by_outputs_and_by_what_it_adds(
    found: dict[str, Any], dtype: str, said: str | None
) -> None:
    complained = complaint(differences(_step(), found), dtype)
    assert complained is None if said is None else said in str(complained)


def test_a_dtype_that_is_far_from_float32_by_itself_may_differ_as_far() -> None:
    inherent = differences(_step(), _step(gradient=2.0))
    found = differences(_step(gradient=2.0), _step(gradient=1.2))
    assert "updates differ by 0.4" in str(complaint(found, "bfloat16"))
    assert complaint(found, "bfloat16", inherent=inherent) is None
    lost = differences(_step(gradient=2.0), _step(gradient=-1.0))
    assert "updates differ by 1.5" in str(complaint(lost, "bfloat16", inherent=inherent))


def test_what_only_one_of_two_variants_has_does_not_count() -> None:
    scaled = _step()
    scaled["updates"]["loss_scale"] = digest(np.ones(()))
    assert complaint(differences(_step(), scaled), "float32") is None
