from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf

from tf_amp.loss_scale import DynamicLossScale, LossScaleManager, wrap_optimizer

v1 = tf.compat.v1
INF, NAN = float("inf"), float("nan")
RULE = DynamicLossScale(initial=4.0, growth_interval=2)
OPTIMIZERS = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: v1.train.AdamOptimizer(0.1),
    "rmsprop": lambda: v1.train.RMSPropOptimizer(0.1),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "ftrl": lambda: v1.train.FtrlOptimizer(0.1),
}


def train(optimizer, xs, *, resource=True):
    """Minimizes sum(x * v) in a graph of its own; returns what is left at the end."""
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [])
        variable = v1.get_variable("v", initializer=[1.0, 2.0], use_resource=resource)
        step = v1.train.get_or_create_global_step()
        train_op = optimizer.minimize(tf.reduce_sum(variable * x), global_step=step)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for value in xs:
                session.run(train_op, {x: value})
            manager = getattr(optimizer, "manager", None)
            state = manager.state(session) if manager else None
            return session.run(variable), int(session.run(step)), state, train_op


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_steps_leave_no_trace(name: str) -> None:
    ours, step, state, _ = train(
        wrap_optimizer(OPTIMIZERS[name](), RULE), [1.0, NAN, 2.0, INF, -INF, 0.5]
    )
    plain, plain_step, _, _ = train(OPTIMIZERS[name](), [1.0, 2.0, 0.5])
    np.testing.assert_allclose(ours, plain, rtol=1e-5)
    assert step == plain_step == 3
    assert (state.skipped_steps, state.skipped_in_a_row, state.scale) == (3, 0, 1.0)


@pytest.mark.parametrize(
    "switches",
    ["tf.disable_v2_behavior()", "tf.disable_eager_execution(); tf.disable_resource_variables()"],
)
def test_reference_variables(run_forked, switches: str) -> None:
    """They are updated by old control flow and where a `tf.cond` would make functions."""
    done = run_forked(
        f"""
        import tensorflow.compat.v1 as tf
        {switches}
        from tf_amp.loss_scale import DynamicLossScale, wrap_optimizer
        x = tf.placeholder(tf.float32, [])
        v = tf.Variable([1.0, 2.0])
        assert v.dtype._is_ref_dtype
        step = tf.train.get_or_create_global_step()
        optimizer = wrap_optimizer(
            tf.train.MomentumOptimizer(0.5, 0.9), DynamicLossScale(initial=4.0, growth_interval=2)
        )
        op = optimizer.minimize(tf.reduce_sum(v * x), global_step=step)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            scales = []
            for value in (1.0, float("nan"), 1.0, 1.0):
                session.run(op, {{x: value}})
                scales.append(float(session.run(optimizer.loss_scale)))
            print(scales, session.run(step), [round(float(x), 3) for x in session.run(v)])
        print(tf.control_flow_v2_enabled())
        """
    )
    expected = ["[4.0, 2.0, 2.0, 4.0] 3 [-1.805, -0.805]", str("eager" in switches)]
    assert done.stdout.splitlines()[:2] == expected


def test_the_train_op_is_an_operation_and_the_only_one_collected() -> None:
    optimizer = wrap_optimizer(v1.train.AdamOptimizer(), RULE)
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=1.0)
        train_op = optimizer.minimize(variable, name="train_me")
        assert isinstance(train_op, tf.Operation)
        assert train_op.name == "train_me"
        assert v1.get_collection(v1.GraphKeys.TRAIN_OP) == [train_op]


def test_whether_a_step_was_applied_can_be_fetched() -> None:
    optimizer = wrap_optimizer(v1.train.GradientDescentOptimizer(0.1), RULE)
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [])
        variable = v1.get_variable("v", initializer=1.0)
        train_op = optimizer.minimize(variable * x)
        session.run(v1.global_variables_initializer())
        fetched = [session.run([train_op, optimizer.applied], {x: value})[1] for value in (1, NAN)]
    assert fetched == [True, False]


