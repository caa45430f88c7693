"""Programs that train in float16, or seem to; imported inside the subprocess of their tests.

Each is one function of one name: of which of them it was said that nothing scales the loss is
asked at the end.
"""

from __future__ import annotations

import keras
import tensorflow as tf
import tf_keras

import tf_amp
from tf_amp.loss_scale import LossScaleManager, NoLossScale, StaticLossScale, wrap_optimizer

X = tf.random.stateless_normal([16, 8], seed=(1, 1))
Y = X[:, :4]
RATE = 0.01


def weights(*shape: int) -> tf.Variable:
    return tf.Variable(tf.random.stateless_normal(shape, seed=(2, 2)) / 4)


W, V, B = weights(8, 16), weights(16, 4), tf.Variable(tf.zeros([16]))
VARIABLES = [W, B, V]


def predict(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.relu(x @ W + B) @ V


def loss_of(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(predict(x) - y))


def gradients(x: tf.Tensor, y: tf.Tensor, factor: object = None) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        loss = loss_of(x, y)
        if factor is not None:
            loss *= factor
    return tape.gradient(loss, VARIABLES)


def descend(found: list[tf.Tensor]) -> None:
    for variable, gradient in zip(VARIABLES, found, strict=True):
        variable.assign_sub(RATE * gradient)


def run(function, *args) -> None:
    """Runs a step, as a `tf.function` of its name."""
    tf.function(function)(*(args or (X, Y)))


# Programs without a loss scale.


def loop_by_hand(x, y):
    descend(gradients(x, y))


class Momentum:
    """An optimizer of somebody's own."""

    def __init__(self) -> None:
        self.slots = [tf.Variable(tf.zeros_like(variable)) for variable in VARIABLES]

    def apply(self, found: list[tf.Tensor]) -> None:
        for slot, variable, gradient in zip(self.slots, VARIABLES, found, strict=True):
            slot.assign(0.9 * slot + gradient)
            variable.assign_sub(RATE * slot)


MOMENTUM = Momentum()


def optimizer_of_ones_own(x, y):
    MOMENTUM.apply(gradients(x, y))


def by_functions(x, y):
    tf.function(descend)(tf.function(gradients)(x, y))


def model_in_a_function(x, y):
    with tf.GradientTape() as tape:
        loss = tf.function(loss_of)(x, y)
    descend(tape.gradient(loss, VARIABLES))


def in_a_branch(x, y):
    found = gradients(x, y)
    if tf.reduce_all(tf.math.is_finite(found[0])):
        descend(found)


def in_a_loop(x, y):
    for _ in tf.range(2):
        descend(gradients(x, y))


DATASET = tf.data.Dataset.from_tensors((X, Y)).repeat(2)


def over_a_dataset():
    for x, y in DATASET:
        descend(gradients(x, y))


def by_tf_gradients(x, y):
    descend(tf.gradients(loss_of(x, y), VARIABLES))


def loss_times_two(x, y):
    descend(gradients(x, y, 2.0))


BETA = tf.Variable(0.1)


def with_an_optimizer_not_wrapped(x, y):
    BARE.apply_gradients(zip(gradients(x, y), VARIABLES, strict=True))


def loss_weight_that_is_a_variable(x, y):
    descend(gradients(x, y, BETA))


# Programs with a scale of their own.


SCALE = tf.Variable(1024.0)


def scaled_by_a_constant(x, y):
    descend([gradient / 1024.0 for gradient in gradients(x, y, 1024.0)])


def scaled_by_a_constant_and_its_inverse(x, y):
    descend([gradient * (1 / 1024) for gradient in gradients(x, y, 1024.0)])


def scaled_by_a_variable(x, y):
    descend([gradient / SCALE for gradient in gradients(x, y, SCALE)])


def scaled_by_a_variable_and_its_inverse(x, y):
    inverse = 1.0 / SCALE
    descend([gradient * inverse for gradient in gradients(x, y, SCALE)])


def scaled_by_an_argument(x, y, scale):
    descend([gradient / scale for gradient in gradients(x, y, scale)])


def scaled_and_in_a_branch(x, y):
    found = [gradient / SCALE for gradient in gradients(x, y, SCALE)]
    if tf.reduce_all(tf.math.is_finite(found[0])):
        MOMENTUM.apply(found)
    else:
        SCALE.assign(SCALE / 2)


def scaled_over_a_dataset():
    for x, y in DATASET:
        descend([gradient / SCALE for gradient in gradients(x, y, SCALE)])


KERAS = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE))
TF_KERAS = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(RATE))


