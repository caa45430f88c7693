from __future__ import annotations

import threading
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api

from tf_amp.loss_scale import (
    DynamicLossScale,
    LossScaleManager,
    LossScaleProtocolError,
    wrap_optimizer,
)
from tf_amp.loss_scale.step_protocol import Phase, StepProtocol

X = tf.constant([1.0, 1.0])


def make(toolbox, **kwargs):
    variable = toolbox.variable([1.0, 2.0])
    optimizer = wrap_optimizer(toolbox.sgd(1.0), DynamicLossScale(initial=8.0), **kwargs)
    return optimizer, variable


def gradients_of(toolbox, optimizer, variable, scaled=True):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(toolbox.tensor(variable) * X)
        loss = optimizer.scale_loss(loss) if scaled else loss
    return tape.gradient(loss, [toolbox.tensor(variable)])


def value(toolbox, variable) -> list[float]:
    return toolbox.tensor(variable).numpy().tolist()


def test_apply_unscales_by_itself(toolbox) -> None:
    optimizer, variable = make(toolbox)
    gradients = gradients_of(toolbox, optimizer, variable)
    assert gradients[0].numpy().tolist() == [8.0, 8.0]
    assert bool(optimizer.apply_gradients(zip(gradients, [variable], strict=True)))
    assert value(toolbox, variable) == [0.0, 1.0]


@pytest.mark.parametrize("names", ["tf_amp", "keras2"])
def test_apply_does_not_unscale_again(toolbox, names: str) -> None:
    optimizer, variable = make(toolbox)
    scale, unscale = (
        (optimizer.scale_loss, optimizer.unscale)
        if names == "tf_amp"
        else (optimizer.get_scaled_loss, optimizer.get_unscaled_gradients)
    )
    with tf.GradientTape() as tape:
        loss = scale(tf.reduce_sum(toolbox.tensor(variable) * X))
    gradients = unscale(tape.gradient(loss, [toolbox.tensor(variable)]))
    assert gradients[0].numpy().tolist() == [1.0, 1.0]
    optimizer.apply_gradients(zip(gradients, [variable], strict=True))
    assert value(toolbox, variable) == [0.0, 1.0]


def test_unscaling_twice_is_an_error_and_the_next_step_works(toolbox) -> None:
    optimizer, variable = make(toolbox)
    gradients = optimizer.unscale(gradients_of(toolbox, optimizer, variable))
    with pytest.raises(LossScaleProtocolError, match=r"called twice.*Call it once"):
        optimizer.unscale(gradients)
    gradients = optimizer.unscale(gradients_of(toolbox, optimizer, variable))
    optimizer.apply_gradients(zip(gradients, [variable], strict=True))
    assert value(toolbox, variable) == [0.0, 1.0]


