"""Batch normalization over a batch as one fused op, in every form in which layers write it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from free_casts import FREE_CASTS
from graph_text import graph
from layer_graphs import (
    CPU,
    GPU,
    OF_PRODUCTS,
    OF_UNIT,
    LayerGraph,
    assert_near,
    inside,
    low_statistics,
    trace_layer,
    whole_numbers,
    wide_casts,
)
from programs import trace as trace_program
from tensorflow.core.framework import types_pb2
from traced_graphs import trace

from graph_passes import PrecisionConfig, Rule, rewrite_graph_def
from graph_passes.ir.view import view_body
from graph_passes.ops.kernels import kernel_support
from graph_passes.policy.cost_table import CostTable
from graph_passes.policy.op_lists import load_op_lists
from graph_passes.rewriter.editor import GraphEdits
from graph_passes.units.normalization.fused_batch_norm import fuse_batch_norms
from graph_passes.units.unit_pass import UnitSearch

LOW = {"GPU": types_pb2.DT_HALF, "CPU": types_pb2.DT_BFLOAT16}
ROUNDING = {"GPU": 2**-11, "CPU": 2**-8}
"""What one rounding to the target dtype and a few of float32 may change."""

FORMS: dict[str, tuple[Callable[[], object], tuple[int | None, ...], str]] = {
    "plain": (
        lambda: keras.layers.BatchNormalization(scale=False, center=False),
        (8, 4, 4, 16),
        "NHWC",
    ),
    "no scale": (lambda: keras.layers.BatchNormalization(scale=False), (8, 4, 4, 16), "NHWC"),
    "no offset": (lambda: keras.layers.BatchNormalization(center=False), (8, 4, 4, 16), "NHWC"),
    "any size": (keras.layers.BatchNormalization, (None, None, None, 16), "NHWC"),
    "channels first": (lambda: keras.layers.BatchNormalization(axis=1), (8, 4, 6, 16), "NCHW"),
    "channels between": (lambda: keras.layers.BatchNormalization(axis=2), (4, 3, 5, 16), "NCHW"),
    "rank 2": (keras.layers.BatchNormalization, (32, 16), "NHWC"),
    "rank 3": (keras.layers.BatchNormalization, (8, 6, 16), "NHWC"),
    "rank 5": (keras.layers.BatchNormalization, (4, 3, 3, 2, 16), "NHWC"),
    "tf_keras, rank 2": (tf_keras.layers.BatchNormalization, (32, 16), "NHWC"),
    "tf_keras, rank 3, no scale, channels first": (
        lambda: tf_keras.layers.BatchNormalization(axis=1, scale=False),
        (8, 6, 16),
        "NCHW",
    ),
}


@pytest.fixture(scope="module", params=[(name, known) for name in FORMS for known in (True, False)])
def form(request: pytest.FixtureRequest) -> tuple[str, LayerGraph]:
    name, known = request.param
    layer, shape, _ = FORMS[name]
    return name, trace_layer(layer(), shape if known else (None, *shape[1:]))


def values(name: str) -> tuple[np.ndarray, np.ndarray]:
    return whole_numbers(tuple(size or 6 for size in FORMS[name][1]))


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
def test_every_form_is_one_op_each_way(
    form: tuple[str, LayerGraph], config: PrecisionConfig
) -> None:
    name, layer = form
    norms_alone = dataclasses.replace(config, disabled_rules=frozenset(("fused-update",)))
    assert not layer.find(norms_alone).misses
    result = layer.rewrite(config)
    nodes = [n for n in result.graph_def.node if n.op.startswith("FusedBatchNorm")]
    assert [n.op for n in nodes] == ["FusedBatchNormV3", "FusedBatchNormGradV3"]
    for node in nodes:
        assert node.attr["T"].type == LOW[config.device]
        assert node.attr["U"].type == types_pb2.DT_FLOAT
        assert node.attr["data_format"].s.decode() == FORMS[name][2]
    assert not low_statistics(result.graph_def)
    assert not any(n.op in ("SquaredDifference", "RsqrtGrad") for n in result.graph_def.node)
    assert wide_casts(layer, result) == OF_PRODUCTS, "x, y, dy and dx stay in the target dtype"


@pytest.mark.parametrize("few", [True, False])
def test_in_float32_too_where_nothing_is_converted(few: bool) -> None:
    """Where that is faster: not for few elements."""
    shape = (8, 4, 4, 16) if few else (32, 16, 16, 16)
    layer = trace_layer(keras.layers.BatchNormalization(), shape)
    off = CPU.disabled_rules | {"onednn-kernel"}
    result = layer.rewrite(dataclasses.replace(CPU, converts=False, disabled_rules=off))
    nodes = [n for n in result.graph_def.node if n.op.startswith("FusedBatchNorm")]
    assert [n.op for n in nodes] == ([] if few else ["FusedBatchNormV3", "FusedBatchNormGradV3"])
    low = types_pb2.DT_BFLOAT16
    assert not any(low in (a.type for a in node.attr.values()) for node in result.graph_def.node)
    given = whole_numbers(shape)
    wanted = layer.run(layer.graph_def, *given)
    assert_near(layer.run(result.graph_def, *given), wanted, 3e-5)  # sums of 8,192 numbers


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
def test_gradients_and_stored_statistics_are_those_of_float32(
    form: tuple[str, LayerGraph], config: PrecisionConfig
) -> None:
    name, layer = form
    wanted = layer.run(layer.graph_def, *values(name))
    assert_near(layer.run(layer.find(config).proto, *values(name)), wanted, 1e-5)
    found = layer.run(layer.rewrite(config).graph_def, *values(name))
    y, dx = slice(0, 1), slice(1, 2)
    for part in (y, dx):
        assert_near(found[part], wanted[part], ROUNDING[config.device])
    assert_near(found[2:], wanted[2:], 1e-5)


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
def test_no_scale_is_read_behind_what_is_made_with_it(config: PrecisionConfig) -> None:
    """Written by hand, a layer may read its scale once its moving statistics are updated."""
    before, behind = (tf.Variable(0.25 * tf.eye(16)) for _ in range(2))
    moving_mean, beta = (tf.Variable(tf.zeros(16)) for _ in range(2))
    moving_variance, gamma = (tf.Variable(tf.ones(16)) for _ in range(2))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = x @ before
            mean, variance = tf.nn.moments(h, [0])
            updates = [
                held.assign_sub(0.1 * (held - batch))
                for held, batch in ((moving_mean, mean), (moving_variance, variance))
            ]
            with tf.control_dependencies(updates):
                y = tf.nn.batch_normalization(h, mean, variance, beta, gamma, 1e-3)
            loss = tf.reduce_mean(tf.square(y @ behind))
        trained = [before, gamma, beta, behind]
        for weight, gradient in zip(trained, tape.gradient(loss, trained), strict=True):
            weight.assign_sub(0.01 * gradient)
        return loss

    data = np.random.default_rng(0).standard_normal((32, 16), np.float32)
    program = trace_program(step, data)
    result = rewrite_graph_def(
        program.graph_def, config, preserve=program.preserve, shapes=program.shapes
    )
    assert result.failure is None
    assert any("it would wait for what comes of" in miss.why for miss in result.report.near_misses)
    assert "FusedBatchNormV3" not in {node.op for node in result.graph_def.node}
    found, wanted = (program.run(one) for one in (result.graph_def, program.graph_def))
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=4 * ROUNDING[config.device])


def test_the_values_of_these_tests_need_statistics_in_float32() -> None:
    x, _ = values("rank 2")
    low = tf.cast(x, tf.bfloat16)
    mean = tf.cast(tf.add_n(tf.unstack(low)) / len(x), tf.float32)
    assert np.abs(mean - x.mean(0)).max() > 0.1


@pytest.fixture(scope="module")
def tiny_epsilon() -> LayerGraph:
    """A layer whose epsilon is too small for the kernels of a GPU."""
    return trace_layer(keras.layers.BatchNormalization(epsilon=1e-6), (32, 16))


def test_what_cannot_be_fused_is_a_unit_in_float32(tiny_epsilon: LayerGraph) -> None:
    fusion = tiny_epsilon.find(GPU)
    assert [miss.why for miss in fusion.misses] == ["epsilon 1e-06 is below 1e-05"]
    assert [u.partition(":")[0] for u in fusion.units] == ["batch-norm in float32"]
    result = tiny_epsilon.rewrite(GPU)
    assert not low_statistics(result.graph_def)
    assert wide_casts(tiny_epsilon, result) == OF_PRODUCTS + OF_UNIT
    given = whole_numbers((32, 16))
    wanted = tiny_epsilon.run(tiny_epsilon.graph_def, *given)
    assert_near(tiny_epsilon.run(result.graph_def, *given), wanted, ROUNDING["GPU"])


@pytest.mark.parametrize(
    ("rows", "unknown", "times", "is_fused"),
    [
        (1024, 32, FREE_CASTS, False),
        (1025, 32, FREE_CASTS, True),
        (None, 1024, FREE_CASTS, False),
        (None, 1025, FREE_CASTS, True),
        (1024, 32, None, True),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_few_elements_stay_in_primitives_on_a_cpu(
    rows: int | None, unknown: int, times: CostTable | None, is_fused: bool, training: bool
) -> None:
    layer = trace_layer(keras.layers.BatchNormalization(), (rows, 64), training=training)
    config = dataclasses.replace(CPU, cost_table=times, unknown_dimension=unknown)
    rules = {unit.partition(":")[0] for unit in layer.find(config).units}
    assert ("batch-norm" in rules) == is_fused
    assert ("batch-norm in float32" in rules) == (training and not is_fused)


def test_the_unit_in_float32_is_switched_off_with_the_rule(tiny_epsilon: LayerGraph) -> None:
    off = PrecisionConfig(
        target_dtype="float16", device="GPU", disabled_rules=frozenset(("batch-norm",))
    )
    assert inside(tiny_epsilon, GPU)
    assert not inside(tiny_epsilon, off)
    assert not tiny_epsilon.find(off).misses


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("options", [{}, {"center": False}], ids=["both", "no offset"])
def test_behind_frozen_layers_the_gradient_is_that_of_the_parameters(
    options: dict[str, bool], config: PrecisionConfig
) -> None:
    make = keras.layers.BatchNormalization
    layer = trace_layer(make(**options), (32, 16), flows_back=False)
    result = layer.rewrite(config)
    assert [n.op for n in result.graph_def.node if n.op.startswith("FusedBatchNorm")] == [
        "FusedBatchNormV3",
        "FusedBatchNormGradV3",
    ]
    given = whole_numbers((32, 16))
    wanted = layer.run(layer.graph_def, *given)
    found = layer.run(result.graph_def, *given)
    assert_near(found[:1], wanted[:1], ROUNDING[config.device])
    assert_near(found[1:], wanted[1:], 1e-5)


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("known", [True, False])
def test_data_is_not_rounded_before_its_mean_is_subtracted(
    known: bool, config: PrecisionConfig
) -> None:
    """Years, of which bfloat16 tells apart only every eighth."""
    layer = trace_layer(
        keras.layers.BatchNormalization(),
        (32 if known else None, 16),
        is_data=True,
        flows_back=False,
    )
    x, dy = whole_numbers((32, 16))
    given = x + 1900.25, dy
    wanted = layer.run(layer.graph_def, *given)
    found = layer.run(layer.rewrite(config).graph_def, *given)
    assert_near(found[:1], wanted[:1], ROUNDING[config.device])
    assert_near(found[1:], wanted[1:], 1e-5)
    (miss,) = layer.find(config).misses
    assert "the input is data" in miss.why


class Beside(keras.layers.Layer):
    """A batch normalization of data beside what a layer makes of small numbers."""

    def __init__(self, learned: keras.layers.Layer) -> None:
        super().__init__()
        self.learned, self.norm = learned, keras.layers.BatchNormalization()

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.learned.build((None, 8))
        self.norm.build(shape)

    def call(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        made = self.learned(x[:, :8] - 2028.25)
        return self.norm(tf.concat([made, x[:, 8:]], 1), training=training)


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [lambda: keras.layers.Dense(8), keras.layers.PReLU])
def test_nor_is_data_beside_what_is_learned(
    make: Callable[[], keras.layers.Layer], training: bool, config: PrecisionConfig
) -> None:
    layer = trace_layer(
        Beside(make()),
        (None, 16),
        is_data=True,
        flows_back=False,
        training=training,
        stored=(2028.0, 64.0),
    )
    x, dy = whole_numbers((32, 16))
    given = x + 1900.25, dy
    wanted, found = (
        layer.run(g, *given)[0][:, 8:] for g in (layer.graph_def, layer.rewrite(config).graph_def)
    )
    assert_near([found], [wanted], ROUNDING[config.device])


class Behind(keras.layers.Layer):
    """A batch normalization of what another function makes of data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = keras.layers.BatchNormalization()
        self.made = tf.function(tf.nn.relu, autograph=False)

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.norm.build(shape)

    def call(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        return self.norm(self.made(x), training=training)


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
def test_what_a_function_makes_of_data_is_a_layers(config: PrecisionConfig) -> None:
    """As Keras' convolutions of groups and recurrent layers are functions."""
    layer = trace_layer(Behind(), (None, 16), is_data=True, flows_back=False)
    assert any("Call" in node.op for node in layer.graph_def.node)
    found = layer.find(config)
    assert found.units and not found.misses


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
def test_nor_is_one_column_of_data(config: PrecisionConfig) -> None:
    eye = np.eye(9, dtype=np.float32)

    def step(x: tf.Tensor, year: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            made = tf.concat([tf.matmul(x, eye[:8, :8]), year], 1)
            mean, variance = tf.nn.moments(made, [0])
            y = tf.nn.batch_normalization(made, mean, variance, None, None, 1e-3)
            y = tf.matmul(y, eye)
            loss = tf.square(y)
        return [y[:, 8], tape.gradient(loss, x)]

    graph = trace(step, tf.TensorSpec((None, 8)), tf.TensorSpec((None, 1)))
    x, _ = whole_numbers((32, 9))
    given = x[:, :8], x[:, 8:] + 1900.25
    wanted, found = (
        graph.run(g, *given)[:1] for g in (graph.graph_def, graph.rewrite(config).graph_def)
    )
    assert_near(found, wanted, ROUNDING[config.device])


BATCH_NORM = """
weights = Const(0.5, [8, 8])
axes = Const([0])
epsilon = Const(0.001)
gamma_value = Const(1.0, [8])
gamma = Identity(gamma_value)
beta_value = Const(0.0, [8])
beta = Identity(beta_value)
x = MatMul(weights, weights)
mean = Mean(x, axes)
square = SquaredDifference(x, mean)
variance = Mean(square, axes)
total = AddV2(variance, epsilon)
rsqrt = Rsqrt(total)
scale = Mul(rsqrt, gamma)
product = Mul(x, scale)
shift = Mul(mean, scale)
offset = Sub(beta, shift)
y = AddV2(product, offset)
z = MatMul(y, weights)
"""


SHAPES = {"x": (8, 8), "y": (8, 8), "gamma": (8,), "beta": (8,), "mean": (8,)}


def find(
    text: str, preserve: tuple[str, ...] = (), **shapes: tuple[int | None, ...] | None
) -> tuple[list[str], list[str]]:
    """The units in a graph, and what came close."""
    known = {**SHAPES, **shapes}
    edits = GraphEdits(view_body(graph(text), lambda name: (known.get(name),)), preserve)
    config = PrecisionConfig(target_dtype="float16", device="CPU")
    support = kernel_support("CPU", config.target)
    search = UnitSearch(edits, config, load_op_lists(config), support)
    fuse_batch_norms(search)
    names = [edits.view.names[output] for _, output, _ in search.in_float32]
    return edits.units + [f"float32: {name}" for name in names], [m.why for m in edits.misses]


@pytest.mark.parametrize("converts", [True, False])
def test_units_of_a_graph_that_stays_as_it_is_are_not_told(converts: bool) -> None:
    products = Rule(action="keep_float32", op="MatMul")
    config = dataclasses.replace(CPU, rules=(products,) if converts else (), converts=converts)
    result = rewrite_graph_def(
        graph(BATCH_NORM), config, shapes=lambda name: (SHAPES.get(name),), preserve=("z",)
    )
    assert (result.changed, result.report.fused_units) == (False, ())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("scale = Mul(rsqrt, gamma)", "scale = Identity(rsqrt)"),
        ("offset = Sub(beta, shift)", "offset = Neg(shift)"),
        ("offset = Sub(beta, shift)", "turned = Neg(shift)\noffset = AddV2(turned, beta)"),
        ("y = AddV2(product, offset)", "less = Sub(product, shift)\ny = Add(beta, less)"),
        ("product = Mul(x, scale)", "scaled = Mul(x, gamma)\nproduct = Mul(scaled, rsqrt)"),
        (
            "y = AddV2(product, offset)",
            """centred = Sub(x, mean)
hat = Mul(centred, rsqrt)
wide = Mul(gamma, hat)
y = AddV2(wide, beta)""",
        ),
    ],
)
def test_every_way_of_writing_the_same_is_a_unit(old: str, new: str) -> None:
    assert find(BATCH_NORM.replace(old, new)) == (["batch-norm: y"], [])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("product = Mul(x, scale)", "product = Mul(gamma, scale)"),
        ("scale = Mul(rsqrt, gamma)", "scale = Exp(rsqrt)"),
        ("offset = Sub(beta, shift)", "offset = Exp(shift)"),
        ("offset = Sub(beta, shift)", "offset = AddV2(beta, shift)"),
        ("beta = Identity(beta_value)", "beta = Exp(beta_value)"),
        ("shift = Mul(mean, scale)", "shift = Mul(x, scale)"),
        ("shift = Mul(mean, scale)", "shift = Mul(mean, rsqrt)"),
    ],
)
def test_what_computes_something_else_is_a_near_miss(old: str, new: str) -> None:
    units, (miss,) = find(BATCH_NORM.replace(old, new))
    assert not units
    assert miss == "found no node, or several, that make r g (x - m) + b of x"


