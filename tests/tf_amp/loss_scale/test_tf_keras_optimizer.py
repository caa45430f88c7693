from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tf_amp.loss_scale import DynamicLossScale, LossScaleManager, wrap_optimizer
from tf_amp.loss_scale.in_place import LoopScaling, Scaling
from tf_amp.loss_scale.wrapping import scale_in_place

NAN = float("nan")
RULE = DynamicLossScale(initial=2.0**10, growth_interval=3)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 8)).astype(np.float32)
Y = (X @ RNG.normal(size=(8, 1))).astype(np.float32)

SETTINGS = {
    "sgd": lambda o: o.SGD(0.05, momentum=0.9),
    "adam": lambda o: o.Adam(0.01),
    "clipnorm": lambda o: o.SGD(0.5, clipnorm=0.05),
    "clipvalue": lambda o: o.SGD(0.5, clipvalue=0.01),
    "global_clipnorm": lambda o: o.SGD(0.5, global_clipnorm=0.05),
    "schedule": lambda o: o.SGD(tf_keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
}
NEW_SETTINGS = {
    "adamw": lambda o: o.AdamW(0.01, weight_decay=0.1),
    "ema": lambda o: o.SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
}
CASES = [
    *(("new", name) for name in [*SETTINGS, *NEW_SETTINGS]),
    *(("legacy", name) for name in SETTINGS),
]


def make_optimizer(kind: str, setting: str):
    module = tf_keras.optimizers if kind == "new" else tf_keras.optimizers.legacy
    return {**SETTINGS, **NEW_SETTINGS}[setting](module)


def fit(optimizer, x=X, **options):
    tf_keras.utils.set_random_seed(1)
    model = tf_keras.Sequential(
        [tf_keras.layers.Input((8,)), tf_keras.layers.Dense(16, "relu"), tf_keras.layers.Dense(1)]
    )
    model.compile(optimizer, "mse", **options)
    history = model.fit(x, Y, batch_size=16, epochs=3, verbose=0, shuffle=False)
    return model, history.history["loss"]


@pytest.mark.parametrize(("kind", "setting"), CASES)
def test_fit_ends_where_float32_ends(kind: str, setting: str) -> None:
    plain, plain_losses = fit(make_optimizer(kind, setting))
    ours, our_losses = fit(wrap_optimizer(make_optimizer(kind, setting), RULE))
    for a, b in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)
    np.testing.assert_allclose(our_losses, plain_losses, rtol=1e-4)
    assert float(ours.optimizer.loss_scale) > 2.0**10


class Clipping(tf_keras.optimizers.SGD):
    """Clips where gradients are computed."""

    def compute_gradients(self, *args, **kwargs):
        pairs = super().compute_gradients(*args, **kwargs)
        return [(tf.clip_by_norm(gradient, 0.05), variable) for gradient, variable in pairs]


class LegacyClipping(tf_keras.optimizers.legacy.SGD):
    """As `Clipping`."""

    def _compute_gradients(self, *args, **kwargs):
        pairs = super()._compute_gradients(*args, **kwargs)
        return [(tf.clip_by_norm(gradient, 0.05), variable) for gradient, variable in pairs]


class LegacyInnerClipping(tf_keras.optimizers.legacy.SGD):
    """As `Clipping`, in what that method calls."""

    def _get_gradients(self, *args, **kwargs):
        pairs = super()._get_gradients(*args, **kwargs)
        return [(tf.clip_by_norm(gradient, 0.05), variable) for gradient, variable in pairs]


@pytest.mark.parametrize("own_class", [Clipping, LegacyClipping, LegacyInnerClipping])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_class_that_clips_what_it_computes_clips_unscaled(own_class, by_hand: bool) -> None:
    plain, _ = fit(own_class(0.5))
    optimizer = own_class(0.5)
    manager = LossScaleManager(RULE)
    scaling = (LoopScaling if by_hand else Scaling)(manager, horovod=False)
    scaled: list[bool] = []
    scaling.announce = lambda: scaled.append(True)
    scale_in_place(optimizer, scaling)
    ours, _ = fit(optimizer)
    for a, b in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)
    assert manager.state().scale > 2.0**10
    assert scaled or by_hand


