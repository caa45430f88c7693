"""What nothing reads in a function: gradients that nobody asked for, left out before all else."""

from __future__ import annotations

import collections

import pytest
import tensorflow as tf
from tensorflow.core.framework import function_pb2

from graph_passes import PrecisionConfig, RewriteResult, rewrite_function_def
from graph_passes.functions.call_tree import Library, no_library
from graph_passes.policy.cost_table import CostTable, Curve, OpCost
from tf_amp.hosts.function_shapes import static_shapes

LOW = tf.bfloat16.as_datatype_enum
PRODUCTS = ("MatMul", "Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput")


def flat(time: float) -> Curve:
    return Curve((1, 1 << 20), (time, time))


COSTS = CostTable(
    device_class="cpu-test",
    device="CPU",
    target_dtype="bfloat16",
    measured_on="nothing",
    to_low=flat(1e-6),
    to_float32=flat(5e-4),
    rows=(
        ("MatMul", OpCost("flops", flat(2e-4), flat(1e-4))),
        ("Conv2D", OpCost("flops", flat(2e-3), flat(1e-3))),
        ("Conv2DBackpropFilter", OpCost("flops", flat(2e-3), flat(1e-3))),
        ("Conv2DBackpropInput", OpCost("flops", flat(2e-4), flat(9e-3))),
    ),
)


def rewritten(
    function: tf.types.experimental.GenericFunction,
    *arguments: tf.TensorSpec,
    costs: CostTable | None = None,
    off: frozenset[str] = frozenset(),
    library: Library = no_library,
) -> RewriteResult:
    traced = function.get_concrete_function(*arguments)
    config = PrecisionConfig(
        target_dtype="bfloat16", device="CPU", cost_table=costs, disabled_rules=off
    )
    shapes = static_shapes(traced.graph)
    result = rewrite_function_def(traced.function_def, config, shapes=shapes, library=library)
    assert result.failure is None
    assert result.changed
    return result


def unread(body: function_pb2.FunctionDef) -> list[str]:
    """The products of a function that no result and no effect needs."""
    by_name = {node.name: node for node in body.node_def}
    pending = [*body.ret.values(), *body.control_ret.values()]
    reached = set()
    while pending:
        name = pending.pop().lstrip("^").partition(":")[0]
        if name in by_name and name not in reached:
            reached.add(name)
            pending.extend(by_name[name].input)
    return [n.name for n in body.node_def if n.op in PRODUCTS and n.name not in reached]


@tf.function(autograph=False)
def first_convolution(images, kernel, weights):
    """The gradient of a convolution is made for the images too, which nobody asked for."""
    with tf.GradientTape() as tape:
        tape.watch((kernel, weights))
        result = tf.nn.conv2d(tf.nn.conv2d(images, kernel, 1, "SAME"), weights, 1, "SAME")
    return tape.gradient(result, (kernel, weights))


IMAGES = (
    tf.TensorSpec((8, 16, 16, 3)),
    tf.TensorSpec((3, 3, 3, 8)),
    tf.TensorSpec((3, 3, 8, 8)),
)


@tf.function(autograph=False)
def two_players(noise, made_by, judged_by):
    """Two tapes over one network: each makes gradients that only the other wants."""
    with tf.GradientTape() as one, tf.GradientTape() as other:
        one.watch(made_by)
        other.watch(judged_by)
        judged = tf.matmul(tf.nn.relu(tf.matmul(tf.matmul(noise, made_by), judged_by)), judged_by)
        loss, against = tf.reduce_mean(judged), tf.reduce_mean(-judged)
    return one.gradient(loss, made_by), other.gradient(against, judged_by)


PLAYERS = (tf.TensorSpec((32, 64)),) + (tf.TensorSpec((64, 64)),) * 2


@pytest.mark.parametrize(
    ("program", "specs"), [(first_convolution, IMAGES), (two_players, PLAYERS)]
)
def test_products_that_nothing_reads_are_neither_made_nor_counted(program, specs):
    given = program.get_concrete_function(*specs).function_def
    assert unread(given)
    result = rewritten(program, *specs)
    assert not unread(result.proto)
    there = collections.Counter(n.op for n in result.proto.node_def if n.op in PRODUCTS)
    counted: collections.Counter[str] = collections.Counter()
    for (op, _), count in result.report.products.items():
        counted[op] += count
    assert counted == there
    kept = rewritten(program, *specs, off=frozenset(("unread",)))
    assert unread(kept.proto) == unread(given)


@tf.function(autograph=False)
def classifier(images, kernel, weights):
    with tf.GradientTape() as tape:
        tape.watch((kernel, weights))
        features = tf.reshape(tf.nn.conv2d(images, kernel, 1, "SAME"), (8, -1))
        result = tf.square(tf.matmul(features, weights))
    return tape.gradient(result, (kernel, weights))


def test_a_product_that_nothing_reads_does_not_keep_others_in_float32():
    """Were it there, the gradient that it would read in float32 would be made in float32."""
    specs = (*IMAGES[:2], tf.TensorSpec((16 * 16 * 8, 10)))
    low = {}
    for off in (frozenset(), frozenset(("unread",))):
        result = rewritten(classifier, *specs, costs=COSTS, off=off)
        nodes = {n.name for n in result.proto.node_def if n.attr["T"].type == LOW}
        low[bool(off)] = {name for name in nodes if "gradient_tape" in name and "MatMul" in name}
    assert low[False] > low[True]


def test_a_function_of_which_nothing_is_read_is_left_as_it_is():
    @tf.function(autograph=False)
    def program():
        tf.matmul(tf.ones((8, 8)), tf.ones((8, 8)))

    config = PrecisionConfig(target_dtype="bfloat16", device="CPU")
    result = rewrite_function_def(program.get_concrete_function().function_def, config)
    assert not result.changed
    assert result.failure is None
    assert not result.report.near_misses


def test_what_has_an_effect_stays_and_so_does_what_it_reads():
    variable = tf.Variable(tf.zeros((32, 64)))

    @tf.function(autograph=False)
    def step(noise, weights):
        product = tf.matmul(noise, weights)
        tf.matmul(product, weights)
        variable.assign(tf.matmul(product, weights, transpose_b=True))
        tf.print(tf.reduce_sum(tf.matmul(noise, weights, transpose_b=True)))
        return product

    result = rewritten(step, *PLAYERS[:2])
    given = step.get_concrete_function(*PLAYERS[:2]).function_def
    ops = [collections.Counter(n.op for n in body.node_def) for body in (given, result.proto)]
    assert (ops[0]["MatMul"], ops[1]["MatMul"]) == (4, 3)
    for op in ("AssignVariableOp", "PrintV2", "StringFormat"):
        assert ops[0][op] == ops[1][op] == 1
    assert dict(result.proto.control_ret) == dict(given.control_ret)


def test_a_call_that_nothing_reads_stays_as_its_function_does():
    inner = tf.function(lambda x, w: tf.matmul(tf.matmul(x, w), w), autograph=False)

    @tf.function(autograph=False)
    def outer(start, weights):
        inner(tf.matmul(start, weights), weights)
        return tf.matmul(start, weights, transpose_b=True)

    graph_def = outer.get_concrete_function(*PLAYERS[:2]).graph.as_graph_def()
    functions = {f.signature.name: f for f in graph_def.library.function}
    result = rewritten(outer, *PLAYERS[:2], library=functions.get)
    (call,) = (n for n in result.proto.node_def if n.op == "PartitionedCall")
    makers = {n.name: n.op for n in result.proto.node_def}
    assert "MatMul" in {makers.get(name.partition(":")[0]) for name in call.input}
