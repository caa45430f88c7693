from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_amp.loss_scale import (
    DynamicLossScale,
    LossScaleAtFloorError,
    LossScaleManager,
    NoLossScale,
    wrap_optimizer,
)
from tf_amp.loss_scale.keras_optimizer import calls_of

NAN = float("nan")
RULE = DynamicLossScale(initial=2.0**10, growth_interval=3)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 8)).astype(np.float32)
Y = (X @ RNG.normal(size=(8, 1))).astype(np.float32)


def make_model(seed: int = 1) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
    )


def weights_after(optimizer: keras.optimizers.Optimizer, x: np.ndarray = X, **compile_options):
    model = make_model()
    model.compile(optimizer, "mse", **compile_options)
    history = model.fit(x, Y, batch_size=16, epochs=3, verbose=0, shuffle=False)
    return model.get_weights(), history.history["loss"], model


def number(value: object) -> float:
    """Of a variable too: those of the oldest Keras are no numbers to Python."""
    return keras.ops.convert_to_numpy(value).item()


def assert_close(ours, theirs) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)


# --- Keras's own tests of its LossScaleOptimizer, by their names -----------------------------


def keras_case(initial_scale=100.0, growth=2000):
    optimizer = wrap_optimizer(
        keras.optimizers.SGD(learning_rate=0.5),
        DynamicLossScale(initial=initial_scale, growth_interval=growth, floor=2.0**-20),
    )
    # The gradients of these tests are those of a scaled loss.
    optimizer.scale_loss(tf.constant(1.0))
    return optimizer


def test_keras_apply_with_no_vars() -> None:
    optimizer = keras_case()
    variables = [keras.Variable([1.0, 2.0, 3.0, 4.0])]
    optimizer.build(variables)
    optimizer.apply([tf.constant([1.0, 6.0, 7.0, 2.0]) * 100.0])
    np.testing.assert_allclose(variables[0], [0.5, -1.0, -0.5, 3.0], rtol=1e-6)


def test_keras_finite_step() -> None:
    optimizer = keras_case()
    variables = [keras.Variable([1.0, 2.0, 3.0, 4.0])]
    assert bool(optimizer.apply([tf.constant([1.0, 6.0, 7.0, 2.0]) * 100.0], variables))
    np.testing.assert_allclose(variables[0], [0.5, -1.0, -0.5, 3.0], rtol=1e-6)


def test_keras_finite_step_with_inner_loss_scale() -> None:
    inner = keras.optimizers.SGD(learning_rate=0.5, loss_scale_factor=10.0)
    optimizer = wrap_optimizer(inner, 100.0)
    scaled = optimizer.scale_loss(tf.constant([1.0, 6.0, 7.0, 2.0]))
    variables = [keras.Variable([1.0, 2.0, 3.0, 4.0])]
    optimizer.apply([scaled], variables)
    np.testing.assert_allclose(variables[0], [0.5, -1.0, -0.5, 3.0], rtol=1e-6)


def test_keras_infinite_step() -> None:
    optimizer = keras_case()
    variables = [keras.Variable([1.0, 2.0, 3.0, 4.0])]
    assert not bool(optimizer.apply([tf.constant([np.inf] * 4)], variables))
    np.testing.assert_array_equal(variables[0], [1.0, 2.0, 3.0, 4.0])


def test_keras_finite_step_with_overwrite() -> None:
    """A variable marked so takes its gradient as its value, and that is not unscaled."""
    optimizer = keras_case()
    marked = keras.Variable([1.0, 2.0, 3.0, 4.0])
    marked.overwrite_with_gradient = True
    plain = keras.Variable([1.0, 1.0])
    gradients = [tf.constant([1.0, 6.0, 7.0, 2.0]), tf.constant([100.0, 200.0])]
    optimizer.apply(gradients, [marked, plain])
    np.testing.assert_array_equal(marked, [1.0, 6.0, 7.0, 2.0])
    np.testing.assert_allclose(plain, [0.5, 0.0])


def test_keras_downscaling() -> None:
    optimizer = keras_case(initial_scale=400.0)
    variables = [keras.Variable([1.0, 2.0, 3.0, 4.0])]
    for _ in range(4):
        optimizer.apply([tf.constant([np.inf] * 4)], variables)
    assert float(optimizer.scale_loss(1.0)) == 25.0


def test_keras_upscaling() -> None:
    optimizer = keras_case(initial_scale=2.0, growth=2)
    variables = [keras.Variable([1.0, 2.0, 3.0, 4.0])]
    for _ in range(8):
        optimizer.apply([tf.constant([1.0] * 4)], variables)
    assert float(optimizer.scale_loss(1.0)) == 32.0


