"""Products with constants that are no weights, and products that count: float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from decisions import decisions_of
from traced_graphs import Traced, trace
from traced_steps import traced

from graph_passes import PrecisionConfig, Reason

CONFIGS = {
    "CPU": PrecisionConfig(target_dtype="bfloat16", device="CPU"),
    "GPU": PrecisionConfig(target_dtype="float16", device="GPU"),
}
CPU = CONFIGS["CPU"]
OFF = dataclasses.replace(CPU, disabled_rules=frozenset(("constant-operand", "distance")))
SIDE = 24
WIDTH = 64
DRAW = np.random.default_rng(0)
WEIGHTS = DRAW.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8
FILTER = DRAW.normal(size=(3, 3, 8, 8)).astype(np.float32) / 8
SECOND = (np.eye(WIDTH, k=1) + np.eye(WIDTH, k=-1) - 2 * np.eye(WIDTH)).astype(np.float32)
CROSS = np.array([[0, 1, 0], [1, -4, 1], [0, 1, 0]], np.float32)
BLUR = (np.outer([1, 2, 1], [1, 2, 1]) / 16).astype(np.float32)

Function = Callable[..., Any]
PRODUCTS = ("Conv", "MatMul", "Einsum")


def smooth(*shape: int) -> np.ndarray:
    """A tensor of small differences."""
    grid = np.indices(shape).sum(0)
    return (0.5 + 0.02 * np.sin(grid / 7)).astype(np.float32)


def decisions(function: Function, config: PrecisionConfig, *shapes: tuple[int, ...]) -> list[Any]:
    report = trace(function, *map(tf.TensorSpec, shapes)).rewrite(config).report
    return [d for d in decisions_of(report) if any(name in d.op for name in PRODUCTS)]


def error(found: Traced, config: PrecisionConfig, *values: np.ndarray) -> float:
    """The distance of what a rewritten program gives from float32, by the largest of that."""
    (true,) = found.run(found.graph_def, *values)
    (made,) = found.run(found.rewrite(config).graph_def, *values)
    return float(np.nan_to_num(np.abs(made - true), nan=np.inf).max() / np.abs(true).max())


def similarity(x: Any, y: Any) -> Any:
    return tf.image.ssim(x, y, 1.0, filter_size=5)


def correlation(x: Any, y: Any) -> Any:
    """In windows of ones, as programs for registration write it."""

    def add_up(z: Any) -> Any:
        return tf.nn.conv2d(z, tf.ones([5, 5, 1, 1]), 1, "SAME")

    x, y = x[..., :1], y[..., :1]
    across = add_up(x * y) - add_up(x) * add_up(y) / 25
    variances = (add_up(z * z) - add_up(z) * add_up(z) / 25 for z in (x, y))
    return across * across / (tf.reduce_prod(tf.stack([*variances]), 0) + 1e-8)


def gradient_of_similarity(x: Any, y: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(y)
        value = tf.reduce_mean(similarity(x, y))
    return tape.gradient(value, y)


def second_differences(x: Any, _: Any) -> Any:
    return tf.einsum("ij,bjkc->bikc", SECOND[:SIDE, :SIDE], x)


def made_differences(x: Any, _: Any) -> Any:
    beside = tf.linalg.diag(tf.ones([SIDE - 1]), k=1)
    return tf.einsum("ij,bjkc->bikc", beside + tf.transpose(beside) - 2 * tf.eye(SIDE), x)


def laplacian_of_channels(x: Any, _: Any) -> Any:
    filters = CROSS[..., None, None] * np.eye(3, dtype=np.float32)
    return tf.nn.conv2d(x, filters, 1, "VALID")


def explicit_steps(x: Any, _: Any) -> Any:
    stencil = SECOND[:SIDE, :SIDE]

    def body(i: Any, old: Any, new: Any) -> Any:
        change = tf.matmul(stencil, new) + tf.matmul(new, stencil)
        return i + 1, new, 2 * new - old + 0.25 * change

    first = x[0, ..., 0]
    loop = tf.while_loop(lambda i, *_: i < 20, body, (0, first, first))
    return loop[2] - first


def angles(x: Any, _: Any) -> Any:
    positions = tf.range(tf.shape(tf.tile(x, [64, 1, 1, 1]))[0] * SIDE, dtype=tf.float32)
    return tf.sin(tf.einsum("i,j->ij", positions, 10000.0 ** -tf.linspace(0.0, 1.0, 32)))


def running_counts(x: Any, _: Any) -> Any:
    taken = tf.cast(tf.reshape(x, (-1, 3)) > 0.5, tf.float32)
    triangle = tf.linalg.band_part(tf.ones([2 * SIDE * SIDE] * 2), -1, 0)
    return tf.matmul(triangle, taken)


def confusion(x: Any, y: Any) -> Any:
    one, other = (tf.one_hot(tf.cast(4 * tf.reshape(z, [-1]), tf.int32), 4) for z in (x, y))
    return tf.matmul(one, other, transpose_a=True)


WRITTEN = [
    similarity,
    correlation,
    gradient_of_similarity,
    second_differences,
    made_differences,
    laplacian_of_channels,
    explicit_steps,
    angles,
    running_counts,
    confusion,
]


WHOLE: dict[str, Function] = {
    "selected": lambda x: tf.where(x > 0.5, 1.0, 0.0),
    "the others": lambda x: 1.0 - tf.cast(x > 0.5, tf.float32),
    "both": lambda x: tf.cast(x > 0.2, tf.float32) * tf.cast(x < 0.9, tf.float32),
    "side by side": lambda x: tf.concat([tf.cast(x > 0.5, tf.float32), tf.ones_like(x)], 1),
    "rounded": lambda x: tf.maximum(tf.round(30.0 * x), 0.0),
    "signs": lambda x: tf.nn.relu(tf.sign(x - 0.5)),
}


@pytest.mark.parametrize("form", WHOLE)
def test_whole_numbers_add_up_to_all_they_are(form: str) -> None:
    def count(x: Any) -> Any:
        return tf.matmul(WHOLE[form](x), WHOLE[form](x), transpose_a=True)

    found = trace(count, tf.TensorSpec((None, WIDTH)))  # else TensorFlow folds what is like it
    values = DRAW.uniform(size=(1000, WIDTH)).astype(np.float32)
    assert error(found, CPU, values) == 0.0 < error(found, OFF, values)


def test_whole_numbers_add_up_with_a_vector() -> None:
    def count(x: Any) -> Any:
        above, taken = (tf.cast(x > share, tf.float32) for share in (0.2, 0.8))
        return tf.linalg.matvec(above, 3.0 - taken[:, 0], transpose_a=True)

    found = trace(count, tf.TensorSpec((1000, WIDTH)))
    values = DRAW.uniform(size=(1000, WIDTH)).astype(np.float32)
    assert error(found, CPU, values) == 0.0 < error(found, OFF, values)


def classes(x: Any) -> Any:
    return tf.one_hot(tf.cast(1000 * x[:, 0], tf.int32) % 4, 4)


def by_equality(x: Any) -> Any:
    equal = tf.equal(tf.range(4)[:, None], tf.cast(1000 * x[:, 0], tf.int32) % 4)
    return tf.cast(equal, tf.float32) @ x


BY_CLASSES: dict[str, Function] = {
    "by a matrix": lambda x: tf.matmul(classes(x), x, transpose_a=True),
    "from the left": lambda x: tf.transpose(tf.transpose(x) @ classes(x)),
    "by an equation": lambda x: tf.einsum("nk,nd->kd", classes(x), x),
    "of a vector": lambda x: tf.linalg.matvec(classes(x), x[:, 0], transpose_a=True),
    "by equality": by_equality,
    "of squares": lambda x: tf.transpose(classes(x)) @ (x * x),
    "numbers with a vector": lambda x: tf.matmul(tf.round(x[:, :1]), classes(x), transpose_a=True),
}


@pytest.mark.parametrize("form", BY_CLASSES)
def test_data_adds_up_by_classes_as_in_float32(form: str) -> None:
    found = trace(BY_CLASSES[form], tf.TensorSpec((1000, WIDTH)))
    values = DRAW.uniform(300, 301, size=(1000, WIDTH)).astype(np.float32)
    assert error(found, CPU, values) < 1e-6 < error(found, OFF, values)


def one_hot_columns(x: Any) -> Any:
    return tf.one_hot(tf.argmax(x, 0), WIDTH, axis=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: tf.matmul(tf.one_hot(tf.argmax(x, 1), WIDTH), x @ w, transpose_a=True),
        lambda x, w: tf.matmul(tf.one_hot(tf.argmax(x, 1), WIDTH), w, transpose_a=True) @ x,
        lambda x, w: tf.one_hot(tf.argmax(x, 1), WIDTH) @ w @ x,
        lambda x, w: tf.matmul(one_hot_columns(x), x, transpose_a=True) @ w,
    ],
    ids=["codes of a network", "weights", "an embedding", "along another axis"],
)
def test_what_a_network_adds_up_by_classes_goes_low(function: Callable[[Any, Any], Any]) -> None:
    found = with_variable(function)
    assert len(found) == 2 and all(d.converted for d in found)


FEW_BITS: dict[str, Function] = {
    "binary": tf.sign,
    "binary by selection": lambda w: tf.where(w > 0.0, 1.0, -1.0),
    "straight through": lambda w: w + tf.stop_gradient(tf.sign(w) - w),
    "of steps": lambda w: tf.round(30.0 * w),
    "of a scale": lambda w: tf.round(30.0 * w) / 30.0,
}


@pytest.mark.parametrize("form", FEW_BITS)
def test_layers_of_few_bits_go_low(form: str) -> None:
    weights = tf.Variable(WEIGHTS)

    def network(x: Any) -> Any:
        first = tf.matmul(FEW_BITS[form](x), FEW_BITS[form](weights))
        second = tf.matmul(FEW_BITS[form](first), FEW_BITS[form](tf.transpose(weights)))
        query = FEW_BITS[form](tf.nn.relu(second))
        return tf.nn.softmax(tf.matmul(query, tf.sign(first), transpose_b=True))

    low = [d.converted for d in decisions(network, CPU, (WIDTH, WIDTH))]
    assert all(low) and len(low) == 3


def test_a_triangle_is_one_however_many_rows_there_are() -> None:
    def totals(x: Any) -> Any:
        return tf.linalg.band_part(tf.ones([tf.shape(x)[0]] * 2), -1, 0) @ x

    found = trace(totals, tf.TensorSpec((None, WIDTH)))
    values = DRAW.uniform(300, 301, size=(1000, WIDTH)).astype(np.float32)
    assert error(found, CPU, values) < 1e-5 < 1e-3 < error(found, OFF, values)


@pytest.mark.parametrize("function", WRITTEN)
def test_it_gives_what_float32_does(function: Function) -> None:
    found = trace(function, *[tf.TensorSpec((2, SIDE, SIDE, 3))] * 2)
    x = smooth(2, SIDE, SIDE, 3)
    values = x, x + 0.002 * np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
    assert error(found, CPU, *values) < 1e-5
    assert error(found, CONFIGS["GPU"], *values) < 1e-5
    assert error(found, OFF, *values) > 1e-3  # what the rule is for


def test_it_gives_what_float32_does_behind_a_network() -> None:
    """What the window reads of the network is rounded once; its squares are not."""

    def step(x: Any, w: Any) -> Any:
        return similarity(x, tf.sigmoid(tf.nn.conv2d(x, w, 1, "SAME")))

    found = trace(step, tf.TensorSpec((2, SIDE, SIDE, 3)), tf.TensorSpec((3, 3, 3, 3)))
    values = smooth(2, SIDE, SIDE, 3), np.full((3, 3, 3, 3), 0.01, np.float32)
    assert error(found, CPU, *values) < 0.05 < error(found, OFF, *values)
    kinds = [d.op for d in decisions_of(found.rewrite(CPU).report) if d.converted]
    assert "Conv2D" in kinds and "DepthwiseConv2dNative" not in kinds


def frozen(x: Any) -> Any:
    """Constants are weights; some are stored as integers."""
    stored = tf.constant((WEIGHTS * 100).astype(np.int8))
    x = tf.nn.relu(x @ tf.constant(WEIGHTS)) @ (tf.cast(stored, tf.float32) * 0.01)
    return x @ tf.identity(tf.transpose(tf.constant(WEIGHTS)))


def mean_of_outputs(x: Any) -> Any:
    """The gradient of a mean is a constant."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = tf.reduce_mean(tf.nn.relu(x @ x) @ x)
    return tape.gradient(value, x)


