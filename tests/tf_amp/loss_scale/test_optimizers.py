"""What all wrapped optimizers have in common, whatever library they come from."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf

from tf_amp.loss_scale import (
    DynamicLossScale,
    LossScaleManager,
    NoLossScale,
    StaticLossScale,
    is_wrapped,
    wrap_optimizer,
)

INF, NAN = float("inf"), float("nan")
RULE = DynamicLossScale(initial=4.0, growth_interval=2)


def make_step(toolbox, optimizer, variable):
    def step(x):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(toolbox.tensor(variable) * x))
        gradients = tape.gradient(loss, [toolbox.tensor(variable)])
        return optimizer.apply_gradients(zip(gradients, [variable], strict=True))

    return step


def plain_run(toolbox, xs, make="adam", **kwargs):
    """The same steps in float32 without a wrapper."""
    variable = toolbox.variable([1.0, 2.0])
    optimizer = getattr(toolbox, make)(**kwargs)
    for x in xs:
        optimizer.apply_gradients([(tf.constant([x, x]), variable)])
    return toolbox.tensor(variable).numpy(), optimizer


@pytest.mark.parametrize("make", ["sgd", "adam"])
def test_a_skipped_step_changes_nothing_but_the_scale(toolbox, compiled, make: str) -> None:
    variable = toolbox.variable([1.0, 2.0])
    inner = getattr(toolbox, make)(0.1)
    optimizer = wrap_optimizer(inner, RULE)
    step = compiled(make_step(toolbox, optimizer, variable))
    applied, scales = [], []
    for x in (1.0, NAN, 2.0, 3.0, INF, -INF, 0.5):
        before = (toolbox.tensor(variable).numpy(), toolbox.optimizer_values(inner))
        applied.append(bool(step(tf.constant(x))))
        scales.append(float(optimizer.loss_scale))
        if not applied[-1]:
            after = (toolbox.tensor(variable).numpy(), toolbox.optimizer_values(inner))
            np.testing.assert_equal(after, before)
    assert applied == [True, False, True, True, False, False, True]
    assert scales == [4, 2, 2, 4, 2, 1, 1]
    state = optimizer.manager.state()
    assert (state.good_steps, state.skipped_steps, state.skipped_in_a_row) == (1, 3, 0)
    expected, _ = plain_run(toolbox, [1.0, 2.0, 3.0, 0.5], make, learning_rate=0.1)
    np.testing.assert_allclose(toolbox.tensor(variable), expected, rtol=1e-6)


def test_iterations_advance_on_applied_steps_alone(toolbox) -> None:
    if toolbox.family == "v1":
        pytest.skip("v1 optimizers count with a global_step; see test_v1_optimizer")
    variable = toolbox.variable([1.0, 2.0])
    optimizer = wrap_optimizer(toolbox.sgd(), RULE)
    step = make_step(toolbox, optimizer, variable)
    for i in range(10):
        step(tf.constant(NAN if i in (2, 5, 6) else 1.0))
    assert int(toolbox.tensor(optimizer.iterations)) == 7
    assert optimizer.manager.state().skipped_steps == 3


def test_momentum_slots_are_those_of_float32_at_scale_4(toolbox, compiled) -> None:
    """TensorFlow's test of slots: the slot holds the unscaled gradient."""
    variable = toolbox.variable([1.0, 2.0])
    inner = toolbox.sgd(0.5, momentum=0.9)
    optimizer = wrap_optimizer(inner, StaticLossScale(4.0))
    step = compiled(make_step(toolbox, optimizer, variable))
    for x in (1.0, 3.0):
        step(tf.constant(x))
    expected, plain = plain_run(toolbox, [1.0, 3.0], "sgd", momentum=0.9)
    np.testing.assert_allclose(toolbox.tensor(variable), expected, rtol=1e-6)
    ours, theirs = toolbox.optimizer_values(inner), toolbox.optimizer_values(plain)
    np.testing.assert_allclose(ours[-1], theirs[-1], rtol=1e-6)


