"""Steps of random programs: each takes a tensor to one of the same shape.

A step may have parameters, a number by which its form is chosen, and bodies of further steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras
import unit_layers as units
from tensorflow.python.ops.resource_variable_ops import ResourceVariable
from unit_layers import CHANNELS

ROWS, TOKENS, IMAGES = "rows", "tokens", "images"
SHAPES = {
    ROWS: (4, CHANNELS),
    TOKENS: (4, 6, CHANNELS),
    IMAGES: (4, 4, 4, CHANNELS),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a program.

    Attributes:
        name: a key of `STEPS`.
        number: chooses among the forms of the step.
        bodies: the steps of each body.
    """

    name: str
    number: int = 0
    bodies: tuple[tuple[Step, ...], ...] = ()

    def __repr__(self) -> str:
        """Shorter than that of a dataclass, and Python code too."""
        given = [repr(self.name), repr(self.number), *([repr(self.bodies)] if self.bodies else [])]
        return f"Step({', '.join(given)})"


class Scene:
    """What the steps of one program share: parameters, fed values, effects.

    Attributes:
        fed: what is fed, by name.
        trained: variables that gradients are asked for.
        counted: all others.
        log: what Python functions inside the program saw.
    """

    def __init__(self) -> None:
        self.fed: Mapping[str, tf.Tensor] = {}
        self.trained: dict[str, Any] = {}
        self.counted: dict[str, Any] = {}
        self.layers: dict[str, Any] = {}
        self.functions: dict[str, Any] = {}
        self.log: list[int] = []

    @property
    def variables(self) -> dict[str, Any]:
        """All variables."""
        return self.trained | self.counted

    def weight(self, where: str, *shape: int, fan: int = 0) -> Any:
        """A trained variable, small enough that values stay where they are."""
        scale = (fan or 1) ** -0.5
        seed = sum(map(ord, where))

        def value() -> np.ndarray:
            drawn = np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)
            return drawn if fan else 1 + 0.1 * drawn

        return self._held(self.trained, where, value, trainable=True)

    def count(self, where: str, value: Any, dtype: Any) -> Any:
        """A variable that steps of the program change by themselves."""
        return self._held(self.counted, where, lambda: np.asarray(value, dtype), trainable=False)

    def _held(self, among: dict[str, Any], where: str, value: Any, *, trainable: bool) -> Any:
        if where not in among:
            with tf.init_scope():
                # Not tf.Variable: a function that makes one is traced twice.
                among[where] = ResourceVariable(value(), trainable=trainable)
        return among[where]

    def layer(self, where: str, make: Callable[[], Any], x: tf.Tensor) -> Any:
        """A layer of Keras or tf_keras, built for a tensor."""
        if where not in self.layers:
            with tf.init_scope():
                layer = self.layers[where] = make()
                layer.build((None, *x.shape[1:]))
                if tf.executing_eagerly():
                    _set_weights(layer, where)
            is_keras_3 = isinstance(layer, keras.layers.Layer)
            for number, weight in enumerate(layer.weights):
                among = self.trained if weight.trainable else self.counted
                among[f"{where}/{number}"] = weight.value if is_keras_3 else weight
        return self.layers[where]

    def optimizer(self, make: Callable[[], Any]) -> Any:
        """The optimizer that updates the weights."""
        if "optimizer" not in self.layers:
            with tf.init_scope():
                self.layers["optimizer"] = make()
        return self.layers["optimizer"]

    def count_slots(self) -> None:
        """Counts what the optimizer keeps among the variables."""
        held = self.layers["optimizer"].variables
        for number, slot in enumerate(held() if callable(held) else held):
            is_keras_3 = isinstance(slot, keras.Variable)
            self.counted[f"slot {number}"] = slot.value if is_keras_3 else slot


