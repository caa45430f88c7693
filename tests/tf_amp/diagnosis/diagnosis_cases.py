"""Programs with a planted fault; each prints what the test looks at, as JSON."""

from __future__ import annotations

import json
import sys

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context

import tf_amp
from tf_amp.diagnosis.recording import DiagnosisError
from tf_amp.loss_scale import wrap_optimizer

FLOAT16 = tf_amp.PrecisionConfig(target_dtype="float16", device="CPU")


def large(blocks: int) -> dict:
    """About 25 nodes a block, of which one has values near 1e5."""
    rng = np.random.default_rng(0)
    weights = [
        tf.Variable(np.eye(16) + 0.01 * rng.random((16, 16)), dtype="float32") for _ in "abc"
    ]

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for number in range(blocks):
                with tf.name_scope(f"block{number}"):
                    for w in weights:
                        x = tf.nn.relu(tf.matmul(x, w))
                    x = x / (1 + tf.reduce_max(x))
                    if number == 2 * blocks // 3:
                        with tf.name_scope("planted"):
                            x = tf.matmul(x, 1e5 * tf.eye(16)) * 1e-5
            loss = tf.reduce_mean(x)
        for w, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(gradient)
        return loss

    x = rng.random((8, 16)).astype(np.float32)
    nodes = len(step.get_concrete_function(x).graph.get_operations())
    before = [w.numpy() for w in weights]
    found = tf_amp.diagnose(step, [x])
    kept = all(np.array_equal(w, b) for w, b in zip(weights, before, strict=True))
    return {
        "nodes": nodes,
        "found": [f.remark.node for f in found.findings],
        "lines": found.findings[0].remark.lines,
        "largest": found.findings[0].largest,
        "finite": found.finite,
        "kept": kept,
        "rules": found.rules,
    }


def flushed(rate: float = 1e-9) -> tuple[tf.types.experimental.GenericFunction, list]:
    """A step whose gradients float16 flushes to 0 at a loss scale of 1, traced before."""
    w = tf.Variable(np.eye(16, dtype=np.float32), name="w")
    v = tf.Variable(np.eye(16, dtype=np.float32), name="v")

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = rate * tf.reduce_mean(tf.matmul(x, w)) + tf.reduce_mean(tf.matmul(x, v))
        gradients = tape.gradient(loss, [w, v])
        for variable, gradient in zip((w, v), gradients, strict=True):
            variable.assign_sub(gradient)
        return loss

    x = 1 + np.random.default_rng(0).random((8, 16)).astype(np.float32)
    step(x)
    return step, [x]


def gradients(*scales: int) -> dict:
    """What is told of `flushed` at the scale of the step, then at others."""
    found = [tf_amp.diagnose(*flushed(), loss_scale=scale).gradients for scale in (None, *scales)]
    return {
        "shares": [{g.variable: g.share for g in one.of_variables} for one in found],
        "scales": [one.loss_scale for one in found],
        "best": [one.best_loss_scale for one in found],
        "at_best": found[0].share(found[0].best_loss_scale),
        "nodes": [g.node for g in found[0].of_variables],
        "text": str(found[0]),
    }


def scaled(library: str) -> dict:
    """The step of a model whose optimizer has a loss scale."""
    module = __import__(library)
    inputs = module.Input([16], name="x")
    hidden = module.layers.Dense(8, name="hidden")(inputs)
    model = module.Model(inputs, module.layers.Dense(4, name="head")(hidden))
    optimizer = wrap_optimizer(module.optimizers.SGD(), 2.0**12)
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).random((8, 16)).astype(np.float32)
    model.train_on_batch(x, x[:, :4])
    found = tf_amp.diagnose(model.train_step, [(x, x[:, :4])], config=FLOAT16).gradients
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - x[:, :4]) ** 2)
    largest = [float(np.abs(g).max()) for g in tape.gradient(loss, model.trainable_variables)]
    return {
        "scale": found.loss_scale,
        "variables": [g.variable for g in found.of_variables],
        "largest": sorted(g.largest for g in found.of_variables),
        "right": sorted(largest),
    }