def test_a_loss_never_scaled_warns_once_and_applies_the_gradients_as_they_are(
    toolbox, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, variable = make(toolbox)
    for _ in range(3):
        gradients = gradients_of(toolbox, optimizer, variable, scaled=False)
        optimizer.apply_gradients(zip(gradients, [variable], strict=True))
    assert value(toolbox, variable) == [-2.0, -1.0]
    assert sum("scale_loss() never was" in message for message in caplog.messages) == 1


def test_strict_makes_it_an_error(toolbox) -> None:
    optimizer, variable = make(toolbox, strict=True)
    gradients = gradients_of(toolbox, optimizer, variable, scaled=False)
    with pytest.raises(LossScaleProtocolError, match=r"scale_loss\(\) never was"):
        optimizer.apply_gradients(zip(gradients, [variable], strict=True))
    assert value(toolbox, variable) == [1.0, 2.0]


def test_a_forgotten_scale_loss_after_a_good_step_warns_once(
    toolbox, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, variable = make(toolbox)
    gradients = gradients_of(toolbox, optimizer, variable)
    for _ in range(3):
        optimizer.apply_gradients(zip(gradients, [variable], strict=True))
    assert sum("not called since the last" in message for message in caplog.messages) == 1


def test_no_gradient_at_all_is_an_error_that_names_the_variables(toolbox) -> None:
    optimizer, variable = make(toolbox)
    optimizer.scale_loss(tf.constant(1.0))
    with pytest.raises(ValueError, match=r"No variable has a gradient.*None for .*\w"):
        optimizer.apply_gradients([(None, variable)])


def test_an_exception_in_a_step_leaves_the_optimizer_usable(toolbox) -> None:
    optimizer, variable = make(toolbox)
    with pytest.raises(ZeroDivisionError):
        optimizer.unscale(gradients_of(toolbox, optimizer, variable))
        raise ZeroDivisionError
    gradients = gradients_of(toolbox, optimizer, variable)
    optimizer.apply_gradients(zip(gradients, [variable], strict=True))
    assert value(toolbox, variable) == [0.0, 1.0]


@pytest.mark.parametrize("unscales", [False, True])
def test_a_step_whose_first_half_is_a_function(toolbox, unscales: bool, caplog) -> None:
    """From the second step on, Python sees only the eager half."""
    optimizer, variable = make(toolbox)

    @tf.function
    def first_half():
        gradients = gradients_of(toolbox, optimizer, variable)
        return optimizer.unscale(gradients) if unscales else gradients

    for _ in range(3):
        optimizer.apply_gradients(
            zip(first_half(), [variable], strict=True), unscaled=unscales or None
        )
    assert value(toolbox, variable) == [-2.0, -1.0]
    assert not [message for message in caplog.messages if "scale_loss" in message]


def test_what_was_unscaled_in_another_function_must_be_said(toolbox) -> None:
    """The first step already is an error: later ones would be silently wrong."""
    optimizer, variable = make(toolbox)

    @tf.function
    def first_half():
        return optimizer.unscale(gradients_of(toolbox, optimizer, variable))

    with pytest.raises(LossScaleProtocolError, match=r"cannot be known.*unscaled=True"):
        optimizer.apply_gradients(zip(first_half(), [variable], strict=True))
    assert value(toolbox, variable) == [1.0, 2.0]


def test_gradients_that_a_loop_unscales_and_adds_up(toolbox) -> None:
    """Micro-batches in a `tf.range`: its body is traced with the function around it."""
    optimizer, variable = make(toolbox)

    @tf.function
    def step() -> None:
        total = tf.zeros_like(toolbox.tensor(variable))
        for _ in tf.range(4):
            total += optimizer.unscale(gradients_of(toolbox, optimizer, variable))[0]
        optimizer.apply_gradients([(total / 4, variable)])

    if toolbox.family == "keras":
        optimizer.build([variable])
    step()
    step()
    assert value(toolbox, variable) == [-1.0, 0.0]


@pytest.mark.parametrize("half", ["unscale", "apply"])
def test_one_half_of_a_step_in_a_branch(toolbox, half: str) -> None:
    """What is around a branch does not know whether it ran, but what is in it knows the rest."""
    optimizer, variable = make(toolbox)

    @tf.function(autograph=False)
    def step(yes: tf.Tensor) -> tf.Tensor:
        gradients = gradients_of(toolbox, optimizer, variable)
        if half == "unscale":
            unscale = lambda: optimizer.unscale(gradients)  # noqa: E731
            gradients = tf.cond(yes, unscale, lambda: gradients)
            return optimizer.apply_gradients(zip(gradients, [variable], strict=True))
        pairs = list(zip(optimizer.unscale(gradients), [variable], strict=True))
        return tf.cond(yes, lambda: optimizer.apply_gradients(pairs), lambda: yes)

    if toolbox.family == "keras":
        optimizer.build([variable])
    if half == "unscale":
        with pytest.raises(LossScaleProtocolError, match=r"cannot be known.*in a branch alone"):
            step(tf.constant(True))
    else:
        step(tf.constant(True))
        step(tf.constant(False))
    assert value(toolbox, variable) == ([1.0, 2.0] if half == "unscale" else [0.0, 1.0])


@pytest.mark.parametrize("said", [False, True])
def test_unscaling_on_some_steps_only(toolbox, said: bool) -> None:
    """A function takes the gradients, and the loop looks at every second of them."""
    optimizer, variable = make(toolbox)
    first_half = tf.function(lambda: gradients_of(toolbox, optimizer, variable))

    def loop() -> None:
        for i in range(4):
            gradients, looks = first_half(), i % 2 == 0
            gradients = optimizer.unscale(gradients) if looks else gradients
            how = {"unscaled": looks} if said else {}
            optimizer.apply_gradients(zip(gradients, [variable], strict=True), **how)

    if said:
        loop()
        assert value(toolbox, variable) == [-3.0, -2.0]
    else:
        with pytest.raises(LossScaleProtocolError, match=r"cannot be known.*unscaled=False"):
            loop()
        assert value(toolbox, variable) == [0.0, 1.0]


def test_unscaling_on_some_steps_of_an_eager_loop(toolbox) -> None:
    optimizer, variable = make(toolbox)
    for i in range(4):
        gradients = gradients_of(toolbox, optimizer, variable)
        gradients = optimizer.unscale(gradients) if i % 2 else gradients
        optimizer.apply_gradients(zip(gradients, [variable], strict=True))
    assert value(toolbox, variable) == [-3.0, -2.0]


def test_each_thread_has_a_step_of_its_own() -> None:
    protocol = StepProtocol()
    protocol.loss_scaled()
    seen: list[Phase] = []
    thread = threading.Thread(target=lambda: seen.append(protocol.phase))
    thread.start()
    thread.join()
    assert seen == [Phase.READY]
    assert protocol.phase is Phase.SCALED


def test_gradients_are_divided_by_what_their_loss_was_multiplied_by(toolbox) -> None:
    """Another worker's step, or a thread's, moves the scale while this one runs."""
    optimizer, variable = make(toolbox)

    @tf.function
    def step() -> None:
        gradients = gradients_of(toolbox, optimizer, variable)
        with tf.control_dependencies(gradients):
            optimizer.manager.scale_variable.assign(2.0)
        optimizer.apply_gradients(zip(gradients, [variable], strict=True))

    optimizer.manager.create_variables()
    step()
    assert value(toolbox, variable) == [0.0, 1.0]


def test_two_losses_that_were_scaled_before_either_step_was_taken(toolbox) -> None:
    optimizer, variable = make(toolbox)

    @tf.function
    def step() -> None:
        bad = gradients_of(toolbox, optimizer, variable)
        good = gradients_of(toolbox, optimizer, variable)
        optimizer.apply_gradients(zip([bad[0] * float("inf")], [variable], strict=True))
        optimizer.apply_gradients(zip(good, [variable], strict=True))

    step()
    assert optimizer.manager.state().scale == 4.0
    assert value(toolbox, variable) == [0.0, 1.0]


def test_what_multiplied_a_loss_in_a_body_is_not_looked_for_behind_it(toolbox) -> None:
    optimizer, variable = make(toolbox)

    @tf.function
    def step() -> None:
        gradients = [tf.zeros([2])]
        for _ in tf.range(2):
            gradients = gradients_of(toolbox, optimizer, variable)
        optimizer.apply_gradients(zip(gradients, [variable], strict=True))

    step()
    assert value(toolbox, variable) == [0.0, 1.0]


class _Choosing(tf.compat.v1.train.GradientDescentOptimizer):
    def apply_gradients(self, grads_and_vars: Any, **kwargs: Any) -> Any:
        """Needs AutoGraph, as what people write in a `tf.function` may."""
        ((gradient, variable),) = grads_and_vars
        if tf.reduce_sum(gradient) > 0:
            gradient = 2.0 * gradient
        return super().apply_gradients([(gradient, variable)], **kwargs)


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The functions that AutoGraph converts."""
    names, convert = set[str](), api._convert_actual

    def note(function: Any, context: Any) -> Any:
        names.add(function.__qualname__.rpartition(".<locals>.")[2])
        return convert(function, context)

    monkeypatch.setattr(api, "_convert_actual", note)
    return names


def test_autograph_converts_what_is_the_programs_own(converted: set[str]) -> None:
    optimizer, variable = wrap_optimizer(_Choosing(1.0)), tf.Variable([1.0, 2.0])

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(variable))
        gradients = optimizer.unscale(tape.gradient(loss, [variable]))
        optimizer.apply_gradients(zip(gradients, [variable], strict=True))

    step()
    assert variable.numpy().tolist() == [-1.0, 0.0]
    own = {"step", "_Choosing.apply_gradients"}
    assert converted == own | {"V1LossScaleOptimizer.apply_gradients"}


def test_autograph_converts_nothing_of_a_loop_by_hand_but_the_loop(converted: set[str]) -> None:
    manager, variable = LossScaleManager(8.0), tf.Variable([1.0, 2.0])

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = manager.multiply(tf.reduce_sum(variable))
        (gradient,) = manager.unscale(tape.gradient(loss, [variable]))
        variable.assign_sub(gradient)

    step()
    assert variable.numpy().tolist() == [0.0, 1.0]
    assert converted == {"step"}