def mean_of_windows(x: Any) -> Any:
    with tf.GradientTape() as tape:
        image = tf.reshape(x, (1, 16, 32, 8))
        tape.watch(image)
        value = tf.reduce_mean(
            tf.nn.conv2d(tf.nn.conv2d(image, FILTER, 1, "SAME"), FILTER, 1, "SAME")
        )
    return tape.gradient(value, image)


def picked_at_random(x: Any) -> Any:
    return tf.one_hot(tf.random.uniform((WIDTH,), 0, WIDTH, tf.int32), WIDTH) @ x


def of_doubles(x: Any) -> Any:
    x = tf.cast(tf.cast(x, tf.float64), tf.float32)
    return x @ tf.transpose(x)


def recurrent(x: Any) -> Any:
    """States that start as constants."""

    def body(i: Any, h: Any, c: Any) -> Any:
        return i + 1, tf.tanh(h @ x), tf.tanh(c @ x)

    loop = tf.while_loop(lambda i, *_: i < 4, body, (0, tf.eye(WIDTH), tf.zeros_like(x)))
    return loop[1] + loop[2]


def one_hot_by_weights(x: Any) -> Any:
    return tf.one_hot(tf.argmax(x, -1), WIDTH) @ x


def mask_by_features(x: Any) -> Any:
    return tf.cast(x > 0, tf.float32) @ x