def test_keras_iterations_update() -> None:
    optimizer = keras_case()
    variables = [keras.Variable([1.0])]
    optimizer.build(variables)
    assert number(optimizer.iterations) == number(optimizer.inner_optimizer.iterations) == 0
    optimizer.apply([tf.constant([1.0])], variables)
    assert number(optimizer.iterations) == number(optimizer.inner_optimizer.iterations) == 1


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32"])
def test_keras_adds_loss_scaling_optimizer(policy: str) -> None:
    """`compile` adds one for mixed_float16, but not around ours."""
    model = make_model()
    model.dtype_policy = keras.DTypePolicy(policy)
    optimizer = wrap_optimizer(keras.optimizers.SGD())
    model.compile(optimizer, "mse")
    assert model.optimizer is optimizer
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def test_attributes_are_those_of_the_wrapped_optimizer() -> None:
    optimizer = wrap_optimizer(keras.optimizers.Adam(0.1, beta_1=0.5))
    assert (optimizer.beta_1, optimizer.epsilon) == (0.5, 1e-7)
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = optimizer.nothing_of_this_name


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)
@pytest.mark.parametrize("callback", ["LearningRateScheduler", "ReduceLROnPlateau"])
def test_callbacks_find_the_optimizers_of_a_multi_optimizer(callback: str) -> None:
    inner = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)]
    by_name = keras.optimizers.OptimizerMap(inner[0], {".*kernel": inner[1]})
    optimizer = wrap_optimizer(keras.optimizers.MultiOptimizer(by_name))
    model = make_model()
    model.compile(optimizer, "mse", jit_compile=False)
    arguments = {
        "LearningRateScheduler": (lambda epoch, rate: rate / 2,),
        "ReduceLROnPlateau": ("loss", 0.5, 0),
    }[callback]
    made = getattr(keras.callbacks, callback)(*arguments)
    model.fit(X, Y * 0 if callback == "ReduceLROnPlateau" else Y, verbose=0, callbacks=[made])
    expected = 0.05 if callback == "LearningRateScheduler" else 0.1
    assert [float(one.learning_rate) for one in inner] == pytest.approx([expected] * 2)
    assert optimizer.manager.state().good_steps == 2


# --- Settings mean what they mean in float32 -------------------------------------------------

SETTINGS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, clipvalue=0.01),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.05),
    "ema": lambda: keras.optimizers.SGD(
        0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    ),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
}


@pytest.mark.parametrize(
    ("setting", "jit_compile"),
    [*((name, False) for name in SETTINGS), ("clipnorm", True), ("accumulation", True)],
)
def test_fit_ends_where_float32_ends(setting: str, jit_compile: bool) -> None:
    plain, plain_losses, _ = weights_after(SETTINGS[setting](), jit_compile=jit_compile)
    ours, our_losses, model = weights_after(
        wrap_optimizer(SETTINGS[setting](), RULE), jit_compile=jit_compile
    )
    assert_close(ours, plain)
    # The logged loss is never the scaled one.
    np.testing.assert_allclose(our_losses, plain_losses, rtol=1e-4)
    assert float(model.optimizer.loss_scale) > 2.0**10


def test_clipping_happens_after_unscaling() -> None:
    """Clipped at scale 2^10 first, the update would be 2^10 times too small."""
    variable = keras.Variable([0.0, 0.0])
    optimizer = wrap_optimizer(keras.optimizers.SGD(1.0, clipnorm=1.0), RULE)
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(tf.reduce_sum(variable.value * [30.0, 40.0]))
    gradient = tape.gradient(loss, variable.value)
    optimizer.apply([gradient], [variable])
    np.testing.assert_allclose(variable, [-0.6, -0.8], rtol=1e-6)


def test_learning_rate_and_settings_pass_through() -> None:
    inner = keras.optimizers.Adam(0.5, clipnorm=2.0, weight_decay=0.1)
    optimizer = wrap_optimizer(inner)
    assert number(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.25
    assert number(inner.learning_rate) == 0.25
    assert (optimizer.clipnorm, optimizer.weight_decay, optimizer.use_ema) == (2.0, 0.1, False)
    optimizer.clipnorm = 1.0
    assert inner.clipnorm == 1.0
    optimizer.build([keras.Variable([1.0])])
    assert [v.path for v in optimizer.variables] == [v.path for v in inner.variables]


def test_learning_rate_scheduler_callback() -> None:
    model = make_model()
    inner = keras.optimizers.SGD(0.1)
    model.compile(wrap_optimizer(inner), "mse")
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    model.fit(X, Y, epochs=4, verbose=0, callbacks=[scheduler])
    assert number(inner.learning_rate) == pytest.approx(0.025)


def test_a_skipped_step_keeps_the_moving_average_and_weight_decay_still() -> None:
    variable = keras.Variable([1.0, 2.0])
    inner = keras.optimizers.AdamW(0.1, weight_decay=0.5, use_ema=True, ema_momentum=0.5)
    optimizer = wrap_optimizer(inner, RULE)
    for gradient in (1.0, NAN):
        before = [np.array(v.numpy()) for v in [variable, *inner.variables]]
        optimizer.scale_loss(tf.constant(1.0))
        optimizer.apply([tf.constant([gradient] * 2) * 2.0**10], [variable])
        after = [np.array(v.numpy()) for v in [variable, *inner.variables]]
        same = all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        assert same is bool(np.isnan(gradient))


# --- Built-in gradient accumulation -----------------------------------------------------------


def accumulate(gradients: list[float], steps: int = 4):
    variable = keras.Variable([1.0])
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=steps)
    optimizer = wrap_optimizer(inner, DynamicLossScale(initial=8.0, growth_interval=2))
    optimizer.build([variable])

    @tf.function
    def micro_step(x):
        gradient = optimizer.scale_loss(tf.reshape(x, [1]))
        return optimizer.apply([gradient], [variable])

    trace = []
    for gradient in gradients:
        applied = bool(micro_step(tf.constant(gradient)))
        trace.append((applied, float(variable[0]), float(optimizer.loss_scale)))
    return trace, inner, optimizer