def sound() -> dict:
    """Nothing is amiss, in loops and branches either."""
    w = tf.Variable(0.1 * tf.eye(16))

    def step(x: tf.Tensor) -> tf.Tensor:
        for number in tf.range(4):
            x = tf.nn.relu(tf.matmul(x, w))
            if number > 2:
                x = tf.matmul(x, w)
        return x

    return _said(step, tf.ones([4, 16]))


def _said(step: object, *inputs: object) -> dict:
    found = tf_amp.diagnose(step, inputs)
    return {"found": len(found.findings), "tensors": found.tensors, "text": str(found)}


def drawn() -> dict:
    """Random numbers without a seed, which are others in each run of the program."""
    w = tf.Variable(tf.eye(16))

    def step(x: tf.Tensor) -> tf.Tensor:
        noise = tf.nn.dropout(tf.matmul(tf.random.normal(tf.shape(x)), w), 0.5)
        return tf.matmul(tf.nn.relu(tf.matmul(x, w) + noise), w)

    return _said(step, tf.ones([64, 16]))


def _said_of_training(layers: list, x: np.ndarray) -> dict:
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(4)])
    model.compile("sgd", lambda y, given: 0.03 * keras.ops.square(y - given))
    return _said(model.train_step, (x, np.ones((len(x), 4), np.float32)))


def looped() -> dict:
    """Turns of a loop, of which TensorFlow runs several at once."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal((8, 24, 16)).astype(np.float32)
    return _said_of_training([keras.layers.LSTM(16)], x)


def shared() -> dict:
    """Calls of one function, of which TensorFlow runs several at once."""
    w = tf.Variable(np.random.default_rng(0).random((64, 64), np.float32) / 32)

    @tf.function
    def tower(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(tf.nn.tanh(tf.matmul(x, w)), w)

    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.add_n([tower(x * 4.0**-power) for power in range(8)])

    return _said(step, tf.ones([64, 64]))


def cancelled() -> dict:
    """The gradient of a bias before a batch normalization is rounding in float32 too."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal((4, 8, 8, 3)).astype(np.float32)
    return _said_of_training([keras.layers.Conv2D(8, 3), keras.layers.BatchNormalization()], x)


class Offset(keras.layers.Layer):
    """Adds a bias as Keras 3.4 does: its gradient is a sum, and a reshape of that."""

    def build(self, shape: tuple) -> None:
        self.bias = self.add_weight(shape=shape[-1:])

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + tf.reshape(self.bias, (1, 1, 1, -1))


