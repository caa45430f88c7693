"""Shapes of traced functions and of those that they call."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import tensorflow as tf
from environments import CONVERTS
from tensorflow.python.framework import function as legacy_function

from tf_amp.hosts.function_shapes import called_shapes, static_shapes, traced_shapes


def branches() -> tf.types.experimental.ConcreteFunction:
    """A function with a product in a branch."""

    @tf.function(autograph=False)
    def function(some_input: tf.Tensor, taken: tf.Tensor) -> tf.Tensor:
        layer = lambda: tf.matmul(some_input, tf.ones((8, 4)), name="product")  # noqa: E731
        return tf.cond(taken, layer, lambda: tf.ones((2, 4)))

    return function.get_concrete_function(tf.TensorSpec((2, 8)), tf.TensorSpec((), tf.bool))


def test_arguments_go_by_their_names_in_the_definition() -> None:
    graph = branches().graph
    definition = branches().function_def
    definition.signature.input_arg[0].name = "renamed"
    assert traced_shapes(graph, definition)("renamed") == ((2, 8),)
    assert static_shapes(graph)("renamed") == ()


def test_arguments_are_unknown_where_the_graph_has_gained_some() -> None:
    concrete = branches()
    definition = concrete.function_def
    definition.signature.input_arg[0].name = "renamed"
    del definition.signature.input_arg[1]
    shapes = traced_shapes(concrete.graph, definition)
    assert shapes("renamed") == ()
    assert shapes("cond") == ((2, 4),)


def test_a_called_function_has_the_shapes_of_its_own_graph() -> None:
    concrete = branches()
    (node,) = [n for n in concrete.function_def.node_def if n.op in ("If", "StatelessIf")]
    shapes_of = called_shapes(concrete.graph._functions)
    then, otherwise = (shapes_of(node.attr[f"{x}_branch"].func.name) for x in ("then", "else"))
    assert then is not None
    assert otherwise is not None
    assert then("cond/product") == ((2, 4),)
    assert otherwise("cond/product") == ()
    assert shapes_of("no such function") is None


def test_a_function_of_tensorflow_1_has_no_shapes() -> None:
    @legacy_function.Defun(tf.float32)
    def twice(x: tf.Tensor) -> tf.Tensor:
        return x * 2.0

    concrete = tf.function(lambda x: twice(x)).get_concrete_function(tf.TensorSpec((2,)))
    (name,) = concrete.graph._functions
    assert called_shapes(concrete.graph._functions)(name) is None


CODE = """
    import json

    import tensorflow as tf

    import tf_amp

    tf_amp.enable_mixed_precision_graph_rewrite()
    weight, bias = tf.Variable(tf.ones((64, 128))), tf.Variable(tf.ones(128))

    @tf.function(autograph=False)
    def step(x, taken):
        with tf.GradientTape() as tape:
            layer = lambda: tf.nn.relu(tf.nn.bias_add(tf.matmul(x, weight), bias))
            y = tf.cond(taken, layer, lambda: tf.zeros((512, 128)))
            loss = tf.reduce_mean(tf.matmul(y, weight, transpose_b=True))
        return tape.gradient(loss, bias)

    gradient = step(tf.ones((512, 64)), tf.constant(True))
    from tensorflow.python.eager import context

    found = {}
    for name in context.context().list_function_names():
        for node in context.context().get_function_def(name).node_def:
            if "ones_product/MatMul" in node.name:
                found[str(name)] = tf.as_dtype(node.attr["T"].type).name
    print(json.dumps({"found": found, "gradient": gradient.numpy().tolist()}))
"""
ENV = {
    **CONVERTS,
    "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_RULES_DISABLE": "cost",
}


def test_a_unit_that_needs_shapes_is_found_in_a_branch_that_runs(
    run_forked: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    made = json.loads(run_forked(CODE, ENV).stdout.splitlines()[-1])
    branch = {name: dtype for name, dtype in made["found"].items() if "_amp_" in name}
    assert branch
    assert set(branch.values()) == {"bfloat16"}
    # 64 ones for each of the 512 rows, by the mean over 512 * 64 elements.
    assert made["gradient"] == [1.0] * 128
