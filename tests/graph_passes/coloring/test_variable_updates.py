from __future__ import annotations

from collections.abc import Callable

import keras
import pytest
import tensorflow as tf
from decisions import reasons_of
from graph_diff import retyped
from graph_text import graph
from parity import converted
from tensorflow.core.framework import graph_pb2

from graph_passes import PrecisionConfig, rewrite_graph_def
from graph_passes.coloring.variable_updates import is_assignment

CONFIG = PrecisionConfig(target_dtype="bfloat16", device="CPU")
WITHOUT = PrecisionConfig(
    target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(["variable-update"])
)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("AssignVariableOp", True),
        ("AssignSubVariableOp", True),
        ("Assign", True),
        ("ResourceApplyAdam", True),
        ("ApplyMomentum", True),
        ("ResourceScatterAdd", True),
        ("ScatterAdd", True),
        ("ScatterNd", False),
        ("MatMul", False),
        ("ReadVariableOp", False),
    ],
)
def test_ops_that_write_to_a_variable(op: str, expected: bool) -> None:
    assert is_assignment(op) == expected


MOVING_AVERAGE = """
x = Const(0.5, [8, 8])
v = VarHandleOp(dtype=float32, shape=[8, 8])
network = MatMul(x, x)
value = Tanh(network)
old = ReadVariableOp(v, dtype=float32)
kept = Mul(old, 0.99)
part = Mul(value, 0.01)
new = AddV2(kept, part)
write = AssignVariableOp(v, new)
next = MatMul(value, value)
out = Identity(next)
"""


def test_moving_average_is_computed_in_float32() -> None:
    before = graph(MOVING_AVERAGE)
    average = {"kept", "part", "new"}
    low = converted(before, rewrite_graph_def(before, CONFIG, preserve=("out",)).proto)
    assert {"network", "next"} <= low
    assert not average & low
    low = converted(before, rewrite_graph_def(before, WITHOUT, preserve=("out",)).proto)
    assert average & low, "without the rule, nothing protects the average"


@pytest.mark.parametrize("divided", [True, False])
def test_what_replicas_add_up_is_unscaled_in_float32(divided: bool) -> None:
    """In float16 the division loses what the scale has saved; else there is nothing to lose."""
    before = graph(
        f"""
x = Const(0.5, [8, 8])
v = VarHandleOp(dtype=float32, shape=[])
scale = ReadVariableOp(v, dtype=float32)
one = MatMul(x, x)
two = MatMul(x, x, transpose_a=True)
a = {"RealDiv(one, scale)" if divided else "Identity(one)"}
b = {"RealDiv(two, scale)" if divided else "Identity(two)"}
joined = ConcatV2(a, b, 0)
sum = NcclAllReduce(joined, reduction="sum", num_devices=2, shared_name="s")
out = Identity(sum)
"""
    )
    config = PrecisionConfig(target_dtype="float16", device="GPU")
    low = converted(before, rewrite_graph_def(before, config, preserve=("out",)).proto)
    assert low - {"x"} == {"one", "two"} | (set() if divided else {"a", "b", "joined"})


def test_covariances_that_a_variable_gathers_are_those_of_float32() -> None:
    before = graph(
        """
x = Const(0.5, [8, 8])
v = VarHandleOp(dtype=float32, shape=[8, 8])
network = MatMul(x, x)
value = Tanh(network)
moved = Transpose(value, [1, 0])
alone = MatMul(value, moved)
write = AssignAddVariableOp(v, alone)
scaled = Einsum(value, value, equation="ij,ik->jk")
part = Mul(scaled, 0.01)
old = ReadVariableOp(v, dtype=float32)
new = AddV2(old, part)
again = AssignVariableOp(v, new)
gradient = MatMul(value, network)
step = AssignSubVariableOp(v, gradient)
"""
    )
    low = converted(before, rewrite_graph_def(before, CONFIG).proto)
    assert {"network", "gradient"} <= low
    assert not {"alone", "scaled"} & low


def test_reasons_name_the_rule() -> None:
    reasons = reasons_of(rewrite_graph_def(graph(MOVING_AVERAGE), CONFIG).report)
    assert reasons["new"] == "computes what is assigned to a variable"


def training_graph(make_optimizer: Callable[[], keras.Optimizer]) -> graph_pb2.GraphDef:
    layers = keras.Sequential(
        [
            keras.layers.Conv2D(4, 3, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.99),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
        ]
    )
    x, optimizer = tf.ones([2, 8, 8, 3]), make_optimizer()
    layers(x)
    optimizer.build(layers.trainable_variables)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layers(x, training=True) ** 2)
        gradients = tape.gradient(loss, layers.trainable_variables)
        optimizer.apply_gradients(zip(gradients, layers.trainable_variables, strict=True))

    return step.get_concrete_function().graph.as_graph_def()


@pytest.mark.parametrize(
    "make_optimizer",
    [keras.optimizers.Adam, lambda: keras.optimizers.SGD(momentum=0.9), keras.optimizers.RMSprop],
    ids=["Adam", "momentum", "RMSprop"],
)
def test_updates_of_a_keras_model_stay_float32(
    make_optimizer: Callable[[], keras.Optimizer],
) -> None:
    """Slots, weights and the moving statistics of BatchNormalization, in a real training step."""
    before = training_graph(make_optimizer)
    result = rewrite_graph_def(before, CONFIG)
    assert result.failure is None
    nodes = {node.name: node for node in result.proto.node}
    assert any(nodes[slot.node].op == "Conv2D" for slot in retyped(before, result.proto))
    assigned = [node for node in nodes.values() if is_assignment(node.op)]
    assert len(assigned) > 8
    arithmetic = {"Mul", "Sub", "AddV2", "Sqrt", "RealDiv", "Square", "Neg", "AddN"}
    for node in assigned:
        value = nodes[node.input[1].partition(":")[0]]
        assert value.op != "Cast", f"{node.name} is assigned the low-precision {value.input[0]}"
        if value.op in arithmetic:
            assert value.attr["T"].type != tf.bfloat16.as_datatype_enum, value.name
