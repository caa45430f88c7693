from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_amp.loss_scale.rule import (
    FLOAT32_MAX,
    DynamicLossScale,
    LossScaleState,
    NoLossScale,
    StaticLossScale,
    from_config,
    resolve,
)


def run(rule: DynamicLossScale, finiteness: str) -> list[float]:
    """The scale before the first step and after each."""
    state = rule.initial_state()
    scales = [state.scale]
    for letter in finiteness:
        state = rule.update(state, letter == "T")
        scales.append(state.scale)
    return scales


def tensorflow_rule(initial: float, period: int, multiplier: float = 2.0) -> DynamicLossScale:
    return DynamicLossScale(
        initial=initial,
        growth_interval=period,
        growth=multiplier,
        backoff=1 / multiplier,
        ceiling=FLOAT32_MAX,
    )


# TensorFlow's own table of loss_scale_test.py: input finiteness -> scale after each step.
TENSORFLOW_TABLE = {
    "increase": (1, 2, 2, "TTTTTT", [1, 2, 2, 4, 4, 8]),
    "keep_increasing_until_capped": (
        FLOAT32_MAX / 4,
        2,
        2,
        "TTTTTT",
        [FLOAT32_MAX / x for x in (4, 2, 2, 1, 1, 1)],
    ),
    "decrease_every_step": (1024, 3, 2, "FFFFFF", [512, 256, 128, 64, 32, 16]),
    "keep_decreasing_until_one": (16, 3, 2, "FFFFFF", [8, 4, 2, 1, 1, 1]),
    "nan_clear_good_step": (1, 2, 2, "TTTFT", [1, 2, 2, 1, 1]),
    "trigger_loss_scale_update_each_step": (1, 1, 2, "TTTFTT", [2, 4, 8, 4, 8, 16]),
    "alternating_good_and_bad_gradients_trigger_each_step": (
        1,
        1,
        2,
        "TFTFTFTFT",
        [2, 1, 2, 1, 2, 1, 2, 1, 2],
    ),
    "alternating_good_and_bad_gradients_trigger_incorrectly": (
        32,
        2,
        2,
        "TFTFTFT",
        [32, 16, 16, 8, 8, 4, 4],
    ),
    "update_with_multiplier_three": (4, 2, 3, "TTFTT", [4, 12, 4, 4, 12]),
    "random_mix_good_and_bad_gradients": (
        4,
        2,
        2,
        "FTTTFTFTTTF",
        [2, 2, 4, 4, 2, 2, 1, 1, 2, 2, 1],
    ),
}


@pytest.mark.parametrize("case", TENSORFLOW_TABLE)
def test_tensorflow_table(case: str) -> None:
    initial, period, multiplier, finiteness, expected = TENSORFLOW_TABLE[case]
    rule = tensorflow_rule(initial, period, multiplier)
    assert run(rule, finiteness)[1:] == pytest.approx(expected, rel=1e-12)


def test_torch_update_scale() -> None:
    """GradScaler's kernel test: growth 2, backoff 0.25, interval 2, and the growth tracker."""
    rule = DynamicLossScale(initial=4.0, growth_interval=2, backoff=0.25)
    state = rule.initial_state()
    seen = []
    for finite in (True, True, False):
        state = rule.update(state, finite)
        seen.append((state.scale, state.good_steps))
    assert seen == [(4.0, 1), (8.0, 0), (2.0, 0)]


def test_torch_grad_scale_will_not_overflow() -> None:
    rule = DynamicLossScale(initial=1e38, growth=16.0, growth_interval=1, ceiling=FLOAT32_MAX)
    assert run(rule, "TTT")[-1] == FLOAT32_MAX


@pytest.mark.parametrize(("period", "factor"), [(20, 2), (30, 3)])
def test_jmp_adjust_increases(period: int, factor: int) -> None:
    rule = DynamicLossScale(
        initial=10.0, growth=float(factor), growth_interval=period, backoff=1 / factor
    )
    state = rule.initial_state()
    for step in range(1, period):
        state = rule.update(state, True)
        assert (state.scale, state.good_steps) == (10.0, step)
    state = rule.update(state, True)
    assert (state.scale, state.good_steps) == (10.0 * factor, 0)


@pytest.mark.parametrize("floor", [1.0, 0.25])
def test_jmp_adjust_reduces_to_the_floor(floor: float) -> None:
    """jmp's `test_dynamic_loss_scale_adjust_reduces` and its explicit_min_loss_scale."""
    rule = DynamicLossScale(initial=2.0**10, floor=floor)
    state = rule.initial_state()
    for step in range(1, 101):
        state = rule.update(state, False)
        assert state.scale == max(floor, 2.0 ** (10 - step))
        assert state.good_steps == 0
        assert state.skipped_in_a_row == state.skipped_steps == step


@pytest.mark.parametrize(
    ("hysteresis", "finiteness", "expected"),
    [
        (1, "FFF", [32, 16, 8]),
        (2, "FFFF", [64, 32, 32, 16]),
        (2, "FTFTF", [64, 64, 64, 64, 64]),
        (3, "FFFFFF", [64, 64, 32, 32, 32, 16]),
    ],
)
def test_hysteresis_counts_skipped_steps_in_a_row(
    hysteresis: int, finiteness: str, expected: list[float]
) -> None:
    rule = DynamicLossScale(initial=64.0, hysteresis=hysteresis)
    assert run(rule, finiteness)[1:] == expected