def test_sparse_gradients_stay_sparse(toolbox, compiled) -> None:
    """Rows that are not in the batch do not change, and no gradient is made dense."""
    table = toolbox.variable(np.ones((6, 2)))
    optimizer = wrap_optimizer(toolbox.sgd(1.0), RULE)
    seen = []

    def step(rows, factor):
        with tf.GradientTape() as tape:
            picked = tf.gather(toolbox.tensor(table), rows)
            loss = optimizer.scale_loss(tf.reduce_sum(picked) * factor)
        (gradient,) = tape.gradient(loss, [toolbox.tensor(table)])
        seen.append(gradient)
        (unscaled,) = optimizer.unscale([gradient])
        seen.append(unscaled)
        return optimizer.apply_gradients([(unscaled, table)])

    run = compiled(step)
    assert bool(run(tf.constant([1, 4]), tf.constant(0.5)))
    assert not bool(run(tf.constant([2, 3]), tf.constant(INF)))
    assert all(isinstance(gradient, tf.IndexedSlices) for gradient in seen)
    expected = np.ones((6, 2))
    expected[[1, 4]] -= 0.5
    np.testing.assert_array_equal(toolbox.tensor(table), expected)


def test_a_class_that_changes_some_of_its_gradients(toolbox, compiled) -> None:
    """As one that centralizes gradients does, of kernels alone."""
    own_class = type(toolbox.sgd(0.1))

    class Centralizing(own_class):
        def apply_gradients(self, grads_and_vars, *args, **kwargs):
            pairs = [
                (g - tf.reduce_mean(g, axis=0) if len(g.shape) > 1 else g, v)
                for g, v in grads_and_vars
            ]
            return super().apply_gradients(pairs, *args, **kwargs)

    def trained(wrap):
        variables = [toolbox.variable([[1.0], [2.0]]), toolbox.variable([3.0])]
        watched = [toolbox.tensor(variable) for variable in variables]
        optimizer = wrap(Centralizing(0.1))
        scale = getattr(optimizer, "scale_loss", lambda loss: loss)

        def step(x):
            with tf.GradientTape() as tape:
                loss = scale(tf.reduce_sum(x @ watched[0] + watched[1]))
            gradients = tape.gradient(loss, watched)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        compiled(step)(tf.constant([[1.0, 3.0]]))
        return [one.numpy() for one in watched]

    np.testing.assert_allclose(np.ravel(trained(wrap_optimizer)[0]), [1.1, 1.9], rtol=1e-6)
    for ours, plain in zip(trained(wrap_optimizer), trained(lambda o: o), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-6)


def test_none_gradients_are_passed_on(toolbox, compiled) -> None:
    used, unused = toolbox.variable([1.0]), toolbox.variable([5.0])
    optimizer = wrap_optimizer(toolbox.sgd(1.0), RULE)

    def step(x):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(toolbox.tensor(used) * x))
        tensors = [toolbox.tensor(unused), toolbox.tensor(used)]
        gradients = tape.gradient(loss, tensors)
        return optimizer.apply_gradients(zip(gradients, [unused, used], strict=True))

    run = compiled(step)
    assert [bool(run(tf.constant(x))) for x in (0.25, NAN)] == [True, False]
    assert float(toolbox.tensor(used)[0]) == 0.75
    assert float(toolbox.tensor(unused)[0]) == 5.0


def test_a_static_scale_skips_or_applies_non_finite_gradients(toolbox) -> None:
    for skip, expected in ((True, 1.0), (False, NAN)):
        rule = StaticLossScale(8.0, skip_non_finite=skip)
        variable = toolbox.variable([1.0])
        optimizer = wrap_optimizer(toolbox.sgd(), rule)
        make_step(toolbox, optimizer, variable)(tf.constant(NAN))
        np.testing.assert_equal(float(toolbox.tensor(variable)[0]), expected)
        assert float(optimizer.loss_scale) == 8.0


