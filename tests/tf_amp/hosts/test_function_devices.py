"""What traced functions capture: variables, where they are, and tables that were made before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from environments import BFLOAT16, RunPython

from tf_amp.hosts.function_devices import captured_constants, variable_devices

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


def constants_in(concrete: Any, op: str = "") -> dict[str, Any]:
    """The constants among the arguments of a function, or of those that nodes of an op call."""
    definition = concrete.function_def
    constants = captured_constants(concrete.graph, definition)
    if not op:
        return dict(constants(definition.signature.name))
    attrs = [a for n in definition.node_def if n.op == op for a in n.attr.values()]
    names = [attr.func.name for attr in attrs if attr.WhichOneof("value") == "func"]
    return {name: found for of in names for name, found in constants(of).items()}


def test_eager_tensors_are_constants_but_variables_and_arguments_are_not() -> None:
    table, small = tf.random.normal((20, 30)), tf.constant([1.0, 2.0])
    variable = tf.Variable(tf.ones((30,)))

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> tf.Tensor:
        inner = tf.function(lambda z: z * table + y, autograph=False)
        x = tf.cond(x > 0.0, lambda: inner(x), lambda: table * variable)
        return tf.while_loop(lambda _: True, lambda z: (z + table,), (x,))[0] * small[0]

    concrete = step.get_concrete_function(tf.TensorSpec(()), tf.constant(3.0))
    found = sorted(constants_in(concrete).values(), key=lambda constant: constant.shape)
    assert [constant.shape for constant in found] == [(2,), (20, 30)]
    assert [list(constant.read()) for constant in found] == [[1, 2], [*table.numpy().ravel()]]
    for op in ("If", "StatelessWhile"):
        assert (20, 30) in [constant.shape for constant in constants_in(concrete, op).values()]


ELSEWHERE = """
from tf_amp import autoload
autoload.activate()
import tensorflow as tf

@tf.function
def multiply(x):
    with tf.device("/GPU:0"):
        return tf.matmul(x, x)

multiply(tf.ones((64, 64)))
"""


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_what_a_program_puts_on_a_gpu_that_is_not_there_is_converted(run_forked: RunPython) -> None:
    done = run_forked(ELSEWHERE, env=BFLOAT16)
    assert "multiply: MatMul 1 of 1 in bfloat16" in done.stderr


TABLES = """
import json
import sys
from tf_amp import autoload
autoload.activate()
import keras
import numpy as np
import tensorflow as tf
sys.path.append(sys.argv[1])
from function_harness import most_nodes

keras.utils.set_random_seed(0)
where, n = sys.argv[2], np.arange(64)
draw = np.random.default_rng(0)
bins = np.hanning(64)[:, None] * np.cos(2 * np.pi * n[:, None] * np.arange(1, 33) / 64)
bell = np.exp(-(((np.arange(15) - 7) / 3) ** 2) / 2)

def gains(x, table):
    return tf.nn.depthwise_conv2d(x, table, (1, 1, 1, 1), "VALID")

def variance(x, table):
    x = tf.reshape(x, (-1, 32, 32, 1))
    return gains(x * x, table) - gains(x, table) ** 2

KINDS = {
    "stencil": (
        np.eye(1024, k=1) + np.eye(1024, k=-1) - 2 * np.eye(1024),
        lambda x, table: tf.transpose(tf.matmul(table, tf.transpose(x)))[:, 1:-1],
    ),
    "stft by products": (
        bins, lambda x, table: tf.math.square(tf.matmul(tf.reshape(x, (-1, 16, 64)), table))
    ),
    "stft by convolutions": (
        bins[:, None],
        lambda x, table: tf.math.square(tf.nn.conv1d(x[..., None], table, 32, "VALID")),
    ),
    "window": ((np.outer(bell, bell) / np.outer(bell, bell).sum())[..., None, None], variance),
    "rotary": (
        10.0 ** -np.linspace(0, 4, 300)[None],
        lambda x, table: tf.sin(tf.matmul(4096 * tf.reshape(x, (-1, 1)), table)),
    ),
}
MODULE = {kind: tf.constant(table.astype("f")) for kind, (table, _) in KINDS.items()}

class Table(keras.layers.Layer):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        if where == "init":
            self.make()

    def make(self):
        self.table = tf.constant(KINDS[self.kind][0].astype("f"))

    def build(self, shape):
        if where == "build":
            self.make()

    def call(self, x):
        return KINDS[self.kind][1](x, MODULE[self.kind] if where == "module" else self.table)

x = (1 + 0.3 * np.sin(np.arange(1024) / 20) + 1e-3 * draw.random((4, 1024))).astype("f")
errors = {}
for kind, (table, apply) in KINDS.items():
    true = apply(tf.constant(x), MODULE[kind]).numpy()
    given = keras.Input((1024,))
    head = keras.layers.Dense(4)(keras.layers.Dense(64, activation="relu")(given))
    model = keras.Model(given, [Table(kind)(given), head])
    # Keras 3.4 takes no None in a list of losses.
    model.compile("sgd", [lambda _, made: tf.zeros([4]), "mse"], jit_compile=False)
    model.fit(x, [np.zeros(4), np.ones((4, 4), "f")], verbose=0)
    found = {"predict": model.predict(x, verbose=0)[0]}
    layer, weights = Table(kind), tf.Variable(draw.standard_normal((1024, 8)).astype("f"))
    layer.build(None)

    def step(x, table):
        with tf.GradientTape() as tape:
            tape.watch(x)
            made = layer.call(x) if table is None else apply(x, table)
        return made, tape.gradient(made, x), tf.matmul(x, weights)

    found["function"], found["gradient"], _ = tf.function(step)(tf.constant(x), None)
    slope = step(tf.constant(x), MODULE[kind])[1].numpy()
    for by, made in found.items():
        right = slope if by == "gradient" else true
        errors[f"{kind}, {by}"] = float(np.abs(made - right).max() / np.abs(right).max())
low = most_nodes(lambda node: node.op == "MatMul" and node.attr["T"].type == 14)
print(json.dumps({"errors": errors, "low": low}))
"""


@pytest.mark.parametrize("where", ["init", "build", "module"])
def test_products_with_tables_that_were_made_before_stay_float32(
    run_forked: RunPython, where: str
) -> None:
    done = run_forked(TABLES, BFLOAT16, args=(str(Path(__file__).parent), where))
    found = json.loads(done.stdout.splitlines()[-1])
    assert max(found["errors"].values()) < 1e-4, found["errors"]
    assert found["low"]  # the network beside them


SHARDED = """
from tf_amp import autoload
autoload.activate()
import tensorflow as tf
from tensorflow.experimental import dtensor
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
mesh = dtensor.create_mesh([("x", 2)], devices=["CPU:0", "CPU:1"])
table, whole = (
    dtensor.call_with_layout(tf.ones, dtensor.Layout([axis, "unsharded"], mesh), [64, 64])
    for axis in ("x", "unsharded")
)
tf.function(lambda: tf.matmul(table, whole))()
"""


def test_tables_in_parts_on_several_devices_are_left_alone(run_forked: RunPython) -> None:
    done = run_forked(SHARDED, BFLOAT16)
    assert "MatMul 1 of 1 in bfloat16" in done.stderr