@pytest.mark.parametrize(("read", "units"), [("x[0]", ["batch-norm: y"]), ("x[1]", [])])
def test_other_outputs_of_what_makes_x_are_other_tensors(read: str, units: list[str]) -> None:
    halves = "both = MatMul(weights, weights)\nx = Split(0, both, num_split=2)"
    text = BATCH_NORM.replace("x = MatMul(weights, weights)", halves)
    assert find(text.replace("product = Mul(x,", f"product = Mul({read},"))[0] == units


def test_what_is_read_inside_is_left_in_float32() -> None:
    read = BATCH_NORM.replace("z = MatMul(y, weights)", "z = Mul(square, y)")
    assert find(read, ("z",)) == (
        ["float32: y"],
        ["'z' outside the unit reads 'square'"],
    )


@pytest.mark.parametrize(
    ("shape", "obstacle"),
    [
        ((8, 4, 8), "the statistics keep 2 axes, not 1"),
        (None, "nothing shows the rank of the input"),
        ((8, None), "the number of channels is not known"),
    ],
)
def test_what_cannot_be_fused_says_why(shape: tuple[int | None, ...] | None, obstacle: str) -> None:
    text = BATCH_NORM.replace("offset = Sub(beta, shift)", "offset = Neg(shift)")
    assert find(text, x=shape) == (["float32: y"], [f"{obstacle}"])


