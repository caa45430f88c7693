"""A Wasserstein GAN with gradient penalty: two optimizers and a gradient inside a loss."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import tensorflow as tf

from tf_amp.loss_scale import DynamicLossScale, NoLossScale, wrap_optimizer

RNG = np.random.default_rng(0)
REAL = (RNG.normal(size=(64, 4)) * 0.5 + 1.0).astype(np.float32)
NOISE = RNG.normal(size=(40, 64, 3)).astype(np.float32)
STEPS = 40


def network(sizes: list[int], seed: int) -> list[keras.Variable]:
    rng = np.random.default_rng(seed)
    return [
        keras.Variable(rng.normal(size=shape).astype(np.float32) / shape[0] ** 0.5)
        for shape in itertools.pairwise(sizes)
    ]


def run(kernels: list[keras.Variable], x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    x = tf.cast(x, dtype)
    for i, kernel in enumerate(kernels):
        x = tf.matmul(x, tf.cast(kernel.value, dtype))
        x = tf.nn.tanh(x) if i + 1 < len(kernels) else x
    return tf.cast(x, tf.float32)


def train(dtype: tf.DType, rule) -> tuple[list[np.ndarray], list[float], list]:
    generator, critic = network([3, 8, 4], 1), network([4, 16, 1], 2)
    of_generator = wrap_optimizer(keras.optimizers.Adam(0.002), rule)
    of_critic = wrap_optimizer(keras.optimizers.Adam(0.002), rule)
    of_generator.build(generator)
    of_critic.build(critic)

    @tf.function
    def step(noise):
        real = tf.constant(REAL)
        fake = run(generator, noise, dtype)
        with tf.GradientTape() as tape:
            middle = 0.5 * (real + fake)
            with tf.GradientTape() as inner:
                inner.watch(middle)
                output = tf.reduce_sum(of_critic.manager.multiply(run(critic, middle, dtype)))
            # The inner gradient is scaled for float16 and unscaled before its norm is taken.
            (slope,) = of_critic.manager.unscale([inner.gradient(output, middle)])
            norm = tf.sqrt(tf.reduce_sum(slope**2, axis=1) + 1e-12)
            penalty = tf.reduce_mean((norm - 1.0) ** 2)
            loss = tf.reduce_mean(run(critic, fake, dtype) - run(critic, real, dtype))
            loss = loss + 10.0 * penalty
            scaled = of_critic.scale_loss(loss)
        gradients = tape.gradient(scaled, [kernel.value for kernel in critic])
        of_critic.apply(gradients, critic)
        with tf.GradientTape() as tape:
            generator_loss = -tf.reduce_mean(run(critic, run(generator, noise, dtype), dtype))
            scaled = of_generator.scale_loss(generator_loss)
        gradients = tape.gradient(scaled, [kernel.value for kernel in generator])
        of_generator.apply(gradients, generator)
        return loss

    losses = [float(step(tf.constant(noise))) for noise in NOISE[:STEPS]]
    weights = [kernel.numpy() for kernel in generator + critic]
    return weights, losses, [o.manager.state() for o in (of_generator, of_critic)]


def test_wgan_gp_stays_near_float32() -> None:
    rule = DynamicLossScale(initial=2.0**12, growth_interval=10)
    reference, reference_losses, _ = train(tf.float32, NoLossScale())
    ours, losses, states = train(tf.float16, rule)
    np.testing.assert_allclose(losses, reference_losses, rtol=0.05, atol=0.02)
    for a, b in zip(ours, reference, strict=True):
        np.testing.assert_allclose(a, b, atol=0.02)
    # The scale did not collapse, as it does when the penalty is taken of a scaled gradient.
    assert all(state.scale >= 2.0**10 for state in states)
    assert reference_losses[-1] < reference_losses[0]


def test_a_non_finite_critic_does_not_hold_back_the_generator() -> None:
    generator, critic = keras.Variable([1.0]), keras.Variable([1.0])
    of_generator = wrap_optimizer(keras.optimizers.SGD(0.5))
    of_critic = wrap_optimizer(keras.optimizers.SGD(0.5))
    for optimizer, variable, x in ((of_critic, critic, np.inf), (of_generator, generator, 1.0)):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(variable.value * x))
        optimizer.apply([tape.gradient(loss, variable.value)], [variable])
    assert (float(critic[0]), float(generator[0])) == (1.0, 0.5)
    assert (float(of_critic.loss_scale), float(of_generator.loss_scale)) == (2.0**14, 2.0**15)
