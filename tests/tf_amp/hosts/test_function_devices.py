"""Where the variables are that traced functions use."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_amp.hosts.function_devices import variable_devices

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


def devices_in(concrete: Any, ops: tuple[str, ...] = ()) -> list[str]:
    """Devices of the variables of a function, or of those that nodes of some ops call."""
    definition = concrete.function_def
    devices = variable_devices(concrete.graph, definition)
    functions = {definition.signature.name: definition}
    if ops:
        called = concrete.graph._functions
        attrs = [a for n in definition.node_def if n.op in ops for a in n.attr.values()]
        names = [attr.func.name for attr in attrs if attr.WhichOneof("value") == "func"]
        functions = {name: called[name].cached_definition for name in names}
    return [
        devices(name, argument.name)
        for name, function in functions.items()
        for argument in function.signature.input_arg
        if argument.type == tf.resource.as_datatype_enum
    ]


def test_captures_are_followed_into_calls_branches_and_loops() -> None:
    variable = tf.Variable(1.0)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        inner = tf.function(lambda y: y * variable, autograph=False)
        x = tf.cond(x > 0.0, lambda: x * variable, lambda: inner(x))
        return tf.while_loop(lambda y: y < 9.0, lambda y: (y + variable,), (inner(x),))[0]

    concrete = step.get_concrete_function(tf.TensorSpec(()))
    assert devices_in(concrete) == [CPU]
    for ops in (("PartitionedCall", "StatefulPartitionedCall"), ("If",), ("While",)):
        found = devices_in(concrete, ops)
        assert found
        # A branch has inputs for what only the other one reads.
        assert {device for device in found if not device.startswith("of ")} == {CPU}


def test_arguments_may_be_anywhere() -> None:
    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> tf.Tensor:
        return x * y

    found = devices_in(step.get_concrete_function(tf.Variable(1.0), tf.Variable(2.0)))
    assert len(set(found)) == 2
    assert CPU not in found


def test_what_was_made_in_the_graph_is_where_its_op_is() -> None:
    with tf.Graph().as_default():
        with tf.device("/device:CPU:1"):
            variable = tf.Variable(1.0)
        step = tf.function(lambda: variable.read_value(), autograph=False)
        assert devices_in(step.get_concrete_function()) == ["/device:CPU:1"]
