"""The graphs of the peer suite for v1 sessions, each with what must be in low precision.

Every builder makes its graph in the default graph and returns a `Case`. The letter notation of
the loops: W is an allow op (MatMul), G an infer op (addition), C a clear op (Relu), B a deny op
(Pow, twice). A capital must run in the target dtype, a small letter in float32. One differs from
TensorFlow's on purpose: in the third the loop adds up, which the rule `small-step` keeps float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1

LOOPS = {
    1: ("W", "C", "C"),
    2: ("C", "C", "W"),
    3: ("W", "g", "W"),
    4: ("W", "gbg", "W"),
    5: ("b", "gWC", "c"),
    6: ("b", "CWCG", "C"),
    7: ("C", "GWCG", "C"),
    8: ("C", "CgbgWC", "g"),
}
ROUNDS = 4
# oneDNN makes one node of a convolution and its bias, under the name of the bias.
WITH_BIAS = "+BiasAdd"


class Case(NamedTuple):
    """What to fetch and feed, and which nodes must be low or float32 afterwards."""

    fetches: Any
    low: tuple[str, ...]
    feed: dict[Any, Any] = {}  # noqa: RUF012  read only
    full: tuple[str, ...] = ()
    casts: tuple[int, int] | None = None


def values(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.RandomState(seed).randn(*shape) * scale).astype(np.float32)


def fed(*shape: int) -> tuple[Any, dict[Any, Any]]:
    """A placeholder and its feed: a constant would be folded away before the pass."""
    x = v1.placeholder(tf.float32, shape)
    return x, {x: values(0, *shape)}


def variable(seed: int, *shape: int) -> Any:
    return v1.get_variable(
        f"v{seed}", initializer=values(seed, *shape, scale=1 / np.sqrt(np.prod(shape[:-1])))
    )


def conv_bn(x: Any, seed: int, channels: int) -> Any:
    kernel = variable(seed, 3, 3, int(x.shape[-1]), channels)
    x = tf.nn.conv2d(x, kernel, 1, "SAME", name="Conv2D")
    scale, offset = np.ones(channels, np.float32), np.zeros(channels, np.float32)
    return v1.nn.fused_batch_norm(x, scale, offset, name="FusedBatchNormV3")[0]


def conv3d_bn(x: Any, seed: int) -> Any:
    kernel = variable(seed, 3, 3, 3, int(x.shape[-1]), 6)
    x = tf.nn.conv3d(x, kernel, [1] * 5, "SAME", name="Conv3D")
    flat = tf.reshape(x, [2, 8, 64, 6])
    norm = v1.nn.fused_batch_norm(
        flat, np.ones(6, np.float32), np.zeros(6, np.float32), name="FusedBatchNormV3"
    )[0]
    return tf.reshape(norm, x.shape)


def conv_pool(x: Any, seed: int) -> Any:
    x = tf.nn.conv2d(x, variable(seed, 5, 5, int(x.shape[-1]), 8), 1, "SAME", name="Conv2D")
    x = tf.nn.relu(tf.nn.bias_add(x, variable(seed + 50, 8)), name="Relu")
    return tf.nn.max_pool2d(x, 2, 2, "SAME", name="MaxPool")


def matmul_act(x: Any, seed: int) -> Any:
    return tf.nn.relu(tf.matmul(x, variable(seed, 8, 8), name="MatMul"), name="Relu")


def with_gradients(y: Any) -> Any:
    """The output and the gradients of a squared error, as a training step has them."""
    loss = tf.reduce_mean(tf.square(y - tf.constant(values(77, *y.shape.as_list()))))
    gradients = tf.gradients(loss, v1.trainable_variables())
    return [tf.identity(y), *(tf.identity(gradient) for gradient in gradients)]


def build_conv_bn() -> Case:
    x, feed = fed(2, 8, 8, 1)
    y = conv_bn(conv_bn(x, 1, 6), 2, 6)
    return Case(tf.identity(y), ("Conv2D", "FusedBatchNormV3", "Conv2D_1"), feed, casts=(3, 1))


def build_conv3d_bn() -> Case:
    x, feed = fed(2, 8, 8, 8, 1)
    y = conv3d_bn(conv3d_bn(x, 1), 2)
    return Case(tf.identity(y), ("Conv3D", "FusedBatchNormV3", "Conv3D_1"), feed, casts=(3, 1))


def build_conv3d() -> Case:
    x, feed = fed(2, 8, 8, 8, 1)
    y = tf.nn.conv3d(x, variable(1, 3, 3, 3, 1, 6), [1] * 5, "SAME", name="Conv3D")
    y = tf.nn.conv3d(y, variable(2, 3, 3, 3, 6, 4), [1] * 5, "SAME", name="Conv3D")
    back = "gradients/Conv3D_1_grad/Conv3DBackprop"
    low = ("Conv3D", "Conv3D_1", f"{back}InputV2", f"{back}FilterV2")
    return Case(with_gradients(y), low, feed)


def build_conv_bn_dropout() -> Case:
    x, feed = fed(2, 8, 8, 1)
    x = conv_bn(x, 1, 6)
    kept = tf.constant((values(9, 2, 8, 8, 6) > 0) * 2.0, tf.float32)
    x = tf.add(x * kept, 1.0, name="addition")
    x = conv_bn(x, 2, 6)
    low = ("Conv2D", "FusedBatchNormV3", "addition", "Conv2D_1")
    return Case(with_gradients(x), low, feed)


def build_conv_pool() -> Case:
    x, feed = fed(2, 8, 8, 1)
    y = conv_pool(conv_pool(x, 1), 2)
    low = (f"Conv2D{WITH_BIAS}", "Relu", "MaxPool", f"Conv2D_1{WITH_BIAS}")
    return Case(tf.identity(y), low, feed, casts=(5, 1))


def build_depthwise() -> Case:
    x, feed = fed(2, 8, 8, 1)
    for seed in (1, 2):
        kernel = variable(seed, 3, 3, 1, 1)
        x = tf.nn.depthwise_conv2d(x, kernel, [1] * 4, "SAME", name=f"depthwise{seed}")
    grad = "gradients/depthwise2_grad/DepthwiseConv2dNativeBackprop"
    low = ("depthwise1", "depthwise2", f"{grad}Input", f"{grad}Filter")
    return Case(with_gradients(x), low, feed)


def build_simple_loop() -> Case:
    weight = variable(1, 8, 8)

    def body(i: Any, x: Any) -> Any:
        return i + 1, tf.nn.relu(tf.matmul(x, weight, name="MatMul"), name="Relu")

    x, feed = fed(8, 8)
    _, y = tf.while_loop(lambda i, _: i < ROUNDS, body, [0, x], name="while")
    return Case(with_gradients(y), ("while/MatMul", "while/Relu"), feed)


def build_loop_with_vars_intertwined() -> Case:
    first, second = variable(1, 8, 8), variable(2, 8, 8)

    def body(i: Any, j: Any, x: Any, y: Any) -> Any:
        x = tf.nn.relu(tf.matmul(x, first, name="MatMul"), name="Relu")
        y = tf.nn.relu(tf.matmul(y, second, name="MatMul"), name="Relu")
        return j, i + 1, y, x

    start, feed = fed(8, 8)
    state = [0, 0, start, start * 0.5]
    *_, x, y = tf.while_loop(lambda i, j, *_: j < ROUNDS, body, state, name="while")
    low = ("while/MatMul", "while/Relu", "while/MatMul_1", "while/Relu_1")
    return Case(with_gradients(x + 2.0 * y), low, feed)


def build_multi_paths() -> Case:
    x, feed = fed(2, 8, 8, 3)
    parts = tf.split(x, 3, axis=3, name="split")
    paths = [conv_pool(conv_pool(p, 10 * i), 10 * i + 1) for i, p in enumerate(parts, 1)]
    y = tf.concat(paths, axis=3, name="concat")
    y = tf.nn.conv2d(y, variable(99, 1, 1, 24, 2), 1, "SAME", name="last")
    numbers = ["", *(f"_{i}" for i in range(1, 6))]
    pairs = [name for n in numbers for name in (f"Conv2D{n}{WITH_BIAS}", f"Relu{n}", f"MaxPool{n}")]
    return Case(with_gradients(y), ("split", "concat", "last", *pairs), feed)


def build_multi_paths_2() -> Case:
    x, feed = fed(8, 8)
    y = matmul_act(x, 1) + matmul_act(x, 2) + x
    return Case(with_gradients(y), ("MatMul", "Relu", "MatMul_1", "Relu_1"), feed)


def build_recurrent_lstm() -> Case:
    size = 8
    weight, bias = variable(1, 2 * size, 4 * size), variable(2, 4 * size)
    x, feed = fed(ROUNDS, 8, size)
    steps = tf.TensorArray(tf.float32, ROUNDS).unstack(x)
    outputs = tf.TensorArray(tf.float32, ROUNDS)

    def body(i: Any, c: Any, h: Any, outputs: Any) -> Any:
        both = tf.concat([steps.read(i), h], axis=1, name="concat")
        gates = tf.nn.bias_add(tf.matmul(both, weight, name="MatMul"), bias, name="BiasAdd")
        new, i_gate, f_gate, o_gate = tf.split(gates, 4, axis=1, name="split")
        c = tf.sigmoid(f_gate + 1.0, name="Sigmoid") * c + tf.sigmoid(
            i_gate, name="Sigmoid"
        ) * tf.tanh(new, name="Tanh")
        h = tf.sigmoid(o_gate, name="Sigmoid") * tf.tanh(c, name="Tanh")
        return i + 1, c, h, outputs.write(i, h)

    zeros = tf.zeros([8, size])
    state = [0, zeros, zeros, outputs]
    *_, outputs = tf.while_loop(lambda i, *_: i < ROUNDS, body, state, name="while")
    low = ("concat", "MatMul", "split", "Sigmoid", "Sigmoid_1", "Sigmoid_2", "Tanh", "Tanh_1")
    stacked = tf.reshape(outputs.stack(), [ROUNDS, 8, size])
    return Case(with_gradients(stacked), tuple(f"while/{name}" for name in low), feed)


def build_loop_string(number: int) -> Case:
    low: list[str] = []
    full: list[str] = []

    def apply(letters: str, x: Any, scope: str, path: str) -> Any:
        for i, letter in enumerate(letters):
            name = f"{scope}{i}"
            kind = letter.upper()
            if kind == "W":
                x = tf.matmul(x, tf.constant(values(i + 3, 8, 8, scale=0.3)), name=name)
            elif kind == "G":
                x = tf.add(x, 0.1, name=name)
            elif kind == "C":
                x = tf.nn.relu(x, name=name)
            else:
                x = tf.pow(tf.pow(x, 2.0, name=name), 0.5)
            (low if letter.isupper() else full).append(path + name)
        return x

    before, inside, after = LOOPS[number]
    x, feed = fed(8, 8)
    x = apply(before, x, "before", "")
    _, x = tf.while_loop(
        lambda i, _: i < ROUNDS,
        lambda i, x: (i + 1, apply(inside, x, "inside", "while/")),
        [0, x],
        name="while",
    )
    return Case(tf.identity(apply(after, x, "after", "")), tuple(low), feed, full=tuple(full))


def build_noninlined_funcdef() -> Case:
    from tensorflow.python.framework import function

    @function.Defun(tf.float32, tf.float32)
    def swish_gradient(x: Any, dy: Any) -> Any:
        s = tf.sigmoid(x)
        return dy * (s + x * s * (1.0 - s))

    @function.Defun(tf.float32, noinline=True, grad_func=swish_gradient)
    def swish(x: Any) -> Any:
        return x * tf.sigmoid(x)

    x, feed = fed(8, 8)
    y = swish(matmul_act(x, 1))
    y.set_shape([8, 8])
    return Case(with_gradients(y), ("MatMul",), feed)


def build_ingraph_train_loop() -> Case:
    features, labels = values(0, 32, 8), values(1, 32, 1)
    optimizer = v1.train.AdamOptimizer(0.01)
    weight, bias = variable(2, 8, 1), v1.get_variable("bias", initializer=np.zeros(1, np.float32))

    def body(i: Any, _: Any) -> Any:
        prediction = tf.matmul(tf.constant(features), weight, name="MatMul") + bias
        loss = tf.reduce_mean(tf.square(prediction - tf.constant(labels)), name="loss")
        with tf.control_dependencies([optimizer.minimize(loss)]):
            return i + 1, tf.identity(loss)

    _, loss = tf.while_loop(
        lambda i, _: i < 20, body, [0, 0.0], name="while", parallel_iterations=1
    )
    return Case(loss, ("while/MatMul", "while/gradients/while/MatMul_grad/MatMul_1"))


BUILDERS: dict[str, Callable[[], Case]] = {
    name.removeprefix("build_"): builder
    for name, builder in list(globals().items())
    if name.startswith("build_") and name != "build_loop_string"
} | {f"loop_{n}": (lambda n=n: build_loop_string(n)) for n in LOOPS}  # type: ignore[misc]


def main(dtype: str) -> None:
    """Runs every case through sessions, with AMP off and on, and reports what ran in what."""
    import logging

    import session_harness as harness

    v1.disable_v2_behavior()
    logging.getLogger("tf_amp").setLevel(logging.ERROR)
    for name, build in BUILDERS.items():
        with tf.Graph().as_default():
            case, init = build(), v1.global_variables_initializer()
            plain_config = harness.plain_config()
            plain = harness.run_new_session(case.fetches, case.feed, plain_config, init)
            with harness.amp(dtype):
                low = harness.run_new_session(case.fetches, case.feed, plain_config, init)
                usual = harness.run_new_session(case.fetches, case.feed, None, init)
        harness.report(
            name,
            low={node: low.dtype(node) for node in case.low},
            full={node: low.dtype(node) for node in case.full},
            casts=[low.casts(d) - plain.casts(d) for d in (dtype, "float32")],
            expected_casts=case.casts,
            error=harness.relative_error(plain.values, low.values),
            usual_error=harness.relative_error(plain.values, usual.values),
        )
