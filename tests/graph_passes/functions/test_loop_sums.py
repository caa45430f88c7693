"""Sums of weight gradients leave loops: what is in the functions then, and what they compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import call_graphs
import graph_checks
import keras
import numpy as np
import pytest
import tensorflow as tf
from call_graphs import BFLOAT16, build, loops, nodes_named
from keras import layers
from tensorflow.core.framework import function_pb2
from traced_steps import Rewritten, Step, library, traced

from graph_passes import PrecisionConfig, rewrite_function_def, rewrite_graph_def
from graph_passes.policy.cost_table_files import shipped_table
from graph_passes.policy.rules import Rule
from graph_passes.units.reduction.ones_product import FEW_ELEMENTS

RULE = "loop-gradient-sums"
# Graphs as small as these are not worth their Casts.
PAINTED = frozenset(("cast-cut",))
CONFIG = PrecisionConfig(target_dtype="bfloat16", device="CPU", disabled_rules=PAINTED)
OFF = PrecisionConfig(
    target_dtype="bfloat16", device="CPU", disabled_rules=PAINTED | {RULE, "small-step"}
)
FUSED = dataclasses.replace(CONFIG, fused=True)
PARITY = PrecisionConfig(target_dtype="bfloat16", device="CPU", parity=True)
GPU = PrecisionConfig(target_dtype="float16", device="GPU")
KEPT = ("x", "out", "gradient", "init")
ROUNDS, ROWS, WIDTH, UNITS = 5, 6, 24, 32
RNG = np.random.default_rng(0)


def pushes(body: function_pb2.FunctionDef) -> list[Any]:
    return [
        n for n in nodes_named(body.node_def, "TensorListPushBack") if "gradient_rows" in n.name
    ]


def products_behind(rewritten: Rewritten) -> list[Any]:
    """The products that the rule has put behind loops."""
    return [
        node
        for function in rewritten.functions.values()
        for node in nodes_named(function.node_def, "MatMul")
        if "gradient_sums" in node.name and node.attr["transpose_a"].b
    ]


def sums_in_loops(rewritten: Rewritten) -> list[str]:
    """The sums with a product of the weight's shape for a term that bodies still have."""
    found: list[str] = []
    for _, body in rewritten.loops():
        weights = {
            f"{n.name}:product:0"
            for n in body.node_def
            if n.op == "MatMul" and n.attr["transpose_a"].b
        }
        found.extend(n.name for n in nodes_named(body.node_def, "AddN") if weights & {*n.input})
    return found


def worst_error(wanted: list[Any], got: list[Any]) -> float:
    """The largest difference in a tensor, measured by the largest element of that tensor."""
    assert [one.shape for one in wanted] == [other.shape for other in got]
    return max(
        float(np.abs(one - other).max() / max(np.abs(one).max(), 1e-30))
        for one, other in zip(wanted, got, strict=True)
    )


def floats(step: Step, *arguments: Any) -> list[np.ndarray]:
    return [made.numpy() for made in step.concrete(*map(tf.convert_to_tensor, arguments))]


# A recurrence written by hand: h = tanh(x[t] @ kernel + h @ recurrent + bias)