def test_no_loss_scale_leaves_loss_and_gradients_alone(toolbox) -> None:
    variable = toolbox.variable([1.0])
    optimizer = wrap_optimizer(toolbox.sgd(1.0), NoLossScale())
    loss = tf.constant(3.0)
    assert optimizer.scale_loss(loss) is loss
    optimizer.apply_gradients([(tf.constant([0.25]), variable)])
    assert float(toolbox.tensor(variable)[0]) == 0.75
    assert optimizer.manager._state.eager() == {}


@pytest.mark.parametrize("scale", [1.0, 123.0, 2.0**15])
def test_the_backward_pass_sees_the_scale(toolbox, scale: float) -> None:
    """TensorFlow's gradient check: an identity whose gradient is inspected."""
    optimizer = wrap_optimizer(toolbox.sgd(), scale)
    seen = []

    @tf.custom_gradient
    def spy(x):
        def grad(upstream):
            seen.append(float(upstream))
            return upstream

        return tf.identity(x), grad

    variable = toolbox.variable(1.0)
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(spy(toolbox.tensor(variable)))
    tape.gradient(loss, [toolbox.tensor(variable)])
    assert seen == [scale]


def test_wrapping_twice_is_refused(toolbox) -> None:
    inner = toolbox.sgd()
    assert not is_wrapped(inner)
    optimizer = wrap_optimizer(inner)
    assert is_wrapped(optimizer)
    with pytest.raises(ValueError, match=r"scales the loss already.*Received"):
        wrap_optimizer(optimizer)
    refusal = "was wrapped before" if toolbox.family == "v1" else "scales the loss already"
    with pytest.raises(ValueError, match=rf"{refusal}.*Received"):
        wrap_optimizer(inner)


def in_place(toolbox, **kwargs):
    if toolbox.family == "v1":
        pytest.skip("v1 optimizers get a wrapper")
    plain = toolbox.sgd(1.0, **kwargs)
    return plain, wrap_optimizer(plain, StaticLossScale(8.0))


def test_it_stays_the_object_that_it_is(toolbox) -> None:
    own_class = type(toolbox.sgd())
    plain, optimizer = in_place(toolbox, momentum=0.5, name="plain")
    assert optimizer is plain
    assert isinstance(optimizer, own_class)
    assert type(optimizer).__name__ == own_class.__name__
    as_it_was = toolbox.sgd(1.0, momentum=0.5, name="plain").get_config()
    assert optimizer.inner_optimizer.get_config() == as_it_was


def test_the_inner_optimizer_is_the_same_without_a_scale(toolbox) -> None:
    variable = toolbox.variable([1.0, 2.0])
    _, optimizer = in_place(toolbox)
    make_step(toolbox, optimizer, variable)(tf.constant(0.25))
    optimizer.inner_optimizer.learning_rate = 2.0
    optimizer.inner_optimizer.apply_gradients([(tf.constant([0.25, 0.25]), variable)])
    assert toolbox.tensor(variable).numpy().tolist() == [0.25, 1.25]
    both = (optimizer.iterations, optimizer.inner_optimizer.iterations)
    assert [int(toolbox.tensor(one)) for one in both] == [2, 2]
    assert not hasattr(optimizer.inner_optimizer, "inner_optimizer")


def test_its_config_is_that_of_its_own_class(toolbox) -> None:
    own_class = type(toolbox.sgd())
    _, optimizer = in_place(toolbox, momentum=0.5, name="plain")
    as_it_was = toolbox.sgd(1.0, momentum=0.5, name="plain").get_config()
    assert optimizer.get_config() == as_it_was
    for maker in (optimizer, optimizer.__class__, own_class):
        again = maker.from_config(optimizer.get_config())
        assert type(again) is own_class
        assert again.get_config() == as_it_was