def scaled_by_keras(x, y):
    with tf.GradientTape() as tape:
        loss = KERAS.scale_loss(loss_of(x, y))
    KERAS.apply_gradients(zip(tape.gradient(loss, VARIABLES), VARIABLES, strict=True))


def scaled_by_tf_keras(x, y):
    with tf.GradientTape() as tape:
        loss = TF_KERAS.get_scaled_loss(loss_of(x, y))
    found = TF_KERAS.get_unscaled_gradients(tape.gradient(loss, VARIABLES))
    TF_KERAS.apply_gradients(zip(found, VARIABLES, strict=True))


# Programs that tf_amp scales, or has been told not to scale, or warns of otherwise.


MANAGER, UNMOVED = LossScaleManager(StaticLossScale(1024)), LossScaleManager(NoLossScale())
WRAPPED = wrap_optimizer(keras.optimizers.SGD(RATE))
BARE = keras.optimizers.SGD(RATE)


def with_a_manager(x, y):
    with tf.GradientTape() as tape:
        loss = MANAGER.multiply(loss_of(x, y))
    descend(MANAGER.unscale(tape.gradient(loss, VARIABLES)))


def with_a_manager_that_does_not_scale(x, y):
    with tf.GradientTape() as tape:
        loss = UNMOVED.multiply(loss_of(x, y))
    descend(UNMOVED.unscale(tape.gradient(loss, VARIABLES)))


def with_a_wrapped_optimizer(x, y):
    with tf.GradientTape() as tape:
        loss = WRAPPED.scale_loss(loss_of(x, y))
    WRAPPED.apply_gradients(zip(tape.gradient(loss, VARIABLES), VARIABLES, strict=True))


# Programs that do not train.


TOTAL, MOVING = tf.Variable(0.0), tf.Variable(tf.zeros([4]))
NORM = keras.metrics.Mean()


def inference(x, y):
    return predict(x) - y


def metrics_and_averages(x, y):
    predicted = predict(x)
    TOTAL.assign_add(tf.reduce_mean(tf.square(predicted - y)))
    MOVING.assign(0.9 * MOVING + 0.1 * tf.reduce_mean(predicted, 0))


def average_of_weights(x, y):
    predicted = predict(x)
    W.assign(0.9 * W + 0.1 * W)
    return predicted - y


def saliency(x, y):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = loss_of(x, y)
    return tape.gradient(loss, x)


def gradient_norm_in_a_metric(x, y):
    found = gradients(x, y)
    NORM.update_state(tf.linalg.global_norm(found))
    return found


def gradients_alone(x, y):
    return gradients(x, y)


ACCUMULATORS = [tf.Variable(tf.zeros_like(variable)) for variable in VARIABLES]


def accumulators(x, y):
    for accumulator, gradient in zip(ACCUMULATORS, gradients(x, y), strict=True):
        accumulator.assign_add(gradient)


def kept_float32(x, y):
    with tf_amp.keep_float32():
        found = gradients(x, y)
    descend(found)


SILENT = (
    scaled_by_a_constant,
    scaled_by_a_constant_and_its_inverse,
    scaled_by_a_variable,
    scaled_by_a_variable_and_its_inverse,
    scaled_and_in_a_branch,
    scaled_by_keras,
    scaled_by_tf_keras,
    with_a_manager,
    with_a_manager_that_does_not_scale,
    with_a_wrapped_optimizer,
    inference,
    metrics_and_averages,
    average_of_weights,
    saliency,
    gradient_norm_in_a_metric,
    gradients_alone,
    accumulators,
    kept_float32,
)
TOLD = (
    loop_by_hand,
    optimizer_of_ones_own,
    by_functions,
    model_in_a_function,
    in_a_branch,
    in_a_loop,
    by_tf_gradients,
    loss_times_two,
    loss_weight_that_is_a_variable,
    with_an_optimizer_not_wrapped,
)


# In the order in which they run.
TOLD_OF = [function.__name__ for function in (*TOLD, over_a_dataset)]


def main() -> None:
    for function in (*TOLD, *SILENT):
        run(function)
    tf.function(over_a_dataset)()
    tf.function(scaled_over_a_dataset)()
    run(scaled_by_an_argument, X, Y, tf.constant(1024.0))
    # A shape of its own: it is traced again.
    retraced = tf.function(loop_by_hand)
    retraced(X[:2], Y[:2])
    retraced(X[:3], Y[:3])
    print(*tf_amp.status().trained_unscaled)
    low = {row.name: row.products_low for row in tf_amp.status().functions}
    print(*(name for name, count in low.items() if not count))
