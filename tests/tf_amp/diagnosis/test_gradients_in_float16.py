"""What float16 loses of gradients, and the loss scale that loses least."""

from __future__ import annotations

import numpy as np
import pytest

from tf_amp.diagnosis.gradients import GradientMeter, Gradients

KEY, OTHER = ("step", "MatMul", 0), ("step", "MatMul_1", 0)


def measured(*arrays: np.ndarray, present: float = 1.0, loss_scale: float = 1.0) -> Gradients:
    meter = GradientMeter({KEY: "w", OTHER: "v"}, present, loss_scale)
    for key, values in zip((KEY, OTHER), arrays, strict=False):
        meter.tell(key, (values * present).astype(np.float32))
    return meter.gradients()


def spread(count: int = 4000) -> np.ndarray:
    rng = np.random.default_rng(0)
    values = (rng.normal(size=count) * 10.0 ** rng.uniform(-14, 5, count)).astype(np.float32)
    values[:100] = 0
    # The tie, which rounds to zero, its neighbours, and those of the first that is infinite.
    values[100:103] = [2.0**-25, np.float32(2.0**-25 * (1 + 2**-20)), 2.0**-26]
    values[103:106] = [65504, 65519, 65520]
    return values


@pytest.mark.parametrize("scale", [1.0, 8.0, 1000.0, 2.0**15])
@pytest.mark.parametrize("present", [1.0, 2.0**10])
def test_counts_are_those_of_a_cast_to_float16(scale: float, present: float) -> None:
    values = spread()
    with np.errstate(over="ignore"):
        cast = (values.astype(np.float64) * scale).astype(np.float16)
    found = measured(values, present=present, loss_scale=scale)
    (gradient,) = found.of_variables
    assert gradient.flushed == np.sum((cast == 0) & (values != 0)) > 0
    assert gradient.overflowed == np.sum(np.isinf(cast)) > 0
    assert (gradient.variable, gradient.elements, gradient.zero) == ("w", 4000, 100)
    assert gradient.share == gradient.flushed / 3900
    if np.log2(scale).is_integer():
        assert found.share(scale) == gradient.share


@pytest.mark.parametrize(
    ("values", "best"),
    [
        # 2^-30 is kept from 2^6 on, and 2^3 becomes too large with 2^13: the middle is 2^9.
        ([2.0**-30, 2.0**3], 2.0**9),
        # Nothing is lost from 1 to 2^15, with which 1 is still finite.
        ([1.0], 2.0**8),
        # What no scale can hold together: the large one has to stay finite.
        ([2.0**-60, 1.0], 2.0**8),
        ([2.0**-31, 2.0**-29, 2.0**10], 2.0**5),
        ([1e6, 1.0], 1.0),
        ([0.0], None),
        ([], None),
    ],
)
def test_best_loss_scale(values: list[float], best: float | None) -> None:
    assert measured(np.array(values, np.float32)).best_loss_scale == best


def test_values_that_are_not_finite_and_turns_of_a_loop() -> None:
    meter = GradientMeter({KEY: "w"}, 1.0, 1.0)
    meter.tell(KEY, np.array([1.0, np.nan, 0.0, 1e-9], np.float32))
    meter.tell(KEY, np.array([2.0, np.inf], np.float32))
    (gradient,) = meter.gradients().of_variables
    assert (gradient.elements, gradient.non_finite, gradient.zero) == (6, 2, 1)
    assert (gradient.largest, gradient.flushed) == (2.0, 1)
    assert sum(gradient.exponents.values()) == 3


def test_the_worst_comes_first_and_the_rest_is_counted() -> None:
    found = measured(np.ones(4), np.full(4, 1e-9))
    assert [g.variable for g in found.of_variables] == ["v", "w"]
    told = str(found)
    assert "2 variables in float16 at a loss scale of 1: 50.0% of what is not 0" in told
    assert "v: 100.0% of 4 flushed to 0" in told and "w:" not in told
    assert "2^10 = 1,024: 0.0%" in told
