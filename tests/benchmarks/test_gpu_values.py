"""Parameters by rule: the same on two machines, and what no rule can stand for."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from gpu.values import make, rule_for


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((3, 4), np.float32),
        np.array(7, np.int64),
        np.ones((2,), ml_dtypes.bfloat16),
        np.array([True, False]),
        np.arange(5000, dtype=np.int32).reshape(50, 100),
        np.linspace(0, 1, 9, dtype=np.float32),
        np.zeros((0, 2), np.float32),
    ],
)
def test_short_equal_and_whole_numbers_come_back_as_they_are(value: np.ndarray) -> None:
    made = make("x", list(value.shape), value.dtype.name, rule_for(value))
    assert made.dtype == value.dtype
    np.testing.assert_array_equal(made, value)


def test_a_weight_becomes_one_of_the_same_spread_by_its_name() -> None:
    weight = np.random.default_rng(1).uniform(1, 3, (200, 100)).astype(np.float32)
    rule = rule_for(weight)
    made = make("dense/kernel", [200, 100], "float32", rule)
    assert abs(made.mean() - 2) < 0.02
    assert abs(made.std() - weight.std()) < 0.02
    np.testing.assert_array_equal(made, make("dense/kernel", [200, 100], "float32", rule))
    assert (made != make("dense_1/kernel", [200, 100], "float32", rule)).any()


def test_many_different_integers_cannot_be_exported() -> None:
    with pytest.raises(ValueError, match=r"65537 different int32 .* Compute them within"):
        rule_for(np.arange((1 << 16) + 1, dtype=np.int32))