@pytest.mark.parametrize(
    ("old", "new", "shapes"),
    [
        ("scale = Mul(rsqrt, gamma)", "one = Const(1.0)\nscale = Mul(rsqrt, one)", {}),
        ("offset = Sub(beta, shift)", "zero = Const(0.0)\noffset = Sub(zero, shift)", {}),
        ("beta_value = Const(0.0, [8])", "beta_value = Const(0.0, [1, 8])", {"beta": (1, 8)}),
        ("gamma_value = Const(1.0, [8])", "gamma_value = Const(1.0, [1, 8])", {"gamma": (1, 8)}),
    ],
)
def test_scales_and_offsets_of_other_ranks_are_taken(
    old: str, new: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    assert find(BATCH_NORM.replace(old, new), **shapes) == (["batch-norm: y"], [])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("name", ["gamma", "beta"])
def test_one_scale_or_offset_for_all_channels_is_none_of_the_op(
    name: str, shape: tuple[int, ...]
) -> None:
    units, (miss,) = find(BATCH_NORM, **{name: shape})
    assert units == ["float32: y"]
    assert miss == f"{name!r} of shape {shape} has not one element for each channel"


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("shapes", [((1,), (16,)), ((16,), (1,)), ((), (1, 1))])
def test_a_program_with_one_scale_or_offset_for_all_channels_runs(
    shapes: tuple[tuple[int, ...], ...], known: bool, config: PrecisionConfig
) -> None:
    eye = np.eye(16, dtype=np.float32)

    def step(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> list[tf.Tensor]:
        made = tf.matmul(x, eye)
        mean, variance = tf.nn.moments(made, [0])
        y = tf.nn.batch_normalization(made, mean, variance, beta, gamma, 1e-3)
        return [tf.matmul(y, eye)]

    specs = shapes if known else [(None,) * len(shape) for shape in shapes]
    graph = trace(step, *map(tf.TensorSpec, ((None, 16), *specs)))
    given = [whole_numbers((32, 16))[0], *(np.full(shape, 0.5, np.float32) for shape in shapes)]
    wanted = graph.run(graph.graph_def, *given)
    assert_near(graph.run(graph.find(config).proto, *given), wanted, 1e-5)