@pytest.mark.parametrize("kind", ["new", "legacy"])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_fit_skips_a_batch_that_is_not_finite(kind: str, jit_compile: bool) -> None:
    x = X.copy()
    x[20] = NAN
    model, _ = fit(wrap_optimizer(make_optimizer(kind, "adam"), RULE), x, jit_compile=jit_compile)
    assert all(np.isfinite(w).all() for w in model.get_weights())
    assert model.optimizer.manager.state().skipped_steps == 3
    assert int(model.optimizer.iterations) == 9


@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_compile_does_not_wrap_again_for_mixed_float16(kind: str) -> None:
    optimizer = wrap_optimizer(make_optimizer(kind, "sgd"))
    policy = tf_keras.mixed_precision.global_policy()
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(8,))])
        model.compile(optimizer, "mse")
    finally:
        tf_keras.mixed_precision.set_global_policy(policy)
    assert model.optimizer is optimizer
    assert isinstance(optimizer, tf_keras.mixed_precision.LossScaleOptimizer)


@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_a_file_names_the_optimizer_as_without_a_scale(kind: str) -> None:
    plain = make_optimizer(kind, "adam")
    expected = tf_keras.optimizers.serialize(plain)
    assert tf_keras.optimizers.serialize(wrap_optimizer(plain)) == expected


@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_learning_rate_passes_through(kind: str) -> None:
    inner = make_optimizer(kind, "adam")
    optimizer = wrap_optimizer(inner)
    assert float(optimizer.learning_rate) == pytest.approx(0.01)
    optimizer.learning_rate = 0.25
    assert float(inner.learning_rate) == float(optimizer.lr) == 0.25
    model, _ = fit(optimizer)
    scheduler = tf_keras.callbacks.LearningRateScheduler(lambda epoch: 0.5)
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[scheduler])
    assert float(inner.learning_rate) == 0.5


@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_minimize_in_an_eager_loop(kind: str) -> None:
    variable = tf.Variable(2.0)
    module = tf_keras.optimizers if kind == "new" else tf_keras.optimizers.legacy
    optimizer = wrap_optimizer(module.SGD(0.25), RULE)
    for _ in range(2):
        optimizer.minimize(lambda: variable**2, [variable])
    assert float(variable) == 0.5


@pytest.mark.parametrize("given", ["tensor", "callable", "result"])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_minimize_of_what_the_loop_scaled_scales_once(kind: str, graph: bool, given: str) -> None:
    weight = tf.Variable(2.0)
    module = tf_keras.optimizers if kind == "new" else tf_keras.optimizers.legacy
    optimizer = wrap_optimizer(module.SGD(0.25), RULE)

    def step() -> None:
        if given == "callable":
            optimizer.minimize(optimizer.scale_loss(lambda: weight**2), [weight])
        elif given == "result":
            optimizer.minimize(lambda: optimizer.scale_loss(weight**2), [weight])
        else:
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(weight**2)
            optimizer.minimize(scaled, [weight], tape=tape)

    run = tf.function(step) if graph else step
    for _ in range(2):
        run()
    assert float(weight) == 0.5


@pytest.mark.parametrize("persistent", [False, True])
def test_minimize_inside_the_block_of_its_tape(persistent: bool) -> None:
    weight = tf.Variable([1.0, 2.0])
    optimizer = wrap_optimizer(tf_keras.optimizers.SGD(0.5), RULE)
    with tf.GradientTape(persistent=persistent) as tape:
        optimizer.minimize(tf.reduce_sum(weight**2) / 2, [weight], tape=tape)
    np.testing.assert_allclose(weight.numpy(), [0.5, 1.0])


def test_tensorflow_get_gradients_are_unscaled() -> None:
    """TensorFlow's test of `get_gradients`, in a graph as it needs one."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.Variable(2.0)
        optimizer = wrap_optimizer(tf_keras.optimizers.legacy.SGD(1.0), 123.0)
        (gradient,) = optimizer.get_gradients(variable * 10.0, [variable])
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(gradient) == pytest.approx(10.0)