def test_hysteresis_still_restarts_the_growth_interval() -> None:
    rule = DynamicLossScale(initial=4.0, growth_interval=2, hysteresis=2)
    assert run(rule, "TFTT")[1:] == [4, 4, 4, 8]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    finite_share=st.sampled_from([0.0, 0.01, 0.3, 0.5, 0.9, 0.999, 1.0]),
    growth=st.floats(1.0001, 1e6),
    backoff=st.floats(1e-6, 0.9999),
    interval=st.integers(1, 50),
    hysteresis=st.integers(1, 4),
    floor=st.floats(2.0**-40, 1.0),
    ceiling=st.one_of(st.just(FLOAT32_MAX), st.floats(2.0**15, 2.0**40)),
)
def test_any_sequence_stays_within_the_bounds(
    seed: int,
    finite_share: float,
    growth: float,
    backoff: float,
    interval: int,
    hysteresis: int,
    floor: float,
    ceiling: float,
) -> None:
    rule = DynamicLossScale(
        growth=growth,
        backoff=backoff,
        growth_interval=interval,
        hysteresis=hysteresis,
        floor=floor,
        ceiling=ceiling,
    )
    state = rule.initial_state()
    skipped = 0
    for finite in np.random.default_rng(seed).random(10_000) < finite_share:
        state = rule.update(state, bool(finite))
        skipped += not finite
        assert floor <= state.scale <= ceiling
        assert math.isfinite(state.scale)
        assert 0 <= state.good_steps < interval
    assert state.skipped_steps == skipped


@pytest.mark.parametrize(
    "rule", [NoLossScale(), StaticLossScale(8.0), StaticLossScale(0.5, skip_non_finite=False)]
)
def test_rules_that_never_move_still_count(rule: StaticLossScale) -> None:
    state = rule.initial_state()
    for finite in (True, False, False, True):
        state = rule.update(state, finite)
    assert state == LossScaleState(rule.initial_scale, 1, 2, 0)


def test_update_leaves_its_argument_alone() -> None:
    state = LossScaleState(8.0, 3, 2, 1)
    DynamicLossScale().update(state, False)
    assert state == LossScaleState(8.0, 3, 2, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.scale = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"initial": 0.0}, "initial"),
        ({"initial": math.inf}, "initial"),
        ({"initial": math.nan}, "initial"),
        ({"initial": "big"}, "initial"),
        ({"initial": True}, "initial"),
        ({"initial": 0.5}, "initial"),
        ({"initial": 2.0**25}, "ceiling"),
        ({"floor": -1.0}, "floor"),
        ({"ceiling": 1e39}, "ceiling"),
        ({"growth": 1.0}, "growth"),
        ({"growth": math.inf}, "growth"),
        ({"growth": "2"}, "growth"),
        ({"backoff": 1.0}, "backoff"),
        ({"backoff": 0.0}, "backoff"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"growth_interval": 1.5}, "growth_interval"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"hysteresis": True}, "hysteresis"),
        ({"at_floor": "panic"}, "at_floor"),
        ({"floor_patience": 0}, "floor_patience"),
    ],
)
def test_illegal_values_are_named_with_what_was_received(
    arguments: dict[str, object], named: str
) -> None:
    with pytest.raises(ValueError, match=rf"`{named}`.*Received: |Received: .*{named}"):
        DynamicLossScale(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("dynamic", DynamicLossScale()),
        (123, StaticLossScale(123.0)),
        (0.5, StaticLossScale(0.5)),
        (DynamicLossScale(floor=0.5), DynamicLossScale(floor=0.5)),
    ],
)
def test_resolve(argument: object, expected: object) -> None:
    assert resolve(argument) == expected


@pytest.mark.parametrize("argument", ["static", None, True, -1.0, 0, math.nan, object()])
def test_resolve_refuses_what_is_no_scale(argument: object) -> None:
    with pytest.raises(ValueError, match="Received: "):
        resolve(argument)


@pytest.mark.parametrize(
    "rule",
    [
        NoLossScale(),
        StaticLossScale(4.0, at_floor="raise", floor_patience=3),
        DynamicLossScale(initial=8.0, growth=3.0, backoff=0.1, hysteresis=2, floor=0.5),
    ],
)
def test_config_round_trip_through_json(rule: object) -> None:
    config = json.loads(json.dumps(rule.get_config()))  # type: ignore[attr-defined]
    assert from_config(config) == rule


def test_config_without_a_known_class_is_refused() -> None:
    with pytest.raises(ValueError, match=r"class_name.*Received: 'Other'"):
        from_config({"class_name": "Other"})


@pytest.mark.parametrize("number", [np.float32, np.float64, np.float16, np.int64, np.uint8])
def test_numpy_scalars_are_numbers(number) -> None:
    assert resolve(number(128)) == StaticLossScale(128.0)
    assert StaticLossScale(number(128)) == StaticLossScale(128.0)
    rule = DynamicLossScale(initial=number(128), growth=number(4), growth_interval=np.int32(7))
    assert rule == DynamicLossScale(initial=128.0, growth=4.0, growth_interval=7)
    assert from_config(json.loads(json.dumps(rule.get_config()))) == rule


@pytest.mark.parametrize(
    "thing", [np.bool_(True), np.float32("nan"), np.float32("inf"), np.ones(1)]
)
def test_other_things_of_numpy_are_refused(thing) -> None:
    with pytest.raises(ValueError, match="Received"):
        resolve(thing)
    with pytest.raises(ValueError, match="Received"):
        DynamicLossScale(initial=thing)


def test_a_dynamic_rule_in_words() -> None:
    assert str(DynamicLossScale()) == (
        "a dynamic loss scale (32768 at first, doubled after 2000 finite steps, halved after one "
        "that is not)"
    )
    rule = DynamicLossScale(initial=8, growth=4, growth_interval=5, backoff=0.25, hysteresis=3)
    assert str(rule) == (
        "a dynamic loss scale (8 at first, times 4 after 5 finite steps, times 0.25 after 3 in a "
        "row that are not)"
    )
    assert eval(repr(rule)) == rule
