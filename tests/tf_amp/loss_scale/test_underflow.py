from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_amp.loss_scale import DynamicLossScale, NoLossScale, measure_underflow, wrap_optimizer


def by_numpy(values: np.ndarray, scale: float) -> int:
    """What the meter counts, by really casting to float16."""
    with np.errstate(over="ignore"):
        cast = (values.astype(np.float64) * scale).astype(np.float16)
    return int(np.sum((cast == 0) & (values != 0)))


@pytest.mark.parametrize("scale", [1.0, 8.0, 1000.0, 2.0**15])
def test_the_meter_counts_what_a_cast_to_float16_flushes(scale: float) -> None:
    rng = np.random.default_rng(0)
    values = (rng.normal(size=4000) * 10.0 ** rng.uniform(-14, 2, 4000)).astype(np.float32)
    values[:100] = 0
    # The tie, which rounds to zero, and its neighbours.
    values[100:103] = np.float32(2.0**-25) * np.array([1, 1 + 2**-20, 1 - 2**-20], np.float32)
    (report,) = measure_underflow([(tf.constant(values), "w")], scale)
    assert report.flushed == by_numpy(values, scale) > 0
    assert (report.name, report.elements, report.zero) == ("w", 4000, 100)
    assert report.share == report.flushed / 4000


def test_the_scale_needed_is_the_smallest_power_of_two_that_keeps_all() -> None:
    gradient = tf.constant([2.0**-30, 1.0, 0.0])
    (report,) = measure_underflow([(gradient, "w")])
    assert report.scale_needed == 2.0**6
    for factor, flushed in ((2.0**6, 0), (2.0**5, 1)):
        assert measure_underflow([(gradient, "w")], factor)[0].flushed == flushed


def test_sparse_empty_and_missing_gradients() -> None:
    sparse = tf.IndexedSlices(
        tf.constant([[1e-9], [1.0]]), tf.constant([0, 3]), tf.constant([9, 1])
    )
    reports = measure_underflow([(sparse, "s"), (None, "n"), (tf.zeros([0]), "e")])
    assert [(r.name, r.elements, r.flushed, r.share) for r in reports] == [
        ("s", 2, 1, 0.5),
        ("e", 0, 0, 0.0),
    ]
    assert reports[1].scale_needed is None


def test_the_optimizer_measures_at_its_scale() -> None:
    variable = keras.Variable([1.0, 1.0], name="kernel")
    optimizer = wrap_optimizer(keras.optimizers.SGD(), 2.0**10)
    (report,) = optimizer.measure_underflow([(tf.constant([1e-9, 1e-12]), variable)])
    assert (report.name, report.flushed) == ("kernel", 1)


def test_it_refuses_to_run_inside_a_function() -> None:
    with pytest.raises(RuntimeError, match="outside"):
        tf.function(lambda x: measure_underflow([(x, "w")]))(tf.constant([1.0]))


# --- The proof: a network whose float16 gradients vanish ---------------------------------------

DEPTH = 4
STEPS = 30
# So small a loss that its gradients vanish in float16; the learning rate makes up for it.
LOSS_WEIGHT = 1e-6
LEARNING_RATE = 2e6
RNG = np.random.default_rng(3)
INPUT = RNG.choice([-0.5, 0.25, 0.5, 1.0], size=(16, 4)).astype(np.float32)
START = [np.eye(4, dtype=np.float32) + 0.0625 * RNG.integers(-2, 3, (4, 4)) for _ in range(DEPTH)]


def train_deep_sigmoid(dtype: tf.DType, rule) -> list[np.ndarray]:
    kernels = [keras.Variable(kernel.astype(np.float32)) for kernel in START]
    optimizer = wrap_optimizer(keras.optimizers.SGD(LEARNING_RATE), rule)
    optimizer.build(kernels)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            x = tf.cast(INPUT, dtype)
            for kernel in kernels:
                x = tf.sigmoid(tf.matmul(x, tf.cast(kernel.value, dtype)))
            loss = tf.reduce_mean(tf.cast(x, tf.float32)) * LOSS_WEIGHT
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, [kernel.value for kernel in kernels])
        return optimizer.apply(gradients, kernels)

    for _ in range(STEPS):
        step()
    return [kernel.numpy() for kernel in kernels]


def test_a_network_whose_float16_gradients_vanish_learns_with_loss_scaling() -> None:
    """The final weights are those of float32; without a scale none ever moves."""
    rule = DynamicLossScale(initial=2.0**15, growth_interval=5)
    float32 = train_deep_sigmoid(tf.float32, NoLossScale())
    vanished = train_deep_sigmoid(tf.float16, NoLossScale())
    scaled = train_deep_sigmoid(tf.float16, rule)
    moved = [np.abs(a - b).max() for a, b in zip(float32, START, strict=True)]
    unmoved = [np.abs(a - b).max() for a, b in zip(vanished, START, strict=True)]
    assert min(moved) > 0.01
    assert unmoved == [0.0] * DEPTH
    off = [np.abs(a - b).max() for a, b in zip(scaled, float32, strict=True)]
    # The tolerance is a twentieth of the way the weights went.
    assert all(o < 0.05 * m for o, m in zip(off, moved, strict=True)), (off, moved)