def test_a_window_without_overflow_equals_one_large_batch() -> None:
    trace, inner, _ = accumulate([1.0, 2.0, 3.0, 6.0])
    assert trace[-1] == (True, 1.0 - 3.0, 8.0)
    assert number(calls_of(inner)) == 4


def test_an_overflow_in_micro_step_2_of_4_drops_the_window() -> None:
    trace, inner, optimizer = accumulate([1.0, NAN, 3.0, 4.0, 1.0, 2.0, 3.0, 6.0])
    # One scale for the window, which moves at its end.
    assert [scale for _, _, scale in trace] == [8, 8, 8, 4, 4, 4, 4, 4]
    assert [applied for applied, _, _ in trace[:4]] == [True, False, False, False]
    assert trace[3][1] == 1.0
    assert trace[-1] == (True, 1.0 - 3.0, 4.0)
    assert number(calls_of(inner)) == 4
    assert optimizer.manager.state().skipped_steps == 1


def test_a_manager_must_have_the_window_of_the_accumulation() -> None:
    inner = keras.optimizers.SGD(gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match=r"window=2.*Make the manager with window=4"):
        wrap_optimizer(inner, LossScaleManager(window=2))


# --- Custom steps -----------------------------------------------------------------------------


class Keras2Step(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.optimizer.get_scaled_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        gradients = self.optimizer.get_unscaled_gradients(gradients)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class Keras3Step(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Float32Step(keras.Model):
    """A step that knows nothing of loss scales."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@functools.cache  # in float32 it is one for all kinds
def trained_by_own_step(kind: type, jit_compile: bool, wrap: bool):
    base = make_model()
    model = kind(base.inputs, base.outputs)
    optimizer = keras.optimizers.Adam(0.01)
    model.compile(
        wrap_optimizer(optimizer, RULE) if wrap else optimizer, "mse", jit_compile=jit_compile
    )
    losses = model.fit(X, Y, batch_size=16, epochs=3, verbose=0, shuffle=False)
    return model.get_weights(), losses.history["loss"]


@pytest.mark.parametrize("kind", [Keras2Step, Keras3Step, Float32Step])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_train_step_overrides_end_where_float32_ends(
    kind: type, jit_compile: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ours, our_losses = trained_by_own_step(kind, jit_compile, wrap=True)
    theirs, their_losses = trained_by_own_step(Float32Step, jit_compile, wrap=False)
    assert_close(ours, theirs)
    np.testing.assert_allclose(our_losses, their_losses, rtol=1e-4)
    told = sum("scale_loss() never was" in message for message in caplog.messages)
    assert told == (1 if kind is Float32Step else 0)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_fit_skips_a_batch_that_is_not_finite(jit_compile: bool) -> None:
    x = X.copy()
    x[20] = NAN  # in the second batch of each epoch
    ours, _, model = weights_after(
        wrap_optimizer(keras.optimizers.Adam(0.01), RULE), x, jit_compile=jit_compile
    )
    assert all(np.isfinite(w).all() for w in ours)
    assert model.optimizer.manager.state().skipped_steps == 3
    assert number(model.optimizer.iterations) == 9


def test_at_floor_raise_stops_fit_under_xla() -> None:
    rule = DynamicLossScale(at_floor="raise", floor_patience=20)
    with pytest.raises(LossScaleAtFloorError, match=r"the gradient of .*kernel has NaN"):
        model = make_model()
        model.compile(wrap_optimizer(keras.optimizers.SGD(), rule), "mse", jit_compile=True)
        model.fit(np.full_like(X, NAN), Y, batch_size=2, epochs=1, verbose=0)


def test_no_loss_scale_in_fit() -> None:
    ours, _, _ = weights_after(wrap_optimizer(keras.optimizers.SGD(0.05), NoLossScale()))
    plain, _, _ = weights_after(keras.optimizers.SGD(0.05))
    assert_close(ours, plain)


def test_the_wrong_horovod_order_is_refused() -> None:
    """Horovod makes a subclass of the optimizer's class and calls its from_config."""
    optimizer = wrap_optimizer(keras.optimizers.SGD())
    distributed = type(
        "DistributedOptimizer", (optimizer.__class__,), {"__module__": "horovod.keras"}
    )
    with pytest.raises(ValueError, match=r"other way round.*wrap_optimizer"):
        distributed.from_config(optimizer.get_config())
