"""Adam's update of a table of which a step reads some rows: one op, and what it gets wrong."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from programs import Program, trace
from tensorflow.core.framework import node_def_pb2
from test_fused_updates import ADAM, CPU, GPU, rewritten, updates

from graph_passes import RewriteResult

ROWS, WIDTH = 200, 3
IDS = np.array([1, 3, 3, ROWS - 1, 1, 3], np.int32)
Read = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def gathered(table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    return tf.gather(table, ids)


def in_two_places(table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    return tf.concat([tf.gather(table, ids[:4]), tf.gather(table, ids[2:]) * 2.0], 0)


def in_a_matrix(table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.gather(table, tf.reshape(ids, [2, 3])), [6, WIDTH])


def program(
    read: Read = gathered,
    ids: np.ndarray = IDS,
    weights: Any = None,
    spec: Any = None,
    **options: Any,
) -> Program:
    """A step in a function, where all that reads or writes a variable is in order."""
    rng = np.random.default_rng(1)
    table = keras.Variable(rng.standard_normal((ROWS, WIDTH), np.float32), name="table")
    optimizer = keras.optimizers.Adam(0.01, **options)
    optimizer.build([table])
    factors = rng.standard_normal((32, WIDTH), np.float32) if weights is None else weights

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = tf.reshape(read(table.value, ids), [-1, WIDTH])
            loss = tf.reduce_sum(rows**2 * tf.constant(factors)[: tf.shape(rows)[0]])
        before = [slot.value + 0.0 for slot in optimizer.variables[2:]]
        optimizer.apply_gradients([(tape.gradient(loss, table.value), table)])
        behind = [slot.value + 0.0 for slot in (*optimizer.variables[2:], table)]
        return tf.stack([*before, *behind])

    def branch(ids: tf.Tensor) -> tf.Tensor:
        left = tf.zeros((5, ROWS, WIDTH))
        return tf.cond(tf.reduce_all(ids < ROWS), lambda: step(ids), lambda: left)

    known = [tf.TensorSpec(spec, ids.dtype)] if spec else []
    return dataclasses.replace(trace(branch, *known, ids), targets=())


def body(result: RewriteResult) -> list[node_def_pb2.NodeDef]:
    """The nodes of the function that has the update."""
    functions = (list(function.node_def) for function in result.graph_def.library.function)
    return max(functions, key=len)


def require_same_values(program: Program, result: RewriteResult, steps: int) -> None:
    """What is read before and behind each update, and what the variables hold in the end."""
    before, after = program.run(program.graph_def, steps), program.run(result.graph_def, steps)
    assert any(value.shape == (ROWS, WIDTH) for value in before.values())
    for name, old in before.items():
        np.testing.assert_allclose(after[name], old, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("read", [gathered, in_two_places, in_a_matrix])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_table_is_updated_by_one_op_and_its_rows(read, dtype):
    step = program(read, IDS.astype(dtype))
    result = rewritten(step)
    assert updates(result) == {ADAM: 1}
    assert sum(each.fused["fused-update"] for each in result.function_reports.values()) == 1
    ops = Counter(node.op for node in body(result))
    assert (ops["ResourceScatterAdd"], ops["Unique"]) == (1, 1)
    # One sum is over the whole table; those of what was read are few.
    sums = [node for node in body(result) if node.op == "UnsortedSegmentSum"]
    assert Counter("rows_count" in node.input[2] for node in sums) == {True: 2, False: 1}
    require_same_values(step, result, steps=4)


@pytest.mark.parametrize(
    "ids", [[0], [2] * 6, [0, 1, 2, 3, 4, 5], [199, 199, 0, 0, 199, 0]], ids=str
)
@pytest.mark.parametrize("seed", range(3))
def test_rows_read_once_or_many_times(ids, seed):
    """The gradients of a row may add up to nothing, or to more than their squares."""
    weights = np.random.default_rng(seed).choice(np.float32([-2, -1, 1, 3]), (8, WIDTH))
    step = program(ids=np.array(ids, np.int32), weights=weights)
    require_same_values(step, rewritten(step), steps=3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_a_gradient_that_is_not_finite_or_has_no_square(bad):
    weights = np.ones((8, WIDTH), np.float32)
    weights[1] = bad
    step = program(weights=weights)
    result = rewritten(step)
    assert updates(result) == {ADAM: 1}
    with np.errstate(all="ignore"):
        require_same_values(step, result, steps=2)


def test_decay_stays_outside():
    step = program(weight_decay=0.1)
    result = rewritten(step)
    assert updates(result)[ADAM] == 1
    require_same_values(step, result, steps=3)


def slices(of: Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]) -> Program:
    """An update by rows that nothing has gathered from the table."""
    table = keras.Variable(np.ones((ROWS, WIDTH), np.float32))
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build([table])

    def step(values: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        given, rows = of(values, ids)
        optimizer.apply_gradients([(tf.IndexedSlices(given, rows, (ROWS, WIDTH)), table)])
        return tf.constant(0.0)

    return in_a_branch(step)


def in_a_branch(step: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Program:
    """A step by the gradients of some rows, in a function."""

    def branch(values: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        return tf.cond(ids[0] < 100, lambda: step(values, ids), lambda: tf.constant(1.0))

    values = np.random.default_rng(2).standard_normal((6, WIDTH), np.float32)
    return dataclasses.replace(trace(branch, values, IDS), targets=())


def test_an_index_below_0_counts_for_nothing():
    step = slices(lambda values, ids: (values, tf.stack([-1, 0, 3, -1, 0, -7])))
    result = rewritten(step)
    assert updates(result) == {ADAM: 1}
    require_same_values(step, result, steps=3)


def test_an_index_out_of_range_fails():
    step = slices(lambda values, ids: (values, ids + tf.constant([0, 0, 0, 1, 0, 0])))
    result = rewritten(step)
    assert updates(result) == {ADAM: 1}
    with step.running(result.graph_def) as run, pytest.raises(tf.errors.InvalidArgumentError):
        run(step.feeds, step.state, 1)


def known(ids: tf.Tensor) -> tf.Tensor | int:
    return ROWS


def not_known(ids: tf.Tensor) -> tf.Tensor | int:
    return ROWS + 0 * ids[0]


OTHER = "the rows of one sum are not the squares of the other's"


@pytest.mark.parametrize(
    ("squared", "rows", "why"),
    [
        (lambda values, ids: (values**2, ids[::-1]), known, OTHER),
        (lambda values, ids: (tf.square(values[::-1]), ids), known, OTHER),
        (lambda values, ids: (tf.abs(values), ids), known, OTHER),
        (lambda values, ids: (values * 2.0, ids), known, OTHER),
        (lambda values, ids: (values * values, ids), not_known, "how many rows the table has"),
        (lambda values, ids: (values * values, ids), known, None),
    ],
)
def test_sums_that_an_optimizer_by_hand_averages(squared, rows, why):
    table, m, v = (tf.Variable(np.ones((ROWS, WIDTH), np.float32)) for _ in range(3))

    def update(values: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        count = rows(ids)
        m.assign_add((tf.math.unsorted_segment_sum(values, ids, count) - m) * 0.1)
        squares = tf.math.unsorted_segment_sum(*squared(values, ids), count)
        v.assign_add((squares - v) * 0.001)
        table.assign_sub(m * 0.01 / (tf.sqrt(v) + 1e-7))
        return tf.constant(0.0)

    step = in_a_branch(update)
    result = rewritten(step)
    assert (ADAM in updates(result)) is (why is None)
    told = [miss.why for one in result.function_reports.values() for miss in one.near_misses]
    assert len(told) == (why is not None)
    assert all(why in each for each in told)
    require_same_values(step, result, steps=2)


def test_an_average_of_the_last_gradient_alone_is_left():
    step = program(beta_1=0.0)
    result = rewritten(step)
    assert ADAM not in updates(result)
    require_same_values(step, result, steps=2)


@pytest.mark.parametrize(
    ("reads", "spec", "unknown", "is_few"),
    [
        (25, None, 32, True),
        (26, None, 32, False),
        (3, [None, 3], 8, True),
        (3, [None, 3], 9, False),
    ],
)
def test_few_rows_are_worth_it(reads, spec, unknown, is_few):
    """An eighth of the table, by what is assumed where the batch is not known."""
    ids = np.arange(reads, dtype=np.int32)
    if spec is not None:
        ids = ids[None]
    step = program(ids=ids, spec=spec)
    result = rewritten(step, dataclasses.replace(CPU, unknown_dimension=unknown))
    assert (ADAM in updates(result)) == is_few
    require_same_values(step, result, steps=2)


def test_rows_of_a_gpu_are_left():
    assert ADAM not in updates(rewritten(program(), GPU))


def test_where_nothing_orders_reads_and_writes_it_is_left():
    """A graph of TensorFlow 1 may read a slot while it is updated."""
    table = keras.Variable(np.ones((ROWS, WIDTH), np.float32))
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build([table])

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table.value, ids) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table.value), table)])
        return loss

    step = dataclasses.replace(trace(step, IDS), targets=())
    result = rewritten(step, CPU)
    assert ADAM not in updates(result)
    before, after = step.run(step.graph_def, 2), step.run(result.graph_def, 2)
    for name, old in before.items():
        np.testing.assert_allclose(after[name], old, rtol=1e-6, err_msg=name)