def _set_weights(layer: Any, where: str) -> None:
    """Gives the matrices of a layer the same numbers whenever it is made."""
    rng = np.random.default_rng(sum(map(ord, where)))
    layer.set_weights(
        [
            rng.normal(0, CHANNELS**-0.5, held.shape) if held.ndim > 1 else held
            for held in layer.get_weights()
        ]
    )


Apply = Callable[[Scene, tf.Tensor, Step, str], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What there is to know of a step.

    Attributes:
        apply: does it.
        tensors: the kinds of tensor that it takes.
        bodies: how many bodies it has.
        compiles: whether XLA compiles it.
        in_session: whether it can be traced into the graph of a session.
        smooth: whether it may be differentiated twice.
    """

    apply: Apply
    tensors: tuple[str, ...] = (ROWS, TOKENS, IMAGES)
    bodies: int = 0
    compiles: bool = True
    in_session: bool = True
    smooth: bool = True


STEPS: dict[str, Kind] = {}
"""The steps by name."""


def _step(name: str, **known: Any) -> Callable[[Apply], Apply]:
    def enter(apply: Apply) -> Apply:
        STEPS[name] = Kind(apply, **known)
        return apply

    return enter


def run_steps(scene: Scene, x: tf.Tensor, steps: Sequence[Step], where: str) -> tf.Tensor:
    """Applies steps in a row."""
    for number, step in enumerate(steps):
        x = STEPS[step.name].apply(scene, x, step, f"{where}/{number}")
    return x


def _body(scene: Scene, step: Step, where: str, number: int = 0) -> Callable[..., tf.Tensor]:
    return lambda x: run_steps(scene, x, step.bodies[number], f"{where}.{number}")


# Products.


@_step("dense")
def _dense(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    w = scene.weight(where, CHANNELS, CHANNELS, fan=CHANNELS)
    rank, form = x.shape.rank, step.number % 6
    if form == 0:
        return tf.matmul(x, w)
    bias = scene.weight(f"{where}b", CHANNELS)
    if form == 1:
        return tf.matmul(x, w) + bias
    if form == 2:
        return tf.nn.bias_add(tf.tensordot(x, w, 1), bias)
    if form == 3:
        rows = tf.matmul(tf.reshape(x, [-1, CHANNELS]), w, transpose_b=True)
        return tf.reshape(tf.nn.bias_add(rows, bias), tf.shape(x))
    if form == 4:
        axes = "bthc"[:rank] if rank < 4 else "bhwc"
        return tf.einsum(f"{axes},{axes[-1]}z->{axes[:-1]}z", x, w) * bias
    return tf.linalg.matvec(w, x) - bias


@_step("keras dense", in_session=False)
def _keras_dense(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    activation = ("linear", "relu", "gelu", "softmax", "selu")[step.number % 5]
    return scene.layer(where, lambda: keras.layers.Dense(CHANNELS, activation), x)(x)


@_step("product with itself", tensors=(TOKENS,))
def _gram(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    scores = tf.matmul(x, x, transpose_b=True) / CHANNELS
    if step.number % 2:
        scores = tf.einsum("btc,bsc->bts", x, x) / CHANNELS
    return tf.tanh(tf.matmul(scores, x))


@_step("conv", tensors=(IMAGES,))
def _conv(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    size = (1, 3, 2)[step.number % 3]
    kernel = scene.weight(where, size, size, CHANNELS, CHANNELS, fan=size * size * CHANNELS)
    form = step.number // 3 % 4
    if form == 0:
        return tf.nn.conv2d(x, kernel, 1, "SAME")
    bias = scene.weight(f"{where}b", CHANNELS)
    if form == 1:
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), bias))
    if form == 2:
        return tf.nn.conv2d_transpose(x, kernel, tf.shape(x), 1, "SAME") + bias
    small = tf.nn.conv2d(x, kernel, 2, "SAME")
    return tf.repeat(tf.repeat(small, 2, 1), 2, 2) + bias


@_step("depthwise", tensors=(IMAGES,))
def _depthwise(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    kernel = scene.weight(where, 3, 3, CHANNELS, 1, fan=9)
    y = tf.nn.depthwise_conv2d(x, kernel, [1, 1, 1, 1], "SAME")
    if step.number % 2:
        y = tf.nn.conv2d(y, scene.weight(f"{where}p", 1, 1, CHANNELS, CHANNELS, fan=8), 1, "SAME")
    return y


@_step("keras groups", tensors=(IMAGES,), in_session=False)
def _keras_groups(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    size, groups = (3, 1)[step.number % 2], (2, 4)[step.number // 2 % 2]

    def make() -> Any:
        return keras.layers.Conv2D(CHANNELS, size, padding="same", groups=groups)

    return scene.layer(where, make, x)(x)


@_step("conv1d", tensors=(TOKENS,))
def _conv1d(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    kernel = scene.weight(where, 3, CHANNELS, CHANNELS, fan=3 * CHANNELS)
    if step.number % 2:
        x = tf.pad(x, [[0, 0], [2, 0], [0, 0]])
        return tf.nn.conv1d(x, kernel, 1, "VALID")
    return tf.nn.conv1d(x, kernel, 1, "SAME")


@_step("pool", tensors=(IMAGES,))
def _pool(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    form = step.number % 3
    if form == 0:
        return tf.nn.avg_pool2d(x, 2, 1, "SAME")
    if form == 1:
        return tf.nn.max_pool2d(x, 2, 1, "SAME")
    return x + tf.reduce_mean(x, [1, 2], keepdims=True)


@_step("resize", tensors=(IMAGES,))
def _resize(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    size = tf.shape(x)[1:3]
    how = {"half_pixel_centers": step.number % 2 == 0, "align_corners": step.number % 2 == 1}
    twice = tf.raw_ops.ResizeBilinear(images=x, size=size * 2, **how)
    if step.number % 4 < 2:
        return tf.nn.avg_pool2d(twice, 2, 2, "SAME")
    return tf.raw_ops.ResizeBilinear(images=tf.nn.relu(twice), size=size, **how)


@_step("attention", tensors=(TOKENS,))
def _attention(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    q, k, v = (
        tf.matmul(x, scene.weight(f"{where}{n}", CHANNELS, CHANNELS, fan=CHANNELS)) for n in "qkv"
    )
    heads = step.number % 2 + 1
    if heads > 1:
        q, k, v = (
            tf.transpose(tf.reshape(t, [-1, 6, heads, CHANNELS // heads]), [0, 2, 1, 3])
            for t in (q, k, v)
        )
    scores = tf.matmul(q, k, transpose_b=True) * (CHANNELS // heads) ** -0.5
    scores = _masked(scene, scores, step.number // 2 % 6)
    weights = tf.nn.softmax(scores)
    if step.number // 12 % 2:
        weights = tf.exp(scores - tf.reduce_logsumexp(scores, -1, keepdims=True))
    y = tf.matmul(weights, v)
    if heads > 1:
        y = tf.reshape(tf.transpose(y, [0, 2, 1, 3]), [-1, 6, CHANNELS])
    return x + y


def _masked(scene: Scene, scores: tf.Tensor, form: int) -> tf.Tensor:
    future = units.FUTURE
    if form == 0:
        return scores
    if form == 1:
        return tf.where(tf.constant(future == 0), scores, -1e9)
    if form == 2:
        return scores + tf.constant(future) * -1e9
    lengths = tf.sequence_mask(scene.fed["labels"] % 6 + 1, 6)
    lengths = lengths[:, tf.newaxis] if scores.shape.rank == 3 else lengths[:, None, None]
    if form == 3:
        return scores + (1.0 - tf.cast(lengths, tf.float32)) * -1e9
    if form == 4:
        return tf.where(lengths, scores, scores.dtype.min)
    both = tf.logical_and(lengths, tf.constant(future == 0))
    return tf.where(both, scores, tf.fill(tf.shape(scores), -1e4))


@_step("keras attention", tensors=(TOKENS,), in_session=False)
def _keras_attention(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    if where not in scene.layers:
        with tf.init_scope():
            layer = keras.layers.MultiHeadAttention(2, 4)
            layer.build((None, 6, CHANNELS), (None, 6, CHANNELS))
        scene.layers[where] = layer
        for number, weight in enumerate(layer.trainable_weights):
            scene.trained[f"{where}/{number}"] = weight.value
    return x + scene.layers[where](x, x, use_causal_mask=bool(step.number % 2))


@_step("recurrent", tensors=(TOKENS,), in_session=False, smooth=False)
def _recurrent(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    def make() -> Any:
        layer = (tf_keras.layers.LSTM, tf_keras.layers.GRU, tf_keras.layers.SimpleRNN)
        return layer[step.number % 3](CHANNELS, return_sequences=True)

    return scene.layer(where, make, x)(x)


# Norms.

_UNITS = {
    "batch norm": (units.batch_norm, 2),
    "batch norm, axes kept": (units.batch_norm_keeping_axes, 2),
    "stored batch norm": (units.stored_batch_norm, 4),
    "layer norm": (units.layer_norm, 2),
    "group norm": (units.group_norm, 2),
    "rms norm": (units.rms_norm, 1),
    "gelu": (units.gelu, 0),
    "erf gelu": (units.erf_gelu, 0),
}


@_step("unit")
def _unit(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    name = list(_UNITS)[step.number % len(_UNITS)]
    if name == "group norm" and x.shape.rank != 4:
        name = "layer norm"
    layer, count = _UNITS[name]
    return layer(x, [scene.weight(f"{where}{n}", CHANNELS) for n in range(count)])


@_step("fused batch norm", tensors=(IMAGES,), in_session=False)
def _fused(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    scale, offset = (scene.weight(f"{where}{n}", CHANNELS) for n in "so")
    if step.number % 2:
        mean, variance = (np.full(CHANNELS, v, np.float32) for v in (0.1, 1.2))
        return tf.compat.v1.nn.fused_batch_norm(
            x, scale, offset, mean, variance, is_training=False
        )[0]
    y, mean, variance = tf.compat.v1.nn.fused_batch_norm(x, scale, offset)
    kept = []
    for name, value in (("m", mean), ("v", variance)):
        held = scene.count(where + name, [1.0] * CHANNELS, np.float32)
        kept.append(held.assign_sub((held - tf.stop_gradient(value)) * 0.25))
    with tf.control_dependencies(kept):
        return tf.identity(y)


_KERAS_NORMS = (
    lambda library: library.layers.BatchNormalization(),
    lambda library: library.layers.LayerNormalization(),
    lambda library: library.layers.GroupNormalization(2),
    lambda library: library.layers.LayerNormalization(epsilon=1e-6, center=False),
    lambda library: library.layers.BatchNormalization(axis=1),
    lambda library: library.layers.UnitNormalization(),
)


def _norm_of(library: Any, scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    make = _KERAS_NORMS[step.number % len(_KERAS_NORMS)]
    layer = scene.layer(where, lambda: make(library), x)
    if "Batch" in type(layer).__name__:
        return layer(x, training=bool(step.number // len(_KERAS_NORMS) % 2))
    return layer(x)


@_step("keras norm", in_session=False)
def _keras_norm(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    if step.number % 7 == 6:
        # Keras 3.4 has none.
        layer = getattr(keras.layers, "RMSNormalization", keras.layers.LayerNormalization)
        return scene.layer(where, layer, x)(x)
    return _norm_of(keras, scene, x, step, where)


@_step("tf_keras norm", in_session=False)
def _tf_keras_norm(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    return _norm_of(tf_keras, scene, x, step, where)


# Element by element.

_ELEMENTWISE: tuple[Callable[[tf.Tensor], tf.Tensor], ...] = (
    tf.nn.relu,
    tf.tanh,
    tf.sigmoid,
    tf.nn.silu,
    tf.nn.softplus,
    tf.nn.elu,
    tf.nn.leaky_relu,
    tf.nn.gelu,
    lambda x: tf.nn.gelu(x, approximate=True),
    tf.nn.selu,
    tf.nn.relu6,
    tf.nn.softsign,
    lambda x: tf.exp(tf.tanh(x)),
    lambda x: tf.math.log1p(tf.square(x)),
    lambda x: tf.sqrt(tf.square(x) + 1.0),
    lambda x: x * tf.math.rsqrt(tf.square(x) + 1.0),
    lambda x: x / (1.0 + tf.abs(x)),
    lambda x: tf.pow(tf.tanh(x), 3.0),
    lambda x: tf.clip_by_value(x, -1.5, 1.5),
    lambda x: tf.maximum(x, 0.1 * x) - 0.25,
    lambda x: tf.math.squared_difference(tf.tanh(x), 0.5),
    lambda x: tf.where(x > 0, x, tf.zeros_like(x)),
    lambda x: tf.add_n([x, 0.5 * x, -x]),
    lambda x: tf.math.erf(x) + x,
    lambda x: tf.math.multiply_no_nan(x, tf.ones_like(x)),
    lambda x: tf.math.xdivy(x, 2.0 + tf.square(x)),
    lambda x: tf.cos(x) - 0.5 * tf.sin(x),
    lambda x: tf.math.reciprocal(1.0 + tf.square(x)),
    lambda x: tf.math.log_sigmoid(x),
    lambda x: tf.nn.log_softmax(x),
    lambda x: tf.nn.softmax(x) * 3.0,
    lambda x: -x,
    lambda x: 1.0 - x,
    lambda x: x / 3.0,
    lambda x: 0.7 * x + 0.3,
    lambda x: (x * 1000.0) / 1000.0,
    lambda x: tf.minimum(x, 1e30),
    lambda x: x + 1e-7,
)


@_step("each", smooth=False)
def _each(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    return _ELEMENTWISE[step.number % len(_ELEMENTWISE)](x)


@_step("smooth each")
def _smooth_each(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    return (tf.tanh, tf.sigmoid, tf.nn.silu, tf.nn.softplus, tf.nn.gelu)[step.number % 5](x)


# Over axes, and of shapes.


@_step("reduce")
def _reduce(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    axis = range(x.shape.rank)[step.number // 8 % x.shape.rank]
    form = step.number % 8
    if form == 0:
        return x - tf.reduce_mean(x, axis, keepdims=True)
    if form == 1:
        return x + 0.1 * tf.reduce_sum(x, axis, keepdims=True)
    if form == 2:
        return x - tf.reduce_max(x, axis, keepdims=True)
    if form == 3:
        return x / (1.0 + tf.norm(x, axis=axis, keepdims=True))
    if form == 4:
        return tf.nn.l2_normalize(x, axis, epsilon=1e-3)
    if form == 5:
        return x * tf.math.reduce_std(x, axis, keepdims=True)
    if form == 6:
        return x - 0.1 * tf.reduce_logsumexp(x, axis, keepdims=True)
    return tf.cumsum(x, axis) * 0.3


@_step("shape")
def _shape(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    rank, form = x.shape.rank, step.number % 14
    if form == 0:
        order = [*range(1, rank), 0]
        return tf.transpose(tf.tanh(tf.transpose(x, order)), np.argsort(order))
    if form == 1:
        return tf.reshape(tf.reshape(x, [-1]) * 1.1, tf.shape(x))
    if form == 2:
        left, right = tf.split(x, 2, -1)
        return tf.concat([right, tf.nn.relu(left)], -1)
    if form == 3:
        parts = tf.unstack(x, axis=-1)
        return tf.stack(parts[::-1], -1)
    if form == 4:
        return tf.pad(x[..., 1:], [[0, 0]] * (rank - 1) + [[0, 1]])
    if form == 5:
        return tf.gather(x, [3, 1, 0, 2, 7, 5, 6, 4], axis=-1)
    if form == 6:
        return tf.reverse(x, [-1]) + tf.roll(x, 1, -1)
    if form == 7:
        return tf.reduce_mean(tf.tile(x[..., tf.newaxis], [1] * rank + [3]), -1)
    if form == 8:
        return tf.squeeze(tf.expand_dims(x, 0), 0) + tf.zeros([tf.shape(x)[0]] + [1] * (rank - 1))
    if form == 9:
        return x + tf.broadcast_to(x[:1], tf.shape(x)) * 0.5
    if form == 10:
        return tf.concat([x[1:], x[:1]], 0)
    if form == 11:
        value = tf.sort(x, -1)
        return value - tf.math.top_k(x, CHANNELS).values * 0.5
    if form == 12:
        return tf.ensure_shape(tf.strided_slice(x, [0], [2**30], [1]), x.shape)
    return tf.stop_gradient(x * 0.5) + 0.5 * x


@_step("dtype", smooth=False)
def _dtype(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    form = step.number % 4
    if form == 3:
        return x + 0.0 * tf.cast(tf.cast(x, tf.int32), tf.float32)
    dtype = (tf.float64, tf.float16, tf.bfloat16)[form]
    return tf.cast(tf.tanh(tf.cast(x, dtype)), tf.float32)


@_step("embedding")
def _embedding(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    table = scene.weight(where, CHANNELS, CHANNELS, fan=CHANNELS)
    labels, form = scene.fed["labels"], step.number % 3
    if form == 0:
        rows = tf.nn.embedding_lookup(table, labels)
    elif form == 1:
        rows = tf.matmul(tf.one_hot(labels, CHANNELS), table)
    else:
        rows = tf.gather(table, labels) * tf.cast(labels, tf.float32)[:, None] * 0.1
    shape = [-1] + [1] * (x.shape.rank - 2) + [CHANNELS]
    return x + tf.reshape(rows, shape)


@_step("scatter", smooth=False)
def _scatter(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    rows = tf.range(tf.shape(x)[0])
    if step.number % 2:
        return tf.math.unsorted_segment_sum(x, rows % 2, tf.shape(x)[0]) * 0.5 + x
    return tf.tensor_scatter_nd_add(x, rows[:2, tf.newaxis], 0.5 * x[:2])


@_step("dropout", smooth=False)
def _dropout(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    seed = [step.number, 7]
    if step.number % 2:
        return tf.nn.experimental.stateless_dropout(x, 0.3, seed=seed)
    kept = tf.random.stateless_uniform(tf.shape(x), seed) > 0.25
    return tf.where(kept, x / 0.75, 0.0)


@_step("words", compiles=False)
def _words(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    words = scene.fed["words"]
    scene_length = tf.strings.length(words)
    known = tf.cast(tf.equal(words, "one"), tf.float32)
    factor = 1.0 + 0.1 * tf.cast(scene_length, tf.float32) * (1.0 - known)
    return x * tf.reshape(factor, [-1] + [1] * (x.shape.rank - 1)) * 0.8


@_step("sizes")
def _sizes(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    size = tf.reduce_prod(tf.shape(x)[:-1])
    if step.number % 2:
        size = tf.size(x) // CHANNELS
    return x / tf.sqrt(tf.cast(size, tf.float32)) * 2.0


# Control flow.


@_step("residual", bodies=1)
def _residual(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    return (x + _body(scene, step, where)(x)) * 0.7


@_step("while", bodies=1)
def _while(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    body, form = _body(scene, step, where), step.number % 4
    trips = scene.fed["trips"] if form % 2 else 2
    options = {"maximum_iterations": 4, "shape_invariants": None}
    if form < 2:
        _, y = tf.while_loop(
            lambda i, y: i < trips, lambda i, y: (i + 1, _like(body(y), x)), [0, x], **options
        )
        return y
    _, y, total, _ = tf.while_loop(
        lambda i, y, total, flag: tf.logical_and(i < trips, flag),
        lambda i, y, total, flag: (
            i + 1,
            _like(body(y), x),
            total + 0.5 * y,
            tf.logical_and(flag, i < 9),
        ),
        [0, x, tf.zeros_like(x), True],
        **options,
    )
    return y + 0.3 * total


def _like(y: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return tf.ensure_shape(y, x.shape)


@_step("array loop", tensors=(ROWS, TOKENS), bodies=1)
def _array_loop(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    """A recurrence over the rows, with what comes in and goes out in arrays."""
    body = _body(scene, step, where)
    axis_first = tf.transpose(x, [1, 0, 2]) if x.shape.rank == 3 else tf.stack([x, -x, 0.5 * x])
    length = axis_first.shape[0]
    given = tf.TensorArray(tf.float32, length).unstack(axis_first)
    made = tf.TensorArray(tf.float32, length)
    like = axis_first[0]
    w = scene.weight(where, CHANNELS, CHANNELS, fan=CHANNELS)

    def turn(i: tf.Tensor, state: tf.Tensor, made: tf.TensorArray) -> Any:
        state = tf.tanh(body(given.read(i)) + tf.matmul(state, w))
        return i + 1, _like(state, like), made.write(i, state)

    _, _, made = tf.while_loop(
        lambda i, *_: i < length,
        turn,
        [0, tf.zeros_like(like), made],
        maximum_iterations=length,
    )
    y = made.stack()
    return tf.transpose(y, [1, 0, 2]) if x.shape.rank == 3 else y[-1] + 0.1 * tf.reduce_sum(y, 0)


@_step("cond", bodies=2)
def _cond(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    trips, flag = scene.fed["trips"], scene.fed["flag"]
    chosen = (flag, trips > 2, tf.logical_not(flag))[step.number % 3]
    return tf.cond(
        chosen,
        lambda: _like(_body(scene, step, where)(x), x),
        lambda: _like(_body(scene, step, where, 1)(x), x),
    )


# XLA itself dies of a Case over sizes that are not known.
@_step("switch", bodies=2, compiles=False)
def _switch(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    branches = [
        lambda: _like(_body(scene, step, where)(x), x),
        lambda: _like(_body(scene, step, where, 1)(x), x),
        lambda: 0.5 * x,
    ]
    return tf.switch_case((scene.fed["trips"] + step.number) % 3, branches)


@_step("function", bodies=1)
def _function(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    """A function that is called once, twice with one another's results, or with two constants."""
    if where not in scene.functions:
        scene.functions[where] = tf.function(_body(scene, step, where), autograph=False)
    function, form = scene.functions[where], step.number % 3
    if form == 0:
        return function(x)
    if form == 1:
        return function(0.5 * function(x))
    return function(x) + tf.stop_gradient(function(tf.ones_like(x)))


@_step("map", bodies=1, in_session=False)
def _map(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    body = _body(scene, step, where)

    def one(row: tf.Tensor) -> tf.Tensor:
        return body(row[tf.newaxis])[0]

    if step.number % 2:
        return tf.vectorized_map(one, x)
    return tf.map_fn(one, x)


# TensorFlow has no gradient of such a loop.
@_step("dataset loop", bodies=1, compiles=False, in_session=False)
def _dataset_loop(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    body, is_cut_short = _body(scene, step, where), step.number % 2
    data = tf.data.Dataset.from_tensors(x).repeat(3)
    if step.number % 4 > 1:
        data = data.map(lambda y: 0.5 * y)

    def loop(state: tf.Tensor) -> tf.Tensor:
        for i, y in data.enumerate():
            if is_cut_short and i > 1:
                break
            state = _like(body(y) + 0.5 * state, state)
        return state

    looped = tf.autograph.to_graph(loop, recursive=False)(tf.zeros_like(x))
    return x + 0.3 * tf.stop_gradient(looped)


@_step("custom gradient")
def _custom_gradient(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    @tf.custom_gradient
    def scaled(x: tf.Tensor) -> Any:
        y = tf.tanh(x) if step.number % 2 else tf.identity(x)
        return y, lambda dy: dy * (0.5 + 0.01 * y)  # else it changes with a loss scale

    return scaled(x)


@_step("recomputed", bodies=1, in_session=False, smooth=False)
def _recomputed(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    return tf.recompute_grad(_body(scene, step, where))(x)


@_step("gradient inside", bodies=1)
def _gradient_inside(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    body = _body(scene, step, where)
    if step.number % 2:
        y = body(x)
        (dx,) = tf.gradients(tf.reduce_sum(tf.tanh(y)), x)
    else:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.tanh(body(x)))
        dx = tape.gradient(y, x)
    return x - 0.3 * dx


# Effects.


@_step("count", compiles=False)
def _count(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    held = scene.count(where, step.number % 5, (np.int32, np.int64, np.float32)[step.number % 3])
    with tf.control_dependencies([held.assign_add(tf.cast(2, held.dtype))]):
        return tf.identity(x)


# In a session nothing orders the reads of one round of a loop after the writes of the last.
@_step("average", in_session=False)
def _average(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    held = scene.count(where, [0.5] * CHANNELS, np.float32)
    mean = tf.reduce_mean(x, list(range(x.shape.rank - 1)))
    kept = held.assign(0.75 * held + 0.25 * tf.stop_gradient(mean))
    with tf.control_dependencies([kept]):
        return x - 0.1 * held.read_value() if step.number % 2 else tf.identity(x)


@_step("python", compiles=False)
def _python(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    log, form = scene.log, step.number % 3

    def seen(number: Any) -> Any:
        log.append(int(number))
        return number

    if form == 0:
        trips = tf.numpy_function(seen, [scene.fed["trips"]], tf.int32)
        return x + 0.1 * tf.cast(tf.ensure_shape(trips, []), tf.float32)
    if form == 1:
        y = tf.py_function(lambda t: tf.tanh(t), [x], tf.float32)
        return tf.ensure_shape(y, x.shape)
    y = tf.numpy_function(lambda a: (log.append(a.dtype.itemsize), a)[1], [x], tf.float32)
    return tf.ensure_shape(tf.stop_gradient(y), x.shape) * 0.5 + 0.5 * x


@_step("checked", compiles=False)
def _checked(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    form = step.number % 3
    if form == 0:
        return tf.debugging.check_numerics(x, "not finite")
    if form == 1:
        with tf.control_dependencies([tf.debugging.assert_less(tf.abs(x), 1e30)]):
            return tf.identity(x)
    labels = scene.fed["labels"]
    with tf.control_dependencies([tf.debugging.assert_non_negative(labels)]):
        return x * 0.9


@_step("side channel", smooth=False)
def _side_channel(scene: Scene, x: tf.Tensor, step: Step, where: str) -> tf.Tensor:
    """Integers and booleans of integers: they must be what they were, bit by bit."""
    labels, trips = scene.fed["labels"], scene.fed["trips"]
    weights = tf.cast(labels % 3, tf.float32) - tf.cast(tf.equal(labels, trips), tf.float32)
    chosen = tf.argsort(labels, stable=True)
    order = tf.gather(x, chosen)
    factor = tf.reshape(weights, [-1] + [1] * (x.shape.rank - 1))
    return order * (1.0 + 0.1 * factor)
