"""Version 1 training graphs with data that can be learnt: a language model and a residual net.

Both are written as TensorFlow 1 users wrote them: placeholders, variables, a v1 while loop over
TensorArrays, fused batch normalization with its moving averages as update ops. The graphs are
built in the default graph; the caller opens the session. Everything is seeded, so that each
process of a comparison starts from equal weights and sees equal batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
_MOMENTUM = 0.9
Batch = dict[Any, np.ndarray]


class V1Workload(NamedTuple):
    """A training graph and its data.

    Attributes:
        train_op: One optimizer step, update ops included.
        loss: Scalar float32 training loss.
        evaluation: Scalar float32 loss of inference (moving averages, no dropout).
        batch: Step number -> feed of that step's batch.
        held_out: Feed of a batch that training never sees.
    """

    train_op: Any
    loss: Any
    evaluation: Any
    batch: Callable[[int], Batch]
    held_out: Batch


def _weight(name: str, shape: list[int], seed: int) -> Any:
    return v1.get_variable(
        name, shape, initializer=v1.glorot_uniform_initializer(seed), use_resource=False
    )


def _batch_norm(x: Any, name: str, training: bool) -> Any:
    """Fused batch normalization; in training its moving averages become update ops."""
    ones, zeros = v1.ones_initializer(), v1.zeros_initializer()
    with v1.variable_scope(name):
        shape = [int(x.shape[-1])]
        gamma = v1.get_variable("gamma", shape, initializer=ones)
        beta = v1.get_variable("beta", shape, initializer=zeros)
        averages = [
            v1.get_variable("mean", shape, initializer=zeros, trainable=False),
            v1.get_variable("variance", shape, initializer=ones, trainable=False),
        ]
    if not training:
        return v1.nn.fused_batch_norm(x, gamma, beta, *averages, is_training=False)[0]
    y, *found = v1.nn.fused_batch_norm(x, gamma, beta)
    for average, value in zip(averages, found, strict=True):
        update = v1.assign_sub(average, (average - value) * (1.0 - _MOMENTUM))
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
    return y


def lstm_language_model(
    *, vocabulary: int = 512, size: int = 384, batch: int = 32, steps: int = 20
) -> V1Workload:
    """One LSTM layer over a dynamic loop, tied to nothing; Adam with clipped gradients.

    The text is a random walk on a sparse graph of words: each word has four successors.
    """
    tokens = v1.placeholder(tf.int32, [batch, steps + 1])
    inputs = tf.nn.embedding_lookup(_weight("embedding", [vocabulary, size], 1), tokens[:, :-1])
    weight = _weight("gates", [2 * size, 4 * size], 2)
    bias = v1.get_variable("gates_bias", [4 * size], initializer=v1.zeros_initializer())
    words = tf.TensorArray(tf.float32, steps).unstack(tf.transpose(inputs, [1, 0, 2]))

    def cell(i: Any, c: Any, h: Any, outputs: Any) -> Any:
        gates = tf.nn.bias_add(tf.matmul(tf.concat([words.read(i), h], 1), weight), bias)
        new, keep, forget, out = tf.split(gates, 4, axis=1)
        c = tf.sigmoid(forget + 1.0) * c + tf.sigmoid(keep) * tf.tanh(new)
        h = tf.sigmoid(out) * tf.tanh(c)
        return i + 1, c, h, outputs.write(i, h)

    zeros = tf.zeros([batch, size])
    state = [0, zeros, zeros, tf.TensorArray(tf.float32, steps)]
    *_, outputs = tf.while_loop(lambda i, *_: i < steps, cell, state)
    hidden = tf.reshape(outputs.stack(), [-1, size])
    logits = tf.nn.bias_add(
        tf.matmul(hidden, _weight("softmax", [size, vocabulary], 4)),
        v1.get_variable("softmax_bias", [vocabulary], initializer=v1.zeros_initializer()),
    )
    labels = tf.reshape(tf.transpose(tokens[:, 1:]), [-1])
    loss = tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    )
    optimizer = v1.train.AdamOptimizer(5e-3)
    gradients, variables = zip(*optimizer.compute_gradients(loss), strict=True)
    clipped, _ = tf.clip_by_global_norm(gradients, 5.0)
    train_op = optimizer.apply_gradients(zip(clipped, variables, strict=True))

    successors = np.random.RandomState(0).randint(0, vocabulary, [vocabulary, 4])

    def text(number: int) -> Batch:
        rng = np.random.RandomState(number + 1)
        walk = np.empty([batch, steps + 1], np.int32)
        walk[:, 0] = rng.randint(0, vocabulary, batch)
        for i in range(steps):
            walk[:, i + 1] = successors[walk[:, i], rng.randint(0, 4, batch)]
        return {tokens: walk}

    return V1Workload(train_op, loss, loss, text, text(1_000_000))


def residual_net(*, batch: int = 32, image: int = 32, classes: int = 10) -> V1Workload:
    """Three stages of two residual blocks, batch normalization, momentum.

    An image is the pattern of its class, shifted a little, under noise of its own size.
    """
    images = v1.placeholder(tf.float32, [batch, image, image, 3])
    labels = v1.placeholder(tf.int64, [batch])
    seeds = iter(range(100))

    def network(training: bool) -> Any:
        def conv(x: Any, channels: int, size: int, stride: int, name: str) -> Any:
            shape = [size, size, int(x.shape[-1]), channels]
            kernel = _weight(f"{name}_kernel", shape, next(seeds))
            return tf.nn.conv2d(x, kernel, [1, stride, stride, 1], "SAME")

        def norm(x: Any, name: str) -> Any:
            return _batch_norm(x, name, training)

        def block(x: Any, channels: int, stride: int, name: str) -> Any:
            y = tf.nn.relu(norm(conv(x, channels, 3, stride, f"{name}a"), f"{name}a_norm"))
            y = norm(conv(y, channels, 3, 1, f"{name}b"), f"{name}b_norm")
            if x.shape != y.shape:
                x = norm(conv(x, channels, 1, stride, f"{name}c"), f"{name}c_norm")
            return tf.nn.relu(x + y)

        x = tf.nn.relu(norm(conv(images, 32, 3, 1, "first"), "first_norm"))
        for stage, channels in enumerate((32, 64, 128)):
            for number in range(2):
                stride = 2 if stage and not number else 1
                x = block(x, channels, stride, f"block{stage}{number}")
        logits = tf.matmul(tf.reduce_mean(x, [1, 2]), _weight("classes", [128, classes], 99))
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        )

    with v1.variable_scope("net"):
        loss = network(training=True)
    with v1.variable_scope("net", reuse=True):
        evaluation = network(training=False)
    with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
        train_op = v1.train.MomentumOptimizer(0.01, 0.9).minimize(loss)

    patterns = np.random.RandomState(0).randn(classes, image, image, 3)

    def pictures(number: int) -> Batch:
        rng = np.random.RandomState(number + 1)
        node_types = rng.randint(0, classes, batch)
        shifted = [np.roll(patterns[k], rng.randint(0, 3, 2), (0, 1)) for k in node_types]
        noisy = np.stack(shifted) + rng.randn(batch, image, image, 3)
        return {images: noisy.astype(np.float32), labels: node_types}

    return V1Workload(train_op, loss, evaluation, pictures, pictures(1_000_000))


WORKLOADS: dict[str, Callable[[], V1Workload]] = {
    "lstm": lstm_language_model,
    "resnet": residual_net,
}
