"""Cost tables: curves and look-ups."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_cost_table import CURVE, SMALL

from graph_passes import PrecisionConfig
from graph_passes.policy.cost_table import (
    BROADCAST,
    CHANNELS_FIRST,
    CHANNELS_FIRST_DEEP,
    CHANNELS_FIRST_POINTWISE,
    GROUPED,
    GROUPED_WIDE,
    STRIDED,
    WIDE,
    WIDE_STRIDED,
    Curve,
    OpCost,
)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (1, 1e-6),
        (1000, 1e-6),
        (10_000, 1e-5),
        (100_000, 1e-4),
        (1_000_000, 1e-3),
    ],
)
def test_a_curve_between_below_and_above_what_was_measured(size: int, seconds: float) -> None:
    assert CURVE.at(size) == pytest.approx(seconds)


_times = st.lists(st.floats(1e-7, 10), min_size=1, max_size=6)


@given(times=_times, sizes=st.sets(st.integers(1, 10**9), min_size=6, max_size=6), at=st.data())
def test_a_curve_stays_between_its_neighbours(
    times: list[float], sizes: set[int], at: st.DataObject
) -> None:
    chosen = tuple(sorted(sizes))[: len(times)]
    curve = Curve(chosen, tuple(times))
    size = at.draw(st.integers(chosen[0], chosen[-1]))
    below = max(i for i, known in enumerate(chosen) if known <= size)
    ends = times[below : below + 2]
    assert min(ends) * 0.999 <= curve.at(size) <= max(ends) * 1.001


@pytest.mark.parametrize(
    ("sizes", "seconds", "said"),
    [
        ((), (), "one or more ascending"),
        ((0, 5), (1.0, 1.0), "at least 1"),
        ((5, 5), (1.0, 1.0), "ascending"),
        ((5, 6), (1.0,), "one time"),
        ((5,), (0.0,), "greater than 0"),
        ((5,), (float("nan"),), "greater than 0"),
    ],
)
def test_an_impossible_curve_is_refused(
    sizes: tuple[int, ...], seconds: tuple[float, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Curve(sizes, seconds)


def test_a_variant_falls_back_to_its_op() -> None:
    assert SMALL.cost_of("AddV2", BROADCAST) is dict(SMALL.rows)["AddV2/broadcast"]
    assert SMALL.cost_of("AddV2", STRIDED) is SMALL.cost_of("AddV2")
    strided = dataclasses.replace(SMALL, rows=(*SMALL.rows, ("AddV2/strided", SMALL.rows[0][1])))
    assert strided.cost_of("AddV2", WIDE_STRIDED) is strided.cost_of("AddV2", STRIDED)
    assert strided.cost_of("AddV2", WIDE) is SMALL.cost_of("AddV2")
    grouped = dataclasses.replace(SMALL, rows=(*SMALL.rows, ("AddV2/grouped", SMALL.rows[0][1])))
    assert grouped.cost_of("AddV2", GROUPED_WIDE) is grouped.cost_of("AddV2", GROUPED)
    assert SMALL.cost_of("Relu") is None
    assert SMALL.cost_of("Relu", BROADCAST) is None
    assert set(SMALL.variants_of("AddV2")) == {"", BROADCAST}
    assert not SMALL.variants_of("Relu")


@pytest.mark.parametrize("variant", [CHANNELS_FIRST, CHANNELS_FIRST_DEEP, CHANNELS_FIRST_POINTWISE])
def test_channels_first_without_a_measurement_are_no_gain(variant: str) -> None:
    cost = SMALL.cost_of("MatMul", variant)
    assert cost is not None
    assert cost.float32 == dict(SMALL.rows)["MatMul"].float32
    assert cost.gain(100) == pytest.approx(-3e-6)
    few = dict(SMALL.rows)["MatMul"]
    measured = dataclasses.replace(SMALL, rows=(*SMALL.rows, (f"MatMul/{CHANNELS_FIRST}", few)))
    assert measured.cost_of("MatMul", variant) is few
    assert SMALL.cost_of("Relu", variant) is None


def test_layouts_count_in_kernels_of_a_cpu() -> None:
    assert SMALL.by_layout
    assert not dataclasses.replace(SMALL, device="GPU").by_layout
    assert not dataclasses.replace(SMALL, compiled=True).by_layout


def test_gain_is_the_difference_and_clear_only_if_it_has_one_sign() -> None:
    add, matmul = SMALL.cost_of("AddV2"), SMALL.cost_of("MatMul")
    assert add is not None
    assert matmul is not None
    assert add.gain(1000) == pytest.approx(-1e-6)
    assert add.gain(100_000) == pytest.approx(5e-5)
    assert add.clear_gain(100_000, 1.25) == 0
    assert matmul.clear_gain(100, 1.25) == pytest.approx(2e-6)
    assert matmul.clear_gain(100, 4) == 0


@pytest.mark.parametrize(
    ("low", "gain"), [(0.5e-6, 0.5e-6), (1e-6, 0), (1.5e-6, 0), (2e-6, -0.5e-6), (9e-6, -7.5e-6)]
)
def test_a_small_loss_is_in_doubt(low: float, gain: float) -> None:
    cost = OpCost("elements", Curve((1,), (1e-6,)), Curve((1,), (low,)))
    assert cost.gain(1, doubt=1.5) == pytest.approx(gain)


@pytest.mark.parametrize(("low", "gain"), [(2e-6, 1e-6), (6e-6, -2e-6)])
def test_less_work_than_was_measured_saves_less_but_may_lose_as_much(
    low: float, gain: float
) -> None:
    cost = OpCost("flops", Curve((100,), (4e-6,)), Curve((100,), (low,)))
    assert cost.gain(50) == pytest.approx(gain)


def test_a_gain_beyond_a_margin_is_less_and_may_be_a_loss() -> None:
    cost = OpCost("flops", Curve((1,), (4e-6,)), Curve((1,), (3e-6,)))
    assert cost.gain_beyond(1, 1.0) == pytest.approx(cost.gain(1))
    assert cost.gain_beyond(1, 1.1) == pytest.approx(0.7e-6)
    assert cost.gain_beyond(1, 1.5) == pytest.approx(-0.5e-6)


def test_one_size_alone_makes_no_gain_beyond_a_margin() -> None:
    sizes, full = (1, 10, 100), (1e-6, 1e-5, 1e-4)
    once = OpCost("flops", Curve(sizes, full), Curve(sizes, (1e-6, 1e-6, 1e-4)))
    assert once.gain_beyond(10, 1.1) == 0
    assert once.gain_beyond(100, 1.1) == pytest.approx(-1e-5)
    twice = OpCost("flops", Curve(sizes, full), Curve(sizes, (1e-6, 1e-6, 1e-5)))
    assert twice.gain_beyond(10, 1.1) == pytest.approx(8.9e-6)


def test_a_config_takes_a_table_of_its_dtype_and_device_only() -> None:
    config = PrecisionConfig(target_dtype="bfloat16", device="CPU", cost_table=SMALL)
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(ValueError, match=r"bfloat16 on CPU.*float16 on GPU"):
        PrecisionConfig(cost_table=SMALL)
