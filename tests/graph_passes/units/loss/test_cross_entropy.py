"""Cross entropies with labels: what they become, that they give the same, and where they stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from cpu_units import HAS_ONEDNN, NO_ONEDNN
from traced_graphs import Traced, node_types, of_op, trace

from graph_passes import PrecisionConfig
from graph_passes.policy.cost_table_files import shipped_table
from graph_passes.units.loss.cross_entropy import RULE

CPU = PrecisionConfig(
    target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("cast-cut",))
)
GPU = dataclasses.replace(CPU, device="GPU")
CLASSES, WIDTH = 1200, 16
FLOAT = tf.float32.as_datatype_enum
INFINITY, NAN = float("inf"), float("nan")
random = np.random.default_rng(0)


def losses(x: tf.Tensor, w: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.matmul(x, w))


def step(x: tf.Tensor, w: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
    """A loss of weighted rows, so that a gradient of its own flows into each."""
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        loss = tf.reduce_sum(losses(x, w, labels) * tf.reduce_sum(x * x, 1))
    return [loss, *tape.gradient(loss, [x, w])]


def traced_step(
    function: Callable[..., object] = step,
    rows: int | None = 64,
    classes: int = CLASSES,
    labels: tf.DType = tf.int64,
) -> Traced:
    specs = tf.TensorSpec((rows, WIDTH)), tf.TensorSpec((WIDTH, classes))
    return trace(function, *specs, tf.TensorSpec((rows,), labels))


def given(rows: int = 64, labels: tf.DType = tf.int64) -> list[np.ndarray]:
    x, w = random.normal(size=(rows, WIDTH)), random.normal(size=(WIDTH, CLASSES))
    return [
        x.astype(np.float32),
        w.astype(np.float32),
        random.integers(0, CLASSES, rows).astype(labels.as_numpy_dtype),
    ]


@pytest.mark.parametrize("labels", [tf.int32, tf.int64])
@pytest.mark.parametrize("rows", [64, None])
def test_loss_and_gradient_are_as_before(rows: int | None, labels: tf.DType) -> None:
    traced, inputs = traced_step(rows=rows, labels=labels), given(labels=labels)
    fusion = traced.find(CPU)
    assert RULE in node_types(fusion)
    assert not of_op(fusion.proto, "SparseSoftmaxCrossEntropyWithLogits")
    for old, new in zip(
        traced.run(traced.graph_def, *inputs), traced.run(fusion.proto, *inputs), strict=True
    ):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5 * np.abs(old).max())


def test_classes_that_tensorflow_forgets_with_the_batch_count() -> None:
    def sequences(x: tf.Tensor, w: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(w)
            logits = tf.einsum("btd,dc->btc", x, w)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return [loss, tape.gradient(loss, w)]

    specs = tf.TensorSpec((None, 16, WIDTH)), tf.TensorSpec((WIDTH, CLASSES))
    traced = trace(sequences, *specs, tf.TensorSpec((None, 16), tf.int64))
    (before,) = of_op(traced.graph_def, "SparseSoftmaxCrossEntropyWithLogits")
    assert traced.shapes(before.input[0]) == ((None, None),)
    config = dataclasses.replace(CPU, unknown_dimension=4)
    fusion = traced.find(config)
    assert not of_op(fusion.proto, "SparseSoftmaxCrossEntropyWithLogits")
    x, w, labels = given()
    inputs = [x.reshape(4, 16, WIDTH), w, labels.reshape(4, 16)]
    for old, new in zip(
        traced.run(traced.graph_def, *inputs), traced.run(fusion.proto, *inputs), strict=True
    ):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5 * np.abs(old).max())


def test_all_of_it_stays_float32_and_what_comes_out_is_cast_before_labels_are_put_in() -> None:
    after = traced_step().rewrite(CPU).graph_def
    assert {node.attr["T"].type for node in of_op(after, "MatMul")} == {CPU.target}
    for op in ("Exp", "Max", "Log", "Sub"):
        assert {node.attr["T"].type for node in of_op(after, op)} == {FLOAT}
    (gradient,) = of_op(after, "TensorScatterUpdate")
    makers = {node.name: node for node in after.node}
    casts = [makers[name] for name in (gradient.input[0], gradient.input[2])]
    assert [cast.attr["DstT"].type for cast in casts] == [CPU.target] * 2
    assert [makers[cast.input[0]].op for cast in casts] == ["Mul", "Sub"]
    assert {node.op for node in after.node if gradient.name in node.input} == {"MatMul"}


def test_by_measured_times_labels_are_put_in_behind_the_cast_too() -> None:
    """TensorFlow copies what a TensorScatterUpdate is of: a copy of half the size."""
    config = dataclasses.replace(CPU, cost_table=shipped_table("cpu-avx512_bf16", "bfloat16"))
    specs = tf.TensorSpec((512, 256)), tf.TensorSpec((256, 8000)), tf.TensorSpec((512,), tf.int64)
    after = trace(step, *specs).rewrite(config).graph_def
    (gradient,) = of_op(after, "TensorScatterUpdate")
    assert gradient.attr["T"].type == CPU.target


def test_a_loss_alone_makes_no_gradient() -> None:
    traced, inputs = traced_step(losses), given()
    after = traced.find(CPU).proto
    assert of_op(after, "Exp") and not of_op(after, "TensorScatterUpdate")
    (old,), (new,) = traced.run(traced.graph_def, *inputs), traced.run(after, *inputs)
    np.testing.assert_allclose(new, old, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not HAS_ONEDNN, reason=f"{NO_ONEDNN}, whose allocator counts")
def test_no_more_memory_than_before() -> None:
    """The gradient takes the place of the logits, as in the kernel of TensorFlow's op."""
    traced, inputs = traced_step(rows=512), given(rows=512)
    off = dataclasses.replace(CPU, disabled_rules=CPU.disabled_rules | {RULE})
    graphs = (traced.rewrite(config).graph_def for config in (off, CPU))
    before, after = (_peak(traced, graph, inputs) for graph in graphs)
    assert after <= 1.01 * before