def recurrence(
    rows: int | None = ROWS, rounds: int | None = None, **options: Any
) -> tuple[Step, tuple[tf.Variable, ...]]:
    """The gradients of a recurrent layer by inputs, initial state and number of rounds."""
    kernel = tf.Variable(RNG.standard_normal((WIDTH, UNITS)).astype(np.float32) / 5)
    recurrent = tf.Variable(RNG.standard_normal((UNITS, UNITS)).astype(np.float32) / 6)
    bias = tf.Variable(RNG.standard_normal(UNITS).astype(np.float32))

    def gradients(x: tf.Tensor, h: tf.Tensor, count: tf.Tensor) -> list[tf.Tensor]:
        def layer(t: tf.Tensor, h: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            product = tf.matmul(x[t], kernel) + tf.matmul(h, recurrent)
            return t + 1, tf.tanh(tf.nn.bias_add(product, bias))

        with tf.GradientTape() as tape:
            _, last = tf.while_loop(lambda t, _: t < count, layer, (0, h), **options)
            loss = tf.reduce_sum(last * last)
        return tape.gradient(loss, (kernel, recurrent, bias))

    specs = (
        tf.TensorSpec((rounds, rows, WIDTH)),
        tf.TensorSpec((rows, UNITS)),
        tf.TensorSpec((), tf.int32),
    )
    return traced(gradients, *specs), (kernel, recurrent, bias)


def inputs(rounds: int = ROUNDS, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    x = RNG.standard_normal((rounds, rows, WIDTH)).astype(np.float32)
    return x, RNG.standard_normal((rows, UNITS)).astype(np.float32)


def test_products_stand_behind_the_loop_in_the_target_dtype() -> None:
    step, _ = recurrence()
    new = step.rewritten(CONFIG)
    products = products_behind(new)
    assert [node.attr["T"].type for node in products] == [BFLOAT16, BFLOAT16]
    assert sums_in_loops(new) == []
    (body,) = (body for _, body in new.loops() if pushes(body))
    # Inputs, states and the gradient that kernel, recurrent and bias share.
    assert [node.attr["element_dtype"].type for node in pushes(body)] == [BFLOAT16] * 3
    assert nodes_named(body.node_def, "BiasAddGrad") == []
    lists = [n for n in new.step.node_def if n.op in ("EmptyTensorList", "TensorListConcatV2")]
    added = [node.attr["element_dtype"].type for node in lists if "gradient_sums" in node.name]
    assert added == [BFLOAT16] * 6
    # They start from zeros, which need not be added.
    assert not [n for n in new.step.node_def if n.op == "AddN" and "gradient_sums" in n.name]


def test_a_bias_leaves_the_loop_where_a_product_with_ones_would_pay_as_well() -> None:
    units, rows = 512, FEW_ELEMENTS // 512
    weight = tf.Variable(RNG.standard_normal((units, units)).astype(np.float32) / 40)
    bias = tf.Variable(tf.zeros(units))

    def gradients(h: tf.Tensor) -> list[tf.Tensor]:
        layer = lambda t, h: (t + 1, tf.tanh(tf.nn.bias_add(h @ weight, bias)))  # noqa: E731
        with tf.GradientTape() as tape:
            _, last = tf.while_loop(lambda t, _: t < ROUNDS, layer, (0, h))
            loss = tf.reduce_sum(last * last)
        return tape.gradient(loss, (weight, bias))

    new = traced(gradients, tf.TensorSpec((rows, units))).rewritten(CONFIG)
    assert len(products_behind(new)) == 1
    for _, body in new.loops():
        assert not [node for node in body.node_def if node.op == "BiasAddGrad"]
        assert not [node for node in body.node_def if "ones_product" in node.name]
    assert [node for node in new.step.node_def if "ones_product/MatMul" in node.name]


def test_loop_and_functions_have_the_same_variables() -> None:
    new = recurrence()[0].rewritten(CONFIG)
    for loop, body in new.loops():
        cond = new.functions[loop.attr["cond"].func.name]
        types = list(loop.attr["T"].list.type)
        assert [arg.type for arg in body.signature.input_arg] == types
        assert [arg.type for arg in body.signature.output_arg] == types
        assert [arg.type for arg in cond.signature.input_arg] == types
        assert len(loop.attr["output_shapes"].list.shape) == len(types)
        assert len([name for name in loop.input if name[0] != "^"]) == len(types)


@pytest.mark.parametrize("rounds", [0, 1, ROUNDS])
@pytest.mark.parametrize("how", ["moved", "bfloat16"])
def test_gradients_of_a_recurrence(how: str, rounds: int) -> None:
    step, _ = recurrence()
    new = step.moved(CONFIG) if how == "moved" else step.rewritten(CONFIG)
    assert len(products_behind(new)) == 2
    arguments = (*inputs(), np.int32(rounds))
    wanted, got = floats(step, *arguments), step.run(new, *arguments)
    assert worst_error(wanted, got) < (1e-5 if how == "moved" else 0.03)
    if not rounds:
        assert not any(made.any() for made in got)


def test_rounds_that_end_early() -> None:
    step, _ = recurrence(maximum_iterations=3)
    arguments = (*inputs(), np.int32(ROUNDS))
    new = step.moved(CONFIG)
    assert len(products_behind(new)) == 2
    assert worst_error(floats(step, *arguments), step.run(new, *arguments)) < 1e-5


def test_batch_of_any_size() -> None:
    """32 rows are assumed, or those of the step before: too many for weights as small as these."""
    step, _ = recurrence(rows=None)
    assert products_behind(step.moved(CONFIG)) == []
    assert "less than 2 times the elements" in str(step.result(CONFIG).report.near_misses)
    assert (
        len(products_behind(step.moved(dataclasses.replace(CONFIG, unknown_dimension=ROWS)))) == 2
    )


@pytest.mark.parametrize("config", [OFF, FUSED, PARITY], ids=["off", "fused", "parity"])
def test_rule_is_out_of_force(config: PrecisionConfig) -> None:
    step, _ = recurrence()
    new = step.rewritten(config)
    assert products_behind(new) == []
    assert not [body for _, body in new.loops() if pushes(body)]


def test_loop_that_is_not_lowered_keeps_its_sums() -> None:
    """Such a loop may be compiled by XLA, where lists have a length known before."""
    step, _ = recurrence()
    function = step.concrete.function_def
    for node in function.node_def:
        if "_lower_using_switch_merge" in node.attr:
            node.attr["_lower_using_switch_merge"].b = False
    result = rewrite_function_def(function, CONFIG, library=library)
    assert result.changed
    assert products_behind(Rewritten(result.proto, result.extra_functions)) == []  # type: ignore[arg-type]


def test_second_rewrite_changes_nothing() -> None:
    step, _ = recurrence()
    new = step.rewritten(CONFIG)
    again = rewrite_function_def(new.step, CONFIG, library=new.functions.get)
    assert not again.changed
    assert not [unit for unit in again.report.fused_units if unit.startswith(RULE)]


def test_originals_are_left_alone() -> None:
    step, _ = recurrence()
    names = [
        node.attr[attr].func.name
        for node in step.concrete.function_def.node_def
        if node.op in ("While", "StatelessWhile")
        for attr in ("body", "cond")
    ]
    before = [library(name) for name in names]
    step.rewritten(CONFIG)
    assert [library(name) for name in names] == before


def test_report_names_the_sums() -> None:
    report = recurrence()[0].result(CONFIG).report
    assert len([unit for unit in report.fused_units if unit.startswith(RULE)]) == 3


def test_plan_for_a_gpu() -> None:
    products = products_behind(recurrence()[0].rewritten(GPU))
    assert {node.attr["T"].type for node in products} == {tf.float16.as_datatype_enum}


# Sums written by hand


def sum_in_a_loop(
    add: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    transpose: tuple[bool, bool] = (True, False),
    extra: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None,
    shape: tuple[int | None, int | None] = (160, 160),
    rounds: int = ROUNDS,
    goes_on: Callable[[tf.Tensor], tf.Tensor] = lambda _: True,
    dtype: tf.DType = tf.float32,
) -> Step:
    """A loop that adds products to a sum that is not zero at first."""

    def total(x: tf.Tensor, d: tf.Tensor, start: tf.Tensor) -> list[tf.Tensor]:
        def body(t: tf.Tensor, made: tf.Tensor, seen: tf.Tensor) -> tuple[tf.Tensor, ...]:
            product = tf.matmul(x[t], d[t], transpose_a=transpose[0], transpose_b=transpose[1])
            seen = seen + extra(made, product) if extra is not None else seen
            return t + 1, add(made, product), seen

        def cond(t: tf.Tensor, made: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            return tf.logical_and(t < rounds, goes_on(made))

        _, made, seen = tf.while_loop(cond, body, (0, start, 0.0))
        return [made, seen]

    left = (ROWS, shape[0]) if transpose[0] else (shape[0], ROWS)
    right = (shape[1], ROWS) if transpose[1] else (ROWS, shape[1])
    return traced(
        total,
        tf.TensorSpec((rounds, *left), dtype),
        tf.TensorSpec((rounds, *right), dtype),
        tf.TensorSpec(shape, dtype),
    )


def add_n(made: tf.Tensor, product: tf.Tensor) -> tf.Tensor:
    return tf.add_n([made, product])


def add_n_later(made: tf.Tensor, product: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([tf.constant(0.0)]):
        return tf.add_n([made, product])


def add_n_before(made: tf.Tensor, product: tf.Tensor) -> tf.Tensor:
    total = tf.add_n([made, product])
    with tf.control_dependencies([product]):
        return tf.identity(total)


@pytest.mark.parametrize(
    ("add", "terms"),
    [
        (add_n, 1),
        (lambda made, product: tf.add_n([product, made]), 1),
        (lambda made, product: tf.add_n([tf.identity(made), product, product]), 2),
    ],
    ids=["sum first", "sum last", "same product twice"],
)
def test_start_of_a_sum_is_added(add: Callable[..., tf.Tensor], terms: int) -> None:
    step = sum_in_a_loop(add)
    new = step.moved(CONFIG)
    assert len(products_behind(new)) == terms
    shapes = [spec.shape for spec in step.concrete.inputs[:3]]
    arguments = [RNG.standard_normal(shape).astype(np.float32) for shape in shapes]
    assert worst_error(floats(step, *arguments), step.run(new, *arguments)) < 1e-5


def test_many_rounds_keep_their_precision() -> None:
    """A loop rounds the sum in every round, one product of all rounds adds up in float32."""
    step = sum_in_a_loop(add_n, rounds=400)
    shapes = [spec.shape for spec in step.concrete.inputs[:3]]
    arguments = [np.abs(RNG.standard_normal(shape)).astype(np.float32) for shape in shapes]
    wanted = floats(step, *arguments)
    moved, kept = (step.run(step.rewritten(config), *arguments) for config in (CONFIG, OFF))
    assert worst_error(wanted, moved) < 0.01
    assert worst_error(wanted, kept) > 0.05


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda: sum_in_a_loop(add_n, extra=lambda made, _: made[0, 0]), "more than the sum reads"),
        (lambda: sum_in_a_loop(add_n, extra=lambda _, p: p[0, 0]), "more than the sum reads"),
        (
            lambda: sum_in_a_loop(add_n, goes_on=lambda made: made[0, 0] < 9),
            "condition reads the sum",
        ),
        (lambda: sum_in_a_loop(add_n_later), "has control inputs"),
        (lambda: sum_in_a_loop(add_n_before), "has control inputs"),
        (lambda: sum_in_a_loop(add_n, shape=(None, None)), "shape of the sum is not known"),
        (lambda: sum_in_a_loop(add_n, (False, False)), "does not sum over the rows"),
        (lambda: sum_in_a_loop(add_n, (True, True)), "does not sum over the rows"),
        (lambda: sum_in_a_loop(add_n, shape=(4, 4)), "less than 2 times the elements"),
        (
            lambda: sum_in_a_loop(lambda made, p: tf.add_n([made, p, tf.ones_like(p)])),
            "not MatMul",
        ),
        (lambda: sum_in_a_loop(lambda made, p: tf.add_n([made, made, p])), "more than one"),
    ],
    ids=[
        *("sum is read", "term is read", "condition", "ordered", "awaited", "of any size"),
        *("by columns", "transposed", "small", "other term", "doubled"),
    ],
)
def test_sum_that_stays(step: Callable[[], Step], why: str) -> None:
    made = step()
    assert products_behind(made.moved(CONFIG)) == []
    assert why in str(made.result(CONFIG).report.near_misses)


@pytest.mark.parametrize(
    ("add", "dtype"),
    [
        (lambda made, product: made + product, tf.float32),
        (lambda made, product: product, tf.float32),
        (lambda _, product: tf.add_n([product, product]), tf.float32),
        (add_n, tf.float64),
    ],
    ids=["broadcasting sum", "no sum", "sum of a round", "float64"],
)
def test_what_is_no_such_sum_is_no_near_miss(add: Callable[..., Any], dtype: tf.DType) -> None:
    step = sum_in_a_loop(add, dtype=dtype)
    assert products_behind(step.moved(CONFIG)) == []
    assert step.result(CONFIG).report.near_misses == ()


def test_a_bias_of_images_stays() -> None:
    """Its gradient is the sum of what is no matrix, however few rows the states have."""
    weight = tf.Variable(RNG.standard_normal((UNITS, UNITS)).astype(np.float32) / 6)
    bias = tf.Variable(tf.zeros(8))

    def gradients(h: tf.Tensor, images: tf.Tensor) -> list[tf.Tensor]:
        def layer(t: tf.Tensor, h: tf.Tensor, made: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return t + 1, tf.tanh(h @ weight), tf.tanh(tf.nn.bias_add(made, bias))

        with tf.GradientTape() as tape:
            _, h, made = tf.while_loop(lambda t, *_: t < ROUNDS, layer, (0, h, images))
            loss = tf.reduce_sum(h * h) + tf.reduce_sum(made)
        return tape.gradient(loss, (weight, bias))

    step = traced(gradients, tf.TensorSpec((1, UNITS)), tf.TensorSpec((1, 4, 4, 8)))
    new = step.moved(CONFIG)
    assert len(products_behind(new)) == 1
    arguments = (inputs(rows=1)[1], RNG.standard_normal((1, 4, 4, 8)).astype(np.float32))
    assert worst_error(floats(step, *arguments), step.run(new, *arguments)) < 1e-5


@pytest.mark.parametrize(
    ("op", "moved"),
    [("MatMul", 0), ("BiasAddGrad", 2), ("AddN", 0)],
)
def test_a_rule_that_keeps_a_part_keeps_the_sum(op: str, moved: int) -> None:
    rule = Rule(action="keep_float32", op=op, why="so", origin="r.toml [1]")
    config = dataclasses.replace(CONFIG, rules=(rule,))
    step, _ = recurrence()
    assert len(products_behind(step.rewritten(config))) == moved
    assert "a rule keeps" in str(step.result(config).report.near_misses)


# Graphs of a session


@pytest.mark.parametrize("shape", [call_graphs.loop, call_graphs.nested_loop])
def test_graph_def(shape: Callable[..., tf.Tensor]) -> None:
    graph = build(shape, rows=1)
    result = rewrite_graph_def(graph.graph_def, CONFIG, preserve=KEPT)
    assert result.failure is None
    graph_checks.assert_calls_agree(result.proto)  # type: ignore[arg-type]
    bodies = [f for f in result.proto.library.function if pushes(f)]  # type: ignore[union-attr]
    assert bodies
    wanted = graph.run()
    for lower in (True, False):
        assert worst_error(wanted, graph.run(result.proto, lower=lower)) < 0.03  # type: ignore[arg-type]


def test_loop_that_is_fetched_keeps_its_sums() -> None:
    graph = build(call_graphs.loop, rows=1)
    names = [node.name for node, _ in loops(graph.graph_def)]
    result = rewrite_graph_def(graph.graph_def, CONFIG, preserve=(*KEPT, *names))
    assert not [f for f in result.proto.library.function if pushes(f)]  # type: ignore[union-attr]


# Keras layers


def keras_step(make: Callable[..., Any], *, masked: bool = False, rows: int | None = ROWS) -> Step:
    keras.utils.set_random_seed(0)
    inner = keras.Input((ROUNDS, WIDTH), batch_size=rows)
    made = layers.Masking()(inner) if masked else inner
    model = keras.Model(inner, layers.Dense(3)(make(made)))

    def gradients(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x) - y) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    return traced(gradients, tf.TensorSpec((rows, ROUNDS, WIDTH)), tf.TensorSpec((rows, 3)))


LAYERS: dict[str, tuple[Callable[..., Any], int]] = {
    "LSTM": (layers.LSTM(UNITS), 2),
    "LSTM without bias": (layers.LSTM(UNITS, use_bias=False), 2),
    "LSTM backwards": (layers.LSTM(UNITS, go_backwards=True), 2),
    "GRU": (layers.GRU(UNITS), 2),
    "SimpleRNN": (layers.SimpleRNN(UNITS), 2),
    "bidirectional": (layers.Bidirectional(layers.GRU(UNITS)), 4),
    "two layers": (
        lambda x: layers.LSTM(UNITS)(layers.LSTM(UNITS, return_sequences=True)(x)),
        4,
    ),
    "two cells": (layers.RNN([layers.LSTMCell(UNITS), layers.LSTMCell(UNITS)]), 4),
}


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_keras_layers(name: str, masked: bool) -> None:
    make, weights = LAYERS[name]
    step = keras_step(make, masked=masked)
    x = RNG.standard_normal((ROWS, ROUNDS, WIDTH)).astype(np.float32)
    if masked:
        x[0, 3:] = 0
        x[1, 1:] = 0
    arguments = (x, RNG.standard_normal((ROWS, 3)).astype(np.float32))
    wanted = floats(step, *arguments)
    moved = step.moved(CONFIG)
    assert len(products_behind(moved)) == weights
    assert worst_error(wanted, step.run(moved, *arguments)) < 1e-5
    low = step.rewritten(CONFIG)
    assert {node.attr["T"].type for node in products_behind(low)} == {BFLOAT16}
    assert sums_in_loops(low) == []
    # Of the last gradient, that of the Dense layer's bias, the sum may leave little.
    assert worst_error(wanted[:-1], step.run(low, *arguments)[:-1]) < 0.05


def test_stateful_layer() -> None:
    step = keras_step(layers.LSTM(UNITS, stateful=True))
    new = step.rewritten(CONFIG)
    assert len(products_behind(new)) == 2
    assert sums_in_loops(new) == []


def test_wide_layer_with_a_batch_of_any_size() -> None:
    step = keras_step(layers.SimpleRNN(160), rows=None)
    x = RNG.standard_normal((7, ROUNDS, WIDTH)).astype(np.float32)
    arguments = (x, RNG.standard_normal((7, 3)).astype(np.float32))
    moved = step.moved(CONFIG)
    assert len(products_behind(moved)) == 1, (
        "24 times 160 are fewer than 2 times 32 rows of 24 and 160"
    )
    assert worst_error(floats(step, *arguments), step.run(moved, *arguments)) < 1e-5


def test_layer_without_the_rule() -> None:
    assert len(sums_in_loops(keras_step(layers.LSTM(UNITS)).rewritten(OFF))) == 2


def test_a_cost_table_weighs_the_products_of_all_rounds() -> None:
    """With the rows of one round, none is worth the Casts of what it reads."""
    table = shipped_table("cpu-avx512_bf16", "bfloat16")
    config = PrecisionConfig(target_dtype="bfloat16", device="CPU", cost_table=table)
    products = products_behind(keras_step(layers.LSTM(512), rows=16).rewritten(config))
    assert BFLOAT16 in {node.attr["T"].type for node in products}