@pytest.mark.parametrize("copy", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_scales_by_a_scale_of_its_own(toolbox, copy) -> None:
    variable = toolbox.variable([1.0])
    plain = None if toolbox.family == "v1" else toolbox.sgd(1.0)
    try:
        copy(plain)
    except Exception as error:
        pytest.skip(f"nor can it be copied without a scale: {error!r}")
    _, optimizer = in_place(toolbox)
    again = copy(optimizer)
    assert again.manager is not optimizer.manager
    make_step(toolbox, again, variable)(tf.constant(0.25))
    assert float(toolbox.tensor(variable)[0]) == 0.75
    assert (again.manager.state().good_steps, optimizer.manager.state().good_steps) == (1, 0)


@pytest.mark.parametrize("thing", [None, "adam", object(), tf.Variable(1.0)])
def test_what_is_no_optimizer_is_refused(thing: object) -> None:
    with pytest.raises(TypeError, match=r"must be an optimizer.*Received"):
        wrap_optimizer(thing)


def test_one_manager_for_two_optimizers(toolbox, compiled) -> None:
    """torch's test of several: only one skips, and the scale moves once per window."""
    manager = LossScaleManager(RULE, window=2)
    a, b = toolbox.variable([1.0]), toolbox.variable([1.0])
    first = wrap_optimizer(toolbox.sgd(1.0), manager)
    second = wrap_optimizer(toolbox.sgd(1.0), manager)

    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            loss_a = first.scale_loss(tf.reduce_sum(toolbox.tensor(a)) * x)
            loss_b = second.scale_loss(tf.reduce_sum(toolbox.tensor(b)) * y)
        gradient_a = tape.gradient(loss_a, toolbox.tensor(a))
        gradient_b = tape.gradient(loss_b, toolbox.tensor(b))
        return (
            first.apply_gradients([(gradient_a, a)]),
            second.apply_gradients([(gradient_b, b)]),
        )

    run = compiled(step)
    outcomes, scales = [], []
    for x, y in ((0.5, 0.25), (0.5, 0.25), (0.5, NAN), (INF, 0.25)):
        outcomes.append(tuple(bool(flag) for flag in run(tf.constant(x), tf.constant(y))))
        scales.append(float(manager.scale))
    assert outcomes == [(True, True), (True, True), (True, False), (False, True)]
    assert scales == [4, 8, 4, 2]
    assert float(toolbox.tensor(a)[0]) == 1 - 3 * 0.5
    assert float(toolbox.tensor(b)[0]) == 1 - 3 * 0.25
    assert manager.state().skipped_steps == 2


def test_one_manager_each(toolbox) -> None:
    a, b = toolbox.variable([1.0]), toolbox.variable([1.0])
    first, second = wrap_optimizer(toolbox.sgd(), RULE), wrap_optimizer(toolbox.sgd(), RULE)
    make_step(toolbox, first, a)(tf.constant(NAN))
    make_step(toolbox, second, b)(tf.constant(1.0))
    assert float(first.loss_scale) == 2.0
    assert float(second.loss_scale) == 4.0
    assert float(toolbox.tensor(b)[0]) == 0.5


def test_gradients_summed_over_micro_batches_of_a_custom_loop(toolbox, compiled) -> None:
    """One scale for the window; a non-finite micro-batch drops all of it."""
    variable = toolbox.variable([1.0])
    optimizer = wrap_optimizer(toolbox.sgd(1.0), RULE)

    def window(xs):
        total = tf.zeros([1])
        for x in tf.unstack(xs):
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(tf.reduce_sum(toolbox.tensor(variable) * x) / 4)
            total += tape.gradient(loss, toolbox.tensor(variable))
        return optimizer.apply_gradients([(total, variable)])

    run = compiled(window)
    assert bool(run(tf.constant([1.0, 2.0, 3.0, 4.0])))
    assert float(toolbox.tensor(variable)[0]) == 1 - 10 / 4
    assert not bool(run(tf.constant([1.0, NAN, 3.0, 4.0])))
    assert float(toolbox.tensor(variable)[0]) == 1 - 10 / 4
    assert float(optimizer.loss_scale) == 2.0