def _peak(traced: Traced, graph_def: object, inputs: list[np.ndarray]) -> int:
    """The bytes that the tensors of a graph take at once, beside those that are fed."""
    function = tf.compat.v1.wrap_function(lambda: tf.import_graph_def(graph_def, name=""), [])
    pruned = function.prune(list(traced.arguments), list(traced.results))
    given = list(map(tf.constant, inputs))
    pruned(*given)
    memory = tf.config.experimental
    before = memory.get_memory_info("CPU:0")["current"]
    memory.reset_memory_stats("CPU:0")
    pruned(*given)
    peak: int = memory.get_memory_info("CPU:0")["peak"] - before
    return peak


def of_logits(logits: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
    """The op itself beside a product, without which nothing is looked for."""
    made = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=logits, labels=labels)
    return [made.loss, made.backprop, tf.matmul(logits[:2, :2], logits[:2, :2])]


ROWS = {
    "a label far from the largest": [0.0, 1e4],
    "a label without a chance": [-INFINITY],
    "another class without a chance": [1.0, -INFINITY],
    "a large label": [1e30],
    "both ends of the range": [3e38, -3e38],
    "all alike": [7.0] * CLASSES,
}


@pytest.mark.parametrize("first", ROWS.values(), ids=ROWS)
def test_logits_of_any_size(first: list[float]) -> None:
    logits = random.normal(size=(64, CLASSES)).astype(np.float32)
    logits[0, : len(first)] = first
    spec = tf.TensorSpec((64, CLASSES)), tf.TensorSpec((64,), tf.int32)
    traced, labels = trace(of_logits, *spec), np.zeros(64, np.int32)
    before = traced.run(traced.graph_def, logits, labels)
    after = traced.run(traced.find(CPU).proto, logits, labels)
    for old, new in zip(before[:2], after[:2], strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", [[NAN], [1.0, NAN], [INFINITY], [1.0, INFINITY]], ids=str)
def test_what_is_no_number_shows_in_loss_and_gradient(first: list[float]) -> None:
    logits = random.normal(size=(64, CLASSES)).astype(np.float32)
    logits[0, : len(first)] = first
    spec = tf.TensorSpec((64, CLASSES)), tf.TensorSpec((64,), tf.int32)
    traced = trace(of_logits, *spec)
    loss, gradient, _ = traced.run(traced.find(CPU).proto, logits, np.zeros(64, np.int32))
    assert np.isnan(loss[0]) and np.isnan(gradient[0]).any()
    assert np.isfinite(loss[1:]).all() and np.isfinite(gradient[1:]).all()


@pytest.mark.parametrize("label", [-1, CLASSES])
def test_an_illegal_label_is_an_error_that_names_it(label: int) -> None:
    traced, inputs = traced_step(), given()
    inputs[2][5] = label
    after = traced.find(CPU).proto
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"indices\[5\] = \[5, {label}\]"):
        traced.run(after, *inputs)


