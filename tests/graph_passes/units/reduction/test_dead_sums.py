"""Sums that nothing reads ask for no Cast; those that something reads are denied as before."""

from __future__ import annotations

import dataclasses

import pytest
import tensorflow as tf
from traced_graphs import node_types, of_op, trace

from graph_passes import PrecisionConfig
from graph_passes.ir.view import view_body
from graph_passes.units.fusion import find_units

FLOAT = tf.float32.as_datatype_enum
CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU")
GPU = PrecisionConfig(target_dtype="float16", device="GPU")
SPEC = tf.TensorSpec((64, 32))


def dropout_gradient(x):
    """The gradient of a Select between a product and a constant, with one for the constant."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        product = tf.matmul(x, tf.ones((32, 32)))
        result = tf.matmul(tf.where(product > 0, product, 0.0), tf.ones((32, 8)))
    return tape.gradient(result, x)


@pytest.mark.parametrize("config", [CPU, GPU])
def test_the_gradient_of_a_constant_asks_for_no_cast(config):
    traced = trace(dropout_gradient, SPEC)
    assert "unread-sum" in node_types(traced.find(config))
    for rules, casts in ((frozenset(), 0), (frozenset(("unread-sum",)), 1)):
        chosen = PrecisionConfig(
            target_dtype=config.target_dtype, device=config.device, disabled_rules=rules
        )
        after = traced.rewrite(chosen).graph_def
        selects = {node.name for node in of_op(after, "SelectV2")}
        up = [n for n in of_op(after, "Cast") if n.attr["DstT"].type == FLOAT]
        assert len([cast for cast in up if cast.input[0] in selects]) == casts


def swish_gradient(x):
    """The gradient of a swish, which is also made for its constant: of squares and a sum."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        product = tf.matmul(x, tf.ones((32, 32)))
        result = tf.matmul(tf.nn.silu(product), tf.ones((32, 8)))
    return tape.gradient(result, x)


@pytest.mark.parametrize("config", [CPU, GPU])
def test_what_only_an_unread_sum_reads_denies_nothing(config):
    traced = trace(swish_gradient, SPEC)
    casts = {}
    for rules in (frozenset(), frozenset(("unread-sum",))):
        chosen = PrecisionConfig(
            target_dtype=config.target_dtype, device=config.device, disabled_rules=rules
        )
        after = traced.rewrite(chosen).graph_def
        casts[rules] = len(of_op(after, "Cast"))
        (square,) = of_op(after, "Square")
        assert (square.attr["T"].type == FLOAT) is bool(rules)
    assert casts[frozenset()] < casts[frozenset(("unread-sum",))]


def test_squares_that_are_fetched_are_denied():
    traced = trace(swish_gradient, SPEC)
    (square,) = of_op(traced.graph_def, "Square")
    fetched = [n.name for n in traced.graph_def.node if square.name in n.input]
    after = traced.rewrite(CPU, fetched).graph_def
    assert [n.attr["T"].type for n in of_op(after, "Square")] == [FLOAT]


@pytest.mark.parametrize("what", ["Sum", "Reshape"])
def test_what_is_fetched_is_read(what):
    traced = trace(dropout_gradient, SPEC)
    fetched = [n.name for n in of_op(traced.graph_def, what) if n.name.startswith("gradient_tape")]
    assert "unread-sum" not in node_types(traced.find(CPU, fetched))


def test_a_sum_that_is_read_is_denied():
    def network(x):
        return tf.reduce_sum(tf.matmul(x, tf.ones((32, 32)))) + 1.0

    traced = trace(network, SPEC)
    assert "unread-sum" not in node_types(traced.find(CPU))
    (total,) = of_op(traced.rewrite(CPU).graph_def, "Sum")
    assert total.attr["T"].type == FLOAT


def test_where_fetches_are_not_said_everything_may_be_one():
    traced = trace(dropout_gradient, SPEC)
    view = view_body(traced.graph_def, traced.shapes)
    assert "unread-sum" not in node_types(find_units(traced.graph_def, view, CPU, ()))


def test_results_of_a_function_are_read():
    @tf.function(autograph=False)
    def total(x):
        return tf.reduce_sum(tf.matmul(x, tf.ones((32, 32))))

    body = total.get_concrete_function(SPEC).function_def
    assert "unread-sum" not in node_types(find_units(body, view_body(body), CPU, ()))


def test_nodes_without_outputs_are_passed_over():
    """A check that holds when it is traced leaves a NoOp that nothing waits for."""

    @tf.function(autograph=False)
    def checked_gradient(x):
        tf.debugging.assert_integer(tf.shape(x))
        return dropout_gradient(x)

    body = checked_gradient.get_concrete_function(SPEC).function_def
    waited_for = {name for node in body.node_def for name in node.input if name[0] == "^"}
    waited_for |= {f"^{name}" for name in body.control_ret.values()}
    assert {f"^{n.name}" for n in body.node_def if n.op == "NoOp"} - waited_for
    kept = dataclasses.replace(CPU, disabled_rules=frozenset(("unread",)))
    found = find_units(body, view_body(body), kept, ())
    assert "unread-sum" in node_types(found)