def test_compute_clip_apply() -> None:
    """What comes out of compute_gradients is unscaled, so that it can be clipped."""
    optimizer = wrap_optimizer(v1.train.GradientDescentOptimizer(1.0), RULE)
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("v", initializer=[0.0, 0.0])
        loss = tf.reduce_sum(variable * [30.0, 40.0])
        pairs = optimizer.compute_gradients(loss)
        clipped, norm = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 1.0)
        train_op = optimizer.apply_gradients(zip(clipped, [variable], strict=True))
        session.run(v1.global_variables_initializer())
        assert session.run(norm) == pytest.approx(50.0)
        session.run(train_op)
        np.testing.assert_allclose(session.run(variable), [-0.6, -0.8], rtol=1e-6)


def test_a_gradient_taken_by_hand_of_a_scaled_loss() -> None:
    optimizer = wrap_optimizer(v1.train.GradientDescentOptimizer(1.0), RULE)
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("v", initializer=1.0)
        gradients = tf.gradients(optimizer.scale_loss(variable * 0.25), [variable])
        train_op = optimizer.apply_gradients(zip(gradients, [variable], strict=True))
        session.run(v1.global_variables_initializer())
        session.run(train_op)
        assert session.run(variable) == 0.75


def test_gradients_of_two_losses_are_computed_before_either_is_applied() -> None:
    optimizer = wrap_optimizer(v1.train.GradientDescentOptimizer(1.0), RULE)
    with tf.Graph().as_default(), v1.Session() as session:
        variables = [v1.get_variable(name, initializer=1.0) for name in "ab"]
        pairs = [optimizer.compute_gradients(v * 0.25, [v]) for v in variables]
        train_ops = [optimizer.apply_gradients(one) for one in pairs]
        session.run(v1.global_variables_initializer())
        session.run(train_ops)
        assert session.run(variables) == [0.75, 0.75]


def test_the_loss_is_multiplied_and_gradients_divided_by_what_one_op_read() -> None:
    """Two reads may differ: another step of the session moves the scale in between."""
    optimizer = wrap_optimizer(v1.train.GradientDescentOptimizer(1.0), RULE)
    with tf.Graph().as_default() as graph:
        variables = [v1.get_variable(name, initializer=1.0) for name in "ab"]
        optimizer.compute_gradients(variables[0] * variables[1])
        divisions = [op for op in graph.get_operations() if op.type == "DivNoNan"]
        (scale,) = {op.inputs[1].ref() for op in divisions}
        assert {op.type for op in scale.deref().consumers()} == {"DivNoNan", "Mul"}


def test_a_finite_step_of_the_same_run_does_not_set_the_scale_back() -> None:
    """What it read of the state is what the skipped one read, and it may write last."""

    def wait(value: np.ndarray) -> np.ndarray:
        time.sleep(0.5)
        return value

    @tf.custom_gradient
    def late(x: tf.Tensor):
        return x, lambda gradient: tf.numpy_function(wait, [gradient], tf.float32)

    optimizer = wrap_optimizer(v1.train.GradientDescentOptimizer(0.1), RULE)
    with tf.Graph().as_default(), v1.Session() as session:
        a, b = (v1.get_variable(name, initializer=1.0) for name in "ab")
        late_step = optimizer.minimize(late(b), var_list=[b])
        skipped_step = optimizer.minimize(a * NAN, var_list=[a])
        session.run(v1.global_variables_initializer())
        session.run([skipped_step, late_step])
        state = optimizer.manager.state(session)
        assert (state.scale, state.skipped_steps) == (2.0, 1)
        np.testing.assert_allclose(session.run([a, b]), [1.0, 0.9], rtol=1e-6)


