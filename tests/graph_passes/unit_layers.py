"""Units as users write them: functions of one tensor and of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

CHANNELS = 8
IMAGES, TOKENS = (4, 3, 5, CHANNELS), (4, 6, CHANNELS)

Layer = Callable[[tf.Tensor, Sequence[tf.Tensor]], tf.Tensor]


def numbers(*shape: int, seed: int = 0, low: float = -1.0) -> np.ndarray:
    """Numbers up to 1 with few bits."""
    values = np.random.default_rng(seed).integers(int(low * 16), 17, shape) / 16
    return values.astype(np.float32)


def batch_norm(x: tf.Tensor, parameters: Sequence[tf.Tensor]) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, list(range(x.shape.rank - 1)))
    return tf.nn.batch_normalization(x, mean, variance, *parameters, 1e-3)


def batch_norm_keeping_axes(x: tf.Tensor, parameters: Sequence[tf.Tensor]) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, list(range(x.shape.rank - 1)), keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, *parameters, 1e-3)


def batch_norm_of_numbers(x: tf.Tensor, _: Sequence[tf.Tensor]) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, list(range(x.shape.rank - 1)))
    return tf.nn.batch_normalization(x, mean, variance, 0.0, 1.0, 1e-3)


def stored_batch_norm(x: tf.Tensor, parameters: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.nn.batch_normalization(x, *parameters, 1e-3)


def layer_norm(x: tf.Tensor, parameters: Sequence[tf.Tensor]) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, *parameters, 1e-3)


def instance_norm(x: tf.Tensor, parameters: Sequence[tf.Tensor]) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, [1, 2], keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, *parameters, 1e-3)


def group_norm(x: tf.Tensor, parameters: Sequence[tf.Tensor]) -> tf.Tensor:
    groups = tf.reshape(x, [-1, *x.shape[1:-1], 2, x.shape[-1] // 2])
    mean, variance = tf.nn.moments(groups, [1, 2, 4], keepdims=True)
    centred = (groups - mean) * tf.math.rsqrt(variance + 1e-3)
    made = tf.reshape(centred, tf.shape(x))
    return made * parameters[0] + parameters[1]


def rms_norm(x: tf.Tensor, parameters: Sequence[tf.Tensor]) -> tf.Tensor:
    square = tf.reduce_mean(tf.square(x), -1, keepdims=True)
    return x * tf.math.rsqrt(square + 1e-3) * parameters[0]


def gelu(x: tf.Tensor, _: Sequence[tf.Tensor]) -> tf.Tensor:
    return 0.5 * x * (1.0 + tf.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * tf.pow(x, 3))))


def erf_gelu(x: tf.Tensor, _: Sequence[tf.Tensor]) -> tf.Tensor:
    return 0.5 * x * (1.0 + tf.math.erf(x * np.sqrt(0.5)))


def weights_of(x: tf.Tensor, mask: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Attention of a tensor to itself."""
    weights = tf.nn.softmax(mask(tf.matmul(x, x, transpose_b=True)))
    return tf.matmul(weights, x)


FUTURE = np.triu(np.ones((6, 6), np.float32), 1)
ATTENTIONS: Mapping[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "attention": lambda s: s,
    "attention, masked by select": lambda s: tf.where(tf.constant(FUTURE == 0), s, -1e9),
    "attention, masked by add": lambda s: s + tf.constant(FUTURE, s.dtype) * -1e9,
}


def select(x: tf.Tensor, _: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.where(x > 0, x, tf.zeros([], x.dtype))


def swish(x: tf.Tensor, _: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.nn.silu(x)


def batch_norm_and_swish(x: tf.Tensor, parameters: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.nn.silu(batch_norm(x, parameters))


def broadcast_sum(x: tf.Tensor, _: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.nn.relu(x) + tf.sigmoid(x)


def biased(x: tf.Tensor, parameters: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.nn.relu(x + parameters[0])


def forward_sum(x: tf.Tensor, _: Sequence[tf.Tensor]) -> tf.Tensor:
    """A mean over the batch by a sum that is beyond float16."""
    total = tf.reshape(tf.reduce_sum(tf.nn.relu(x) * 256.0, 0), [1, x.shape[-1]])
    return x * (total * 2.0**-13)