def blur_before_a_convolution(x: Any) -> Any:
    image = tf.nn.relu(tf.nn.conv2d(tf.reshape(x, (1, 16, 32, 8)), FILTER, 1, "SAME"))
    window = np.tile(BLUR[..., None, None], (1, 1, 8, 1))
    return tf.nn.conv2d(
        tf.nn.depthwise_conv2d(image, window, (1, 2, 2, 1), "SAME"), FILTER, 1, "SAME"
    )


def diagonals(x: Any) -> Any:
    """They move or scale."""
    return tf.nn.relu(x @ tf.eye(WIDTH)) @ np.diag(np.float32([1, 2] * (WIDTH // 2)))


def dispatched(x: Any) -> Any:
    """Experts and places: nothing is added up."""
    one = tf.one_hot(tf.argmax(x, -1), WIDTH)
    return tf.einsum("sec,sd->ecd", tf.einsum("se,sc->sec", one, one), x)


@pytest.mark.parametrize(
    "function",
    [
        frozen,
        mean_of_outputs,
        mean_of_windows,
        picked_at_random,
        of_doubles,
        recurrent,
        one_hot_by_weights,
        mask_by_features,
        blur_before_a_convolution,
        diagonals,
        dispatched,
    ],
)
def test_networks_are_planned_as_ever(function: Function) -> None:
    found = decisions(function, CPU, (WIDTH, WIDTH))
    assert found and all(d.converted for d in found)


def with_variable(function: Callable[[Any, Any], Any]) -> list[Any]:
    variable = tf.Variable(WEIGHTS)
    return decisions(lambda x: function(x, variable), CPU, (WIDTH, WIDTH))


def test_a_constant_may_enter_a_loop() -> None:
    def steps(x: Any) -> Any:
        stencil = tf.constant(SECOND)
        loop = tf.while_loop(
            lambda i, _: i < 20,
            lambda i, h: (i + 1, tf.tanh(tf.tanh(stencil @ h) @ (h @ h)) + tf.random.normal(())),
            (0, x),
        )
        return loop[1]

    found = decisions(steps, CPU, (WIDTH, WIDTH))
    assert [d.converted for d in found] == [False, True, True]
    assert found[0].reason is Reason.CONSTANT_OPERAND


def test_with_a_variable_a_stored_constant_is_no_weight() -> None:
    (features, network) = with_variable(lambda x, w: tf.sin(x @ tf.constant(WEIGHTS)) @ w)
    assert (features.reason, network.converted) == (Reason.CONSTANT_OPERAND, True)


def test_beside_what_counts_a_stored_constant_is_a_weight() -> None:
    """A frozen network that ends where no other product is behind, and a counter of its calls."""
    counter = tf.Variable(0, dtype=tf.int64)

    def network(x: Any) -> Any:
        counter.assign(counter + 1)
        return tf.math.sin(tf.nn.relu(x @ tf.constant(WEIGHTS)) @ tf.constant(WEIGHTS))

    assert [d.converted for d in decisions(network, CPU, (WIDTH, WIDTH))] == [True] * 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x @ tf.nn.tanh(tf.constant(WEIGHTS) @ w),  # data that a program has in it
        lambda x, w: x @ tf.transpose(tf.sin(tf.range(64.0)[:, None] / tf.range(1.0, 65.0)) @ w),
        lambda x, w: tf.nn.relu(tf.nn.relu(x @ tf.constant(WEIGHTS)) @ tf.constant(WEIGHTS)) @ w,
        lambda x, w: tf.nn.relu(x @ tf.constant(WEIGHTS) + tf.constant(WEIGHTS[0])) @ w,
        lambda x, w: (x + tf.nn.relu(x @ tf.constant(WEIGHTS)) @ tf.constant(WEIGHTS)) @ w,
    ],
    ids=["data", "relative positions", "a frozen network before", "a bias", "a residual block"],
)
def test_what_a_network_does_with_constants_goes_low(function: Callable[[Any, Any], Any]) -> None:
    found = with_variable(function)
    assert found and all(d.converted for d in found)


def captured_decisions(function: Function) -> list[Any]:
    """Those of a function whose constants are eager tensors that it captures."""
    report = traced(function, tf.TensorSpec((WIDTH, WIDTH))).result(CPU).report
    return [d for d in decisions_of(report) if any(name in d.op for name in PRODUCTS)]


def test_a_captured_table_is_a_constant_in_calls_and_loops_too() -> None:
    stencil = tf.constant(SECOND)
    inner = tf.function(lambda x: tf.tanh(stencil @ x), autograph=False)

    def steps(x: Any) -> Any:
        x = tf.tanh(inner(x) @ x)
        return tf.while_loop(
            lambda i, _: i < 20,
            lambda i, h: (i + 1, tf.tanh(tf.tanh(stencil @ h) @ (h @ h))),
            (0, x),
        )[1]

    found = captured_decisions(steps)
    assert sorted(d.converted for d in found) == [False, False, True, True, True]
    assert {d.reason for d in found if not d.converted} == {Reason.CONSTANT_OPERAND}


def test_captured_weights_are_weights_where_stored_ones_are() -> None:
    table, variable = tf.constant(WEIGHTS), tf.Variable(WEIGHTS)
    moved = tf.constant(np.eye(WIDTH, dtype=np.float32))
    large = tf.zeros((8 * WIDTH, 8 * WIDTH * 2))  # of one value, which is not looked for

    def network(x: Any) -> Any:
        return tf.nn.relu(tf.nn.relu(x @ table) @ moved) @ tf.transpose(table)

    def features(x: Any) -> Any:
        wide = tf.sin(tf.tile(x, (1, 8)) @ large)
        return tf.sin(x @ table) @ variable, wide

    assert [d.converted for d in captured_decisions(network)] == [True] * 3
    assert [d.converted for d in captured_decisions(lambda x: network(x) @ variable)] == [True] * 4
    kept = [d.reason for d in captured_decisions(features) if not d.converted]
    assert kept == [Reason.CONSTANT_OPERAND] * 2


def test_the_reason_is_told_but_in_parity() -> None:
    shape = (2, SIDE, SIDE, 3)
    reasons = {d.reason for d in decisions(laplacian_of_channels, CPU, shape, shape)}
    assert reasons == {Reason.CONSTANT_OPERAND}
    parity = dataclasses.replace(CPU, parity=True)
    assert all(d.converted for d in decisions(laplacian_of_channels, parity, shape, shape))