def cancelled_sum() -> dict:
    """The same, where a unit makes the sum and the reshape is recorded."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal((4, 8, 8, 3)).astype(np.float32)
    layers = [keras.layers.Conv2D(8, 3, use_bias=False), Offset()]
    return _said_of_training([*layers, keras.layers.BatchNormalization()], x)


def nothing() -> dict:
    """A function without a product."""
    return _said(lambda x: tf.nn.relu(x), tf.ones([4, 16]))


def jump() -> dict:
    """A difference of large values loses most digits, and all is finite."""
    w = tf.Variable(tf.eye(16))

    def step(x: tf.Tensor) -> tf.Tensor:
        near = tf.matmul(x, w) + 30.0
        return tf.matmul(tf.nn.relu(near - 30.0), w)

    x = np.random.default_rng(0).random((8, 16)).astype(np.float32) / 10
    (found,) = tf_amp.diagnose(step, [x]).findings
    return {"op": found.remark.op, "error": found.error}


def not_ours() -> dict:
    """Float32 is not finite either."""
    w = tf.Variable(tf.eye(16))
    found = tf_amp.diagnose(
        lambda x: tf.matmul(tf.matmul(x, w), w), [tf.fill([4, 16], float("inf"))]
    )
    return {"found": len(found.findings), "text": str(found)}


def not_of_a_unit() -> dict:
    """The same of a gradient that a unit sums in bfloat16 by a product of its own."""
    w, b = tf.Variable(tf.eye(16)), tf.Variable(tf.zeros(16))

    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = float("inf") * tf.reduce_sum(tf.matmul(tf.nn.bias_add(tf.matmul(x, w), b), w))
        return tape.gradient(loss, [w, b])

    config = tf_amp.PrecisionConfig(target_dtype="bfloat16", device="CPU")
    found = tf_amp.diagnose(step, [tf.ones([2048, 16])], config=config)
    return {"found": len(found.findings), "text": str(found)}


def iterator() -> dict:
    """A function that takes its batch itself."""
    data = iter(tf.data.Dataset.from_tensors(tf.ones([4, 16])).repeat())
    w = tf.Variable(tf.eye(16))
    try:
        tf_amp.diagnose(tf.function(lambda: tf.matmul(next(data), w)), [])
    except ValueError as error:
        return {"said": str(error)}
    return {}


@keras.saving.register_keras_serializable()
class Planted(keras.layers.Layer):
    """Values near 1e5 where the input is large."""

    def build(self, shape: tuple) -> None:
        self.w = self.add_weight(shape=(shape[-1], shape[-1]), initializer="identity")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return keras.ops.matmul(x * 1e5, self.w) * 1e-5


def fit() -> dict:
    """The third batch has the values that overflow."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input([16])
    x = keras.layers.Dense(16, activation="relu")(inputs)
    x = keras.layers.BatchNormalization()(keras.layers.Dropout(0.1)(x))
    x = keras.layers.Dense(16)(Planted(name="planted")(x))
    model = keras.Model(inputs, x)
    model.compile("adam", "mse")
    told = []
    callback = tf_amp.diagnose_callback(model, tell=told.append)
    x = 0.01 * np.random.default_rng(0).random((64, 16)).astype(np.float32)
    x[32:48] = 1e3
    history = model.fit(
        x, x, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[callback]
    )
    found = callback.diagnosis
    return {
        "epochs": len(history.history["loss"]),
        "nodes": [f.remark.node for f in found.findings],
        "finite": found.finite,
        "gradients": [g.variable for g in found.gradients.of_variables],
        "scale": found.gradients.loss_scale,
        "told": len(told),
        "released": not hasattr(model.train_function, "tf_amp_train_function"),
    }


class Distance(keras.Model):
    """Its loss is the distance of what one layer makes of both parts of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(8)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.layer(x)

    def train_step(self, data: tuple) -> dict:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.norm(self(data[0]) - self(data[1]), axis=-1))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def fit_gradient() -> dict:
    """In bfloat16 the second batch has the distance 0, whose gradient is NaN."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    near = x + 1
    near[16:32] = x[16:32] * np.float32(1.0001)
    model = Distance()
    model.compile("sgd")
    callback = tf_amp.diagnose_callback(model)
    options = {"batch_size": 16, "shuffle": False, "verbose": 0}
    model.fit(x, near, callbacks=[callback], **options)
    again = tf_amp.diagnose_callback(model)
    model.fit(x, near, callbacks=[again], **options)
    return {
        "nodes": [f.remark.node for f in callback.diagnosis.findings],
        "exact": callback.diagnosis.float32_finite,
        "again": str(again.diagnosis),
    }


def worker() -> dict:
    """One of several workers, as TF_CONFIG makes it, cannot wait for its devices."""
    x = tf.ones((4, 4))  # the context is there; it starts no server any more
    server = tensorflow_server_pb2.ServerDef()
    server.cluster.CopyFrom(tf.train.ClusterSpec({"worker": ["a:1", "b:1"]}).as_cluster_def())
    context.context()._collective_ops_server_def = server
    try:
        tf_amp.diagnose(tf.function(lambda x: x @ x), [x], config=FLOAT16)
    except DiagnosisError as error:
        return {"told": str(error)}
    return {}


if __name__ == "__main__":
    print(
        json.dumps(
            globals()[sys.argv[1]](*(int(a) if a.isdecimal() else a for a in sys.argv[2:])),
            default=str,
        )
    )
