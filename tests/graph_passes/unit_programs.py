"""Programs with one or a few units in each, forward and backward, between matrix products.

What users write by hand comes with parameters of any rank and in any dtype; what libraries write
comes as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf
import unit_layers as layers
from library_programs import LIBRARY
from programs import Program, trace
from unit_layers import CHANNELS, IMAGES, TOKENS, Layer, numbers


@dataclasses.dataclass(frozen=True)
class Options:
    """What a program may be varied in.

    Attributes:
        rank: of the parameters: 0, 1, or 4 for that of what they are applied to.
        dtype: of the unit; the products beside it are float32.
        known: whether the batch size is known.
    """

    rank: int = 1
    dtype: str = "float32"
    known: bool = True


def parameters(count: int, options: Options, rank: int) -> list[tf.Variable]:
    """Positive parameters over the last axis of a tensor of some rank."""
    shape = {0: (), 1: (CHANNELS,)}.get(options.rank, (1,) * (rank - 1) + (CHANNELS,))
    values = [0.5 + 0.25 * n + np.arange(np.prod(shape)) % 4 / 4 for n in range(count)]
    return [tf.Variable(value.reshape(shape), dtype=options.dtype) for value in values]


def between_products(
    layer: Layer,
    shape: tuple[int, ...],
    options: Options = Options(),
    count: int = 0,
    *,
    is_trained: bool = True,
) -> Program:
    """`product(layer(product(x)))` and the gradients of x and the parameters, with dy fed.

    Args:
        layer: what is between the products, of a tensor and parameters.
        shape: of x.
        options: the parameters' rank, the dtype of the layer, whether the batch is known.
        count: the number of parameters.
        is_trained: whether the gradient is asked for at all.
    """
    held = parameters(count, options, len(shape))
    eye = np.eye(shape[-1], dtype=np.float32)
    seen = shape if options.known else (None, *shape[1:])

    def step(x: tf.Tensor, dy: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            inside = tf.cast(tf.matmul(x, 1.25 * eye), options.dtype)
            made = layer(inside, [tf.convert_to_tensor(variable) for variable in held])
            y = tf.matmul(tf.cast(made, tf.float32), eye)
        if not is_trained:
            return [y + 0.0 * dy]
        sources = [x, *(v for v in held)]
        gradients = tape.gradient(y, sources, output_gradients=tf.matmul(dy, eye))
        return [y, *(tf.identity(g) for g in gradients if g is not None)]

    specs = [tf.TensorSpec(seen), tf.TensorSpec(seen)]
    return trace(step, *specs, numbers(*shape), numbers(*shape, seed=1))


def _layer(function: Layer, shape: tuple[int, ...], count: int) -> Callable[[Options], Program]:
    return lambda options: between_products(function, shape, options, count)


_LAYERS: Mapping[str, Callable[[Options], Program]] = {
    "batch norm": _layer(layers.batch_norm, IMAGES, 2),
    "batch norm, rank 2": _layer(layers.batch_norm, (32, CHANNELS), 2),
    "batch norm, axes kept": _layer(layers.batch_norm_keeping_axes, IMAGES, 2),
    "batch norm of numbers": _layer(layers.batch_norm_of_numbers, IMAGES, 0),
    "batch norm, forward": lambda options: between_products(
        layers.batch_norm, IMAGES, options, 2, is_trained=False
    ),
    "batch norm, axes kept, forward": lambda options: between_products(
        layers.batch_norm_keeping_axes, IMAGES, options, 2, is_trained=False
    ),
    "batch norm, stored": lambda options: between_products(
        layers.stored_batch_norm, IMAGES, options, 4, is_trained=False
    ),
    "batch norm, stored, trained": _layer(layers.stored_batch_norm, IMAGES, 4),
    "batch norm, swish": _layer(layers.batch_norm_and_swish, IMAGES, 2),
    "layer norm": _layer(layers.layer_norm, TOKENS, 2),
    "layer norm, forward": lambda options: between_products(
        layers.layer_norm, TOKENS, options, 2, is_trained=False
    ),
    "instance norm": _layer(layers.instance_norm, IMAGES, 2),
    "group norm": _layer(layers.group_norm, IMAGES, 2),
    "rms norm": _layer(layers.rms_norm, TOKENS, 1),
    "rms norm, forward": lambda options: between_products(
        layers.rms_norm, TOKENS, options, 1, is_trained=False
    ),
    "gelu, tanh": _layer(layers.gelu, TOKENS, 0),
    "gelu, erf": _layer(layers.erf_gelu, TOKENS, 0),
    **{
        name: _layer(
            functools.partial(lambda mask, x, _: layers.weights_of(x, mask), mask), TOKENS, 0
        )
        for name, mask in layers.ATTENTIONS.items()
    },
    "select": _layer(layers.select, TOKENS, 0),
    "swish": _layer(layers.swish, TOKENS, 0),
    "broadcast sum": _layer(layers.broadcast_sum, TOKENS, 0),
    "bias": _layer(layers.biased, TOKENS, 1),
    "forward sum": _layer(layers.forward_sum, (2048, CHANNELS), 0),
}


def weight_gradient(options: Options) -> Program:
    """Tokens times a matrix, whose gradient is a sum of products over the batch."""
    weight = tf.Variable(numbers(CHANNELS, CHANNELS, seed=3))

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            y = tf.matmul(tf.nn.relu(tf.matmul(x, weight)), weight)
        return [y, tape.gradient(y, weight)]

    shape = TOKENS if options.known else (None, *TOKENS[1:])
    return trace(step, tf.TensorSpec(shape), numbers(*TOKENS))


def heads_bias(options: Options) -> Program:
    """The gradient of a bias of heads, over enough rows that a product with ones pays."""
    bias = tf.Variable(numbers(4, 16))
    weight = tf.Variable(numbers(64, 64, seed=2) / 8)
    shape = (16, 16, 64)

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            y = tf.reshape(tf.matmul(x, weight), [-1, 16, 4, 16]) + bias
            y = tf.matmul(tf.reshape(tf.nn.relu(y), [-1, 64]), weight)
        return [y, *tape.gradient(y, [weight, bias])]

    seen = shape if options.known else (None, *shape[1:])
    return trace(step, tf.TensorSpec(seen), numbers(*shape))


def dense_bias(options: Options) -> Program:
    """BiasAdd and its gradient over enough rows that a product with ones pays."""
    bias = tf.Variable(numbers(512))
    weight = tf.Variable(numbers(8, 512, seed=2))
    shape = (48, 8)

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            y = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, weight), bias))
            y = tf.matmul(y, weight, transpose_b=True)
        return [y, *tape.gradient(y, [weight, bias])]

    seen = shape if options.known else (None, *shape[1:])
    return trace(step, tf.TensorSpec(seen), numbers(*shape))


def dense_gelu(options: Options) -> Program:
    """A layer on tokens as Keras writes it, before inference."""
    bias = tf.Variable(numbers(16))
    weight = tf.Variable(numbers(CHANNELS, 16, seed=2) / 4)

    def network(x: tf.Tensor) -> tf.Tensor:
        y = tf.nn.bias_add(tf.tensordot(x, weight, 1), bias)
        return tf.matmul(tf.nn.gelu(y, approximate=False), weight, transpose_b=True)

    seen = TOKENS if options.known else (None, *TOKENS[1:])
    return trace(network, tf.TensorSpec(seen), numbers(*TOKENS))


def cross_entropy(options: Options) -> Program:
    """A loss with labels over enough logits that a softmax pays."""
    weight = tf.Variable(numbers(8, 1100, seed=3) / 8)
    shape = (40, 8)

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        labels = tf.argmax(x, 1)
        with tf.GradientTape() as tape:
            logits = tf.cast(tf.matmul(x, weight), options.dtype)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return [losses, tape.gradient(losses, weight)]

    seen = shape if options.known else (None, *shape[1:])
    return trace(step, tf.TensorSpec(seen), numbers(*shape))


def folded_batch_norm(options: Options) -> Program:
    """A convolution and a normalization with stored statistics."""
    kernel = tf.Variable(numbers(3, 3, CHANNELS, CHANNELS, seed=4))
    held = parameters(4, options, 4)

    def network(x: tf.Tensor) -> tf.Tensor:
        y = tf.cast(tf.nn.conv2d(x, kernel, 1, "SAME"), options.dtype)
        y = layers.stored_batch_norm(y, [tf.convert_to_tensor(variable) for variable in held])
        return tf.nn.conv2d(tf.cast(tf.nn.relu(y), tf.float32), kernel, 1, "SAME")

    seen = IMAGES if options.known else (None, *IMAGES[1:])
    return trace(network, tf.TensorSpec(seen), numbers(*IMAGES))


def pooled_convolutions(options: Options) -> Program:
    """Two convolutions and a pooling with enough to do for kernels of their own, and gradients."""
    shape = (8, 16, 16, 32)
    kernels = [tf.Variable(numbers(3, 3, 32, 32, seed=seed)) for seed in (6, 7)]

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            made = tf.cast(tf.nn.conv2d(x, kernels[0], 1, "SAME"), options.dtype)
            made = tf.cast(tf.nn.max_pool2d(made, 2, 2, "SAME"), tf.float32)
            y = tf.nn.conv2d(tf.nn.relu(made), kernels[1], 1, "VALID")
        return [y, *tape.gradient(y, kernels)]

    seen = shape if options.known else (None, *shape[1:])
    return trace(step, tf.TensorSpec(seen), numbers(*shape))


def attention_of_many(options: Options) -> Program:
    """A dense layer and attention with enough to do for kernels of their own, and gradients."""
    shape, weight = (64, 64, 64), tf.Variable(numbers(64, 64, seed=8) / 8)

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = tf.cast(tf.matmul(tf.reshape(x, [-1, 64]), weight), options.dtype)
            query = tf.cast(tf.reshape(rows, [-1, 64, 64]), tf.float32)
            scores = tf.nn.softmax(tf.matmul(query, x, transpose_b=True) / 64)
            y = tf.einsum("bts,bsh->bth", scores, x)
        return [y, *tape.gradient(y, [weight, x])]

    seen = shape if options.known else (None, *shape[1:])
    return trace(step, tf.TensorSpec(seen), numbers(*shape))


def moving_statistics(options: Options, *, keeps: bool = False) -> Program:
    """A normalization that also keeps moving statistics, with all axes but the first or one."""
    shape = (1, 1, CHANNELS) if keeps else (CHANNELS,)
    held = parameters(2, options, 4)
    moving = [tf.Variable(tf.zeros(shape, options.dtype)) for _ in range(2)]
    weight = tf.Variable(numbers(CHANNELS, CHANNELS, seed=5))

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            inside = tf.cast(tf.matmul(x, weight), options.dtype)
            mean, variance = tf.nn.moments(inside, [0, 1, 2], keepdims=keeps)
            for variable, value in zip(moving, (mean, variance), strict=True):
                new = tf.squeeze(value, [0]) if keeps else value
                variable.assign(variable * 0.75)
                variable.assign_add(new * 0.25)
            scale, offset = held
            made = tf.nn.batch_normalization(inside, mean, variance, offset, scale, 1e-3)
            y = tf.matmul(tf.cast(made, tf.float32), weight)
        return [y, *tape.gradient(y, [weight, *held])]

    seen = IMAGES if options.known else (None, *IMAGES[1:])
    return trace(step, tf.TensorSpec(seen), numbers(*IMAGES))


def two_of_one_argument(options: Options) -> Program:
    """Two units that read one tensor."""

    def twice(x: tf.Tensor, _: Sequence[tf.Tensor]) -> tf.Tensor:
        return layers.gelu(x, ()) + tf.nn.relu(layers.gelu(x, ()))

    return between_products(twice, TOKENS, options)


def shared_parameters(options: Options) -> Program:
    """Two normalizations with one scale and offset."""

    def twice(x: tf.Tensor, held: Sequence[tf.Tensor]) -> tf.Tensor:
        return layers.batch_norm(tf.tanh(layers.batch_norm(x, held)), held)

    return between_products(twice, IMAGES, options, 2)


HAND_WRITTEN: Mapping[str, Callable[[Options], Program]] = {
    **_LAYERS,
    "weight gradient": weight_gradient,
    "bias of heads": heads_bias,
    "dense bias": dense_bias,
    "dense gelu": dense_gelu,
    "cross entropy": cross_entropy,
    "folded batch norm": folded_batch_norm,
    "pooled convolutions": pooled_convolutions,
    "attention of many": attention_of_many,
    "moving statistics": moving_statistics,
    "moving statistics, axes kept": functools.partial(moving_statistics, keeps=True),
    "two gelus of one argument": two_of_one_argument,
    "shared parameters": shared_parameters,
}
"""Units that users write; all take options."""


NAMES = (*HAND_WRITTEN, *LIBRARY)


@functools.cache
def unit_program(name: str, options: Options = Options()) -> Program:
    """A program by its name; options are for those written by hand."""
    return HAND_WRITTEN[name](options) if name in HAND_WRITTEN else LIBRARY[name]()