def test_a_step_counted_by_a_reference_variable() -> None:
    optimizer = wrap_optimizer(v1.train.GradientDescentOptimizer(0.1), RULE)
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [])
        variable = v1.get_variable("v", initializer=1.0, use_resource=True)
        step = v1.get_variable("step", initializer=0, trainable=False, use_resource=False)
        train_op = optimizer.minimize(variable * x, global_step=step)
        session.run(v1.global_variables_initializer())
        for value in (1.0, NAN, 1.0):
            session.run(train_op, {x: value})
        assert session.run(step) == 2


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_script_that_does_not_initialize_the_scale(by_name: bool, window: int) -> None:
    manager = LossScaleManager(RULE, window=window)
    optimizer = wrap_optimizer(v1.train.GradientDescentOptimizer(0.1), manager)
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [])
        variable = v1.get_variable("v", initializer=[1.0, 2.0])
        if not by_name:
            session.run(v1.global_variables_initializer())
        train_op = optimizer.minimize(tf.reduce_sum(variable * x))
        if by_name:
            session.run(v1.variables_initializer([variable]))
        assert manager.state(session) == RULE.initial_state()
        assert session.run(manager.scale) == 4.0
        states = []
        for value in (1.0, INF, 1.0, 1.0):
            for _ in range(window):
                session.run(train_op, {x: value})
            state = manager.state(session)
            states.append((state.scale, state.good_steps, state.skipped_steps))
        moved = 0.3 * window
        np.testing.assert_allclose(session.run(variable), [1 - moved, 2 - moved], rtol=1e-6)
    assert states == [(4.0, 1, 0), (2.0, 0, 1), (2.0, 1, 1), (4.0, 0, 1)]


def test_the_gradient_of_a_half_loss_may_be_given() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("v", initializer=tf.constant([1.0, 2.0], tf.float16))
        optimizer = wrap_optimizer(v1.train.GradientDescentOptimizer(0.5), RULE)
        gradient = tf.constant([2.0, 4.0], tf.float16)
        train_op = optimizer.minimize(3 * variable, grad_loss=gradient)
        session.run(v1.global_variables_initializer())
        session.run(train_op)
        np.testing.assert_array_equal(session.run(variable), [-2.0, -4.0])


def test_what_is_no_variable_is_refused_by_the_optimizer() -> None:
    optimizer = wrap_optimizer(v1.train.GradientDescentOptimizer(0.1), RULE)
    x = tf.constant(1.0)
    with pytest.raises(NotImplementedError, match="Trying to update a Tensor"):
        optimizer.apply_gradients(optimizer.compute_gradients(lambda: x * x, [x]))


def test_one_optimizer_in_two_graphs() -> None:
    """The state is created in the graph that trains, as an Estimator's model_fn needs it."""
    optimizer = wrap_optimizer(v1.train.GradientDescentOptimizer(0.1), RULE)
    first = train(optimizer, [NAN, NAN])
    second = train(optimizer, [1.0, NAN])
    assert (first[2].scale, first[2].skipped_steps) == (1.0, 2)
    assert (second[2].scale, second[2].skipped_steps) == (2.0, 1)


def test_slots_and_attributes_pass_through() -> None:
    inner = v1.train.MomentumOptimizer(0.5, 0.9)
    optimizer = wrap_optimizer(inner, RULE)
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=1.0)
        optimizer.minimize(variable)
        assert optimizer.get_slot_names() == ["momentum"]
        assert optimizer.get_slot(variable, "momentum") is inner.get_slot(variable, "momentum")
        names = {v.op.name for v in optimizer.variables()}
        assert {"v/Momentum", "loss_scale/scale"} <= names
    assert optimizer._learning_rate == 0.5
    assert optimizer.get_name() == "Momentum"
    with pytest.raises(AttributeError):
        _ = optimizer.nothing_of_this_name


def test_reading_the_state_of_a_graph_needs_its_session() -> None:
    manager = LossScaleManager(RULE)
    with tf.Graph().as_default(), pytest.raises(ValueError, match=r"state\(session\)"):
        manager.state()


def test_variable_names_do_not_depend_on_the_name_scope() -> None:
    with tf.Graph().as_default(), v1.name_scope("somewhere"):
        names = [v.op.name for v in LossScaleManager(RULE).variables]
    assert names == [
        f"loss_scale/{field}"
        for field in ("scale", "good_steps", "skipped_steps", "skipped_in_a_row")
    ]
