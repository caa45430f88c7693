from __future__ import annotations

import logging

import pytest
import tensorflow as tf

from tf_amp.loss_scale import (
    DynamicLossScale,
    LossScaleAtFloorError,
    LossScaleState,
    StaticLossScale,
    wrap_optimizer,
)
from tf_amp.loss_scale.floor import SkippedStep

NAN = float("nan")
# What is told is decided for all optimizers in one place: each of them, and each way to run a step.
each_optimizer_and_way = pytest.mark.parametrize(
    ("toolbox", "compiled"),
    [
        *(("keras", way) for way in ("eager", "function", "xla")),
        *((family, "function") for family in ("tf_keras", "tf_keras_legacy", "v1")),
    ],
    indirect=True,
)


def run(toolbox, compiled, rule, xs):
    good, bad = toolbox.variable([1.0]), toolbox.variable([1.0])
    optimizer = wrap_optimizer(toolbox.sgd(0.1), rule)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(toolbox.tensor(good)) + tf.reduce_sum(toolbox.tensor(bad) * x)
            loss = optimizer.scale_loss(loss)
        variables = [good, bad]
        gradients = tape.gradient(loss, [toolbox.tensor(v) for v in variables])
        return optimizer.apply_gradients(zip(gradients, variables, strict=True))

    function = compiled(step)
    for x in xs:
        function(tf.constant(x))
        # Functions compiled by XLA cannot call the host; this is what fit's callback does.
        optimizer.manager.check()
    return optimizer


def floor_rule(at_floor: str, **kwargs) -> DynamicLossScale:
    return DynamicLossScale(initial=4.0, at_floor=at_floor, floor_patience=5, **kwargs)


def messages(caplog, word: str) -> list[str]:
    return [message for message in caplog.messages if word in message]


@each_optimizer_and_way
def test_warn_says_it_once_with_all_that_is_needed(toolbox, compiled, caplog) -> None:
    caplog.set_level(logging.INFO)
    run(toolbox, compiled, floor_rule("warn"), [NAN] * 12)
    (message,) = messages(caplog, "at its floor")
    assert "5 steps in a row" in message
    assert "floor, 1:" in message
    # Of two gradients the second is at fault, and it is a NaN.
    assert "has NaN" in message
    assert "What to try" in message
    assert "DENYLIST_ADD" in message


def test_a_second_run_of_skips_is_warned_about_again(toolbox, caplog) -> None:
    run(toolbox, lambda f: f, floor_rule("warn"), [NAN] * 8 + [1.0] + [NAN] * 8)
    assert len(messages(caplog, "at its floor")) == 2


@each_optimizer_and_way
def test_raise(toolbox, compiled) -> None:
    with pytest.raises(
        (LossScaleAtFloorError, tf.errors.OpError), match=r"(?s)5 steps in a row.*NaN"
    ) as raised:
        run(toolbox, compiled, floor_rule("raise"), [NAN] * 12)
    assert "LossScaleAtFloorError" in f"{raised.type.__name__} {raised.value}"


@each_optimizer_and_way
def test_continue_is_silent(toolbox, compiled, caplog) -> None:
    optimizer = run(toolbox, compiled, floor_rule("continue"), [NAN] * 12)
    assert not messages(caplog, "at its floor")
    assert optimizer.manager.state().skipped_in_a_row == 12


def test_the_floor_may_be_below_one(toolbox, caplog) -> None:
    optimizer = run(toolbox, lambda f: f, floor_rule("warn", floor=2.0**-6), [NAN] * 7)
    assert float(optimizer.loss_scale) == 2.0**-5
    assert not messages(caplog, "at its floor")


def test_a_static_scale_is_always_at_its_floor(toolbox, caplog) -> None:
    run(toolbox, lambda f: f, StaticLossScale(8.0, floor_patience=3), [NAN] * 4)
    assert len(messages(caplog, "at its floor")) == 1


@each_optimizer_and_way
def test_overflow_notices_become_rare(toolbox, compiled, caplog) -> None:
    caplog.set_level(logging.INFO)
    run(toolbox, compiled, DynamicLossScale(floor=2.0**-126), [float("inf")] * 100)
    notices = messages(caplog, "This is normal in the first steps")
    counts = [int(n.split("(")[1].split(" ")[0]) for n in notices]
    assert counts == [1, 2, 4, 8, 16, 32, 64]
    assert "has inf" in notices[0]


@each_optimizer_and_way
def test_nothing_at_the_floor_is_called_normal(toolbox, compiled, caplog) -> None:
    caplog.set_level(logging.INFO)
    run(toolbox, compiled, DynamicLossScale(initial=4.0), [NAN] * 8)
    first, second, fourth, eighth = messages(caplog, "Skipped")
    assert "normal" in first
    for notice, count in ((fourth, 4), (eighth, 8)):
        assert f"the loss scale stays at 1, its lowest ({count} skipped so far)" in notice
        assert "normal" not in notice
    # The step brought it there; where XLA compiles, that is not known.
    assert "2 -> 1" in second or "stays at 1" in second


def test_a_static_scale_does_not_fall(toolbox, caplog) -> None:
    caplog.set_level(logging.INFO)
    run(toolbox, lambda f: f, StaticLossScale(8.0), [1.0, NAN])
    (notice,) = messages(caplog, "Skipped")
    assert "the loss scale stays at 8, its lowest (1 skipped so far)" in notice


def test_the_step_and_the_scale_are_in_the_notice(caplog) -> None:
    caplog.set_level(logging.INFO)
    keras = pytest.importorskip("keras")
    variable = keras.Variable([1.0], name="kernel")
    optimizer = wrap_optimizer(keras.optimizers.SGD(0.1))
    for x in (1.0, 1.0, float("inf")):
        optimizer.apply([optimizer.scale_loss(tf.constant([x]))], [variable])
    (notice,) = messages(caplog, "Skipped")
    assert "step 2: the gradient of kernel has inf; loss scale 32768 -> 16384" in notice


@pytest.mark.parametrize(("before", "step"), [(1024.0, "step 24"), (None, "a step up to step 24")])
def test_a_step_that_nobody_saw_has_no_number(before: float | None, step: str) -> None:
    skipped = SkippedStep(24, before, LossScaleState(512.0), ("kernel", "NaN"))
    assert skipped.describe() == f"{step}: the gradient of kernel has NaN"