@pytest.mark.parametrize("function", [losses, step])
@pytest.mark.parametrize("count", [1, 3, 100])
def test_labels_of_another_number_than_rows_are_an_error(
    function: Callable[..., object], count: int
) -> None:
    traced, inputs = traced_step(function, rows=None), given()
    inputs[2] = np.resize(inputs[2], count)
    fusion = traced.find(CPU)
    assert RULE in node_types(fusion)
    for graph in (traced.graph_def, fusion.proto):
        with pytest.raises(tf.errors.InvalidArgumentError):
            traced.run(graph, *inputs)


def test_one_gradient_for_many_weights_is_multiplied_outside() -> None:
    def repeated(x: tf.Tensor, w: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        made = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(
            features=tf.matmul(x, w), labels=labels
        )
        return made.backprop * tf.expand_dims(tf.range(5.0), 1)

    specs = tf.TensorSpec((1, WIDTH)), tf.TensorSpec((WIDTH, 9000)), tf.TensorSpec((1,), tf.int64)
    traced = trace(repeated, *specs)
    fusion = traced.find(CPU)
    assert RULE in node_types(fusion)
    inputs = [np.ones((1, WIDTH), np.float32), np.ones((WIDTH, 9000), np.float32), np.array([7])]
    (before,), (after,) = (traced.run(graph, *inputs) for graph in (traced.graph_def, fusion.proto))
    np.testing.assert_allclose(after, before, atol=1e-6)


def test_no_rows_at_all() -> None:
    traced = traced_step(losses, rows=None)
    after = traced.find(dataclasses.replace(CPU, unknown_dimension=64)).proto
    assert of_op(after, "Exp")
    (found,) = traced.run(after, *given(rows=0))
    assert found.shape == (0,)


@pytest.mark.parametrize(
    ("config", "classes"),
    [
        (GPU, CLASSES),
        (dataclasses.replace(CPU, fused=True), CLASSES),
        (CPU, 10),
        (dataclasses.replace(CPU, disabled_rules=frozenset((RULE,))), CLASSES),
    ],
    ids=["GPU", "compiled", "few classes", "switched off"],
)
def test_where_the_op_is_cheap_it_stays(config: PrecisionConfig, classes: int) -> None:
    assert RULE not in node_types(traced_step(classes=classes).find(config))


def test_an_output_that_is_to_be_preserved_is_a_near_miss() -> None:
    traced = traced_step()
    (op,) = of_op(traced.graph_def, "SparseSoftmaxCrossEntropyWithLogits")
    fusion = traced.find(CPU, preserve=[op.name])
    assert RULE not in node_types(fusion)
    assert f"{op.name!r} is to be preserved" in [miss.why for miss in fusion.misses]
