"""Layer normalizations on a GPU as fused batch normalizations of rows."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from norm_networks import NORMS, token_network
from programs import trace as trace_program
from rewrite_checks import in_float32, rewrite_graph
from tensorflow.core.framework import types_pb2
from traced_graphs import trace as trace_function
from training_steps import Step, trace

from graph_passes import PrecisionConfig, rewrite_graph_def
from graph_passes.ir.view import view_body
from graph_passes.units.fusion import Fusion, find_units

# Graphs as small as these are not worth their Casts, and their updates are others' business.
PAINTED = frozenset(("cast-cut", "fused-update"))
GPU = PrecisionConfig(target_dtype="float16", device="GPU", disabled_rules=PAINTED)
FUSABLE = [name for name in NORMS if name.startswith("layer") and name != "layer, centred"]


@pytest.fixture(scope="module", params=[(name, batch) for name in FUSABLE for batch in (8, None)])
def step(request: pytest.FixtureRequest) -> Step:
    name, batch = request.param
    return trace(token_network(name), batch)


def units_of(
    step: Step, config: PrecisionConfig = GPU, preserve: frozenset[str] = frozenset()
) -> Fusion:
    view = view_body(step.graph_def, step.shapes)
    return find_units(step.graph_def, view, config, step.preserve | preserve)


def fused(fusion: Fusion) -> int:
    return sum(unit.startswith("fused-layer-norm") for unit in fusion.units)


def test_nothing_is_left_of_the_primitives(step: Step) -> None:
    fusion = units_of(step)
    assert fused(fusion) == 3
    assert not fusion.misses
    ops = [node.op for node in fusion.view.nodes]
    assert ops.count("FusedBatchNormV3") == ops.count("FusedBatchNormGradV3") == 3
    assert not {"Rsqrt", "RsqrtGrad", "SquaredDifference"} & set(ops)


def test_the_fused_ops_take_and_give_float16(step: Step) -> None:
    """No tensor of x's size is cast on the way through a unit."""
    result = rewrite_graph_def(step.graph_def, GPU, preserve=step.preserve, shapes=step.shapes)
    assert result.failure is None
    nodes = {node.name: node for node in result.graph_def.node}
    units = [node for node in nodes.values() if node.op.startswith("FusedBatchNorm")]
    assert len(units) == 6
    for node in units:
        assert node.attr["T"].type == types_pb2.DT_HALF
        assert node.attr["U"].type == types_pb2.DT_FLOAT
        for tensor in node.input[:1]:
            maker = nodes[tensor.partition(":")[0]]
            assert maker.op == "Reshape"
            assert nodes[maker.input[0].partition(":")[0]].op != "Cast"


def test_sums_for_scale_and_offset_take_float16(step: Step) -> None:
    result = rewrite_graph_def(step.graph_def, GPU, preserve=step.preserve, shapes=step.shapes)
    sums = [
        node
        for node in result.graph_def.node
        if node.op == "BiasAddGrad" and "layer_norm" in node.name
    ]
    assert {node.attr["T"].type for node in sums} <= {types_pb2.DT_HALF}


def test_gradients_agree_with_float32(step: Step) -> None:
    """In float32 to rounding, in float16 to a part of the largest gradient."""
    (expected,), wanted = step.train(step.graph_def, 1)
    largest = max(np.max(np.abs(new)) for new in step.updates(wanted))
    result = rewrite_graph_def(step.graph_def, GPU, preserve=step.preserve, shapes=step.shapes)
    in_float32 = units_of(step).view
    graph_def = type(step.graph_def)(node=in_float32.nodes)
    for changed, tolerance in ((graph_def, 2e-5), (result.graph_def, 5e-3)):
        (found,), weights = step.train(changed, 1)
        assert found == pytest.approx(expected, rel=tolerance)
        for new, old in zip(step.updates(weights), step.updates(wanted), strict=True):
            np.testing.assert_allclose(new / largest, old / largest, atol=tolerance)


def test_a_second_rewrite_changes_nothing(step: Step) -> None:
    once = rewrite_graph_def(step.graph_def, GPU, preserve=step.preserve, shapes=step.shapes)
    twice = rewrite_graph_def(once.graph_def, GPU, preserve=step.preserve)
    assert twice.graph_def == once.graph_def


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("layer, centred", "epsilon 1e-06 is below"),
        ("group", "not taken over the last axes"),
        ("rms", None),
    ],
)
def test_what_is_not_fused_stays_a_float32_unit(name: str, why: str | None) -> None:
    fusion = units_of(trace(token_network(name), 8))
    assert fused(fusion) == 0
    rule = "rms-norm" if name == "rms" else "layer-norm"
    assert sum(unit.startswith(rule) for unit in fusion.units) == 3
    found = [miss.why for miss in fusion.misses]
    assert len(found) == (3 if why else 0)
    assert all(why in miss for miss in found if why)


@pytest.mark.parametrize(
    "config",
    [
        PrecisionConfig(target_dtype="bfloat16", device="CPU"),
        PrecisionConfig(
            target_dtype="float16", device="GPU", disabled_rules=frozenset(("fused-layer-norm",))
        ),
        PrecisionConfig(target_dtype="float16", device="GPU", fused=True),
    ],
)
def test_other_devices_and_compilers_keep_the_primitives(config: PrecisionConfig) -> None:
    fusion = units_of(trace(token_network("layer"), 8), config)
    assert fused(fusion) == 0
    assert sum(unit.startswith("layer-norm") for unit in fusion.units) == 3


def test_a_preserved_node_inside_is_a_near_miss() -> None:
    step = trace(token_network("layer"), 8)
    inside = next(node.name for node in step.graph_def.node if node.op == "SquaredDifference")
    fusion = units_of(step, preserve=frozenset((inside,)))
    assert fused(fusion) == 2
    assert any("preserved" in miss.why for miss in fusion.misses)


@pytest.mark.parametrize("op", ["Rsqrt", "RsqrtGrad"])
def test_a_reader_outside_is_a_near_miss(op: str) -> None:
    step = trace(token_network("layer"), 8)
    step.graph_def = type(step.graph_def).FromString(step.graph_def.SerializeToString())
    inside = next(node.name for node in step.graph_def.node if node.op == op)
    spy = step.graph_def.node.add(name="spy", op="Exp", input=[inside])
    spy.attr["T"].type = types_pb2.DT_FLOAT
    fusion = units_of(step, preserve=frozenset(("spy",)))
    assert fused(fusion) == 2
    assert any("outside the unit reads" in miss.why for miss in fusion.misses)


def test_what_a_node_outside_waits_for_stays() -> None:
    """No value leaves the unit that way, so that both are computed."""
    step = trace(token_network("layer"), 8)
    step.graph_def = type(step.graph_def).FromString(step.graph_def.SerializeToString())
    inside = next(node.name for node in step.graph_def.node if node.op == "Rsqrt")
    step.graph_def.node.add(name="waiting", op="NoOp", input=["^" + inside])
    fusion = units_of(step, preserve=frozenset(("waiting",)))
    assert fused(fusion) == 3
    nodes = {node.name: node for node in fusion.proto.node}
    assert nodes["waiting"].input == ["^" + inside]
    assert nodes[inside].op == "Rsqrt"


def shared_gradient() -> keras.Model:
    """Two normalizations whose outputs are added, so that one tensor is the gradient of both."""
    inputs = keras.Input((6, 8))
    x = layers.Dense(8)(inputs)
    y = layers.LayerNormalization()(layers.Dense(8)(x))
    x = layers.Add()([layers.LayerNormalization()(x), y])
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def first_layer() -> keras.Model:
    """A normalization whose input needs no gradient."""
    inputs = keras.Input((6, 8))
    x = layers.Dense(8)(layers.LayerNormalization()(inputs))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


@pytest.mark.parametrize("batch", [8, None])
@pytest.mark.parametrize(("build", "count"), [(shared_gradient, 2), (first_layer, 1)])
def test_other_networks_agree_with_float32(build, count: int, batch: int | None) -> None:
    step = trace(build, batch)
    assert fused(units_of(step)) == count
    (expected,), wanted = step.train(step.graph_def, 1)
    result = rewrite_graph_def(step.graph_def, GPU, preserve=step.preserve, shapes=step.shapes)
    assert result.failure is None
    (found,), weights = step.train(result.graph_def, 1)
    assert found == pytest.approx(expected, rel=5e-3)
    largest = max(np.max(np.abs(new)) for new in step.updates(wanted))
    for new, old in zip(step.updates(weights), step.updates(wanted), strict=True):
        np.testing.assert_allclose(new / largest, old / largest, atol=5e-3)


Layout = Callable[[tf.Tensor], tf.Tensor]
LAYOUTS: dict[str, tuple[tuple[int, ...], Layout, bool]] = {
    "as a row": ((8, 8), lambda statistic: statistic, False),
    "as a column": ((8, 8), lambda statistic: tf.expand_dims(statistic, 1), True),
    "along the tokens": ((3, 8, 8), lambda statistic: tf.expand_dims(statistic, 1), False),
    "along the features": ((8, 8, 8), lambda statistic: tf.expand_dims(statistic, 0), False),
    "by example and token": ((8, 8, 8), lambda statistic: tf.expand_dims(statistic, -1), True),
}
"""Sizes that happen to agree, and how statistics over the last axis meet x."""


@pytest.mark.parametrize("scaled", ["x", "deviation"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_statistics_that_are_laid_along_another_axis_are_no_layer_norm(
    name: str, scaled: str
) -> None:
    shape, layout, fits = LAYOUTS[name]
    eye = np.eye(8, dtype=np.float32)

    def step(x: tf.Tensor, gamma: tf.Tensor) -> list[tf.Tensor]:
        made = tf.matmul(x, eye)
        mean, variance = tf.nn.moments(made, [-1])
        if scaled == "x":
            y = (made - layout(mean)) * layout(tf.math.rsqrt(variance + 1e-3)) * gamma
        else:
            y = (made - layout(mean)) * (layout(tf.math.rsqrt(variance + 1e-3)) * gamma)
        return [tf.matmul(y, eye)]

    graph = trace_function(step, tf.TensorSpec(shape), tf.TensorSpec((8,)))
    fusion = graph.find(GPU)
    assert fused(fusion) == fits
    assert any("varies along an axis" in miss.why for miss in fusion.misses) != fits
    x = np.random.default_rng(0).normal(size=shape) * np.arange(1, 9)[:, None]
    given = x.astype(np.float32), np.full(8, 0.5, np.float32)
    (wanted,), (found,) = (graph.run(g, *given) for g in (graph.graph_def, fusion.proto))
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("size", [1, 8])
def test_a_scale_of_unknown_length_may_be_one_for_all(size: int) -> None:
    eye = np.eye(8, dtype=np.float32)

    def step(x: tf.Tensor, gamma: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch((x, gamma))
            made = tf.matmul(x, eye)
            mean, variance = tf.nn.moments(made, [-1], keepdims=True)
            scale = tf.math.rsqrt(variance + 1e-3) * gamma
            loss = tf.square(tf.matmul(made * scale - mean * scale, eye))
        return tape.gradient(loss, [x, gamma])

    graph = trace_function(step, tf.TensorSpec((4, 8)), tf.TensorSpec((None,)))
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    given = x, np.full(size, 0.5, np.float32)
    wanted, found = (graph.run(g, *given) for g in (graph.graph_def, graph.find(GPU).proto))
    for new, old in zip(found, wanted, strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=1e-5 * np.abs(x).max())


def test_what_has_no_elements_keeps_its_shape() -> None:
    weight = tf.Variable(np.eye(8, dtype=np.float32))

    def normalized(x: tf.Tensor) -> tf.Tensor:
        y = tf.matmul(x, weight)
        mean, variance = tf.nn.moments(y, [-1], keepdims=True)
        return tf.nn.batch_normalization(y, mean, variance, None, None, 1e-3)

    spec, value = tf.TensorSpec((0, None, 8)), np.zeros((0, 3, 8), np.float32)
    program = trace_program(normalized, spec, value)
    result = rewrite_graph(program, PrecisionConfig())
    assert any("fused-layer-norm" in unit for unit in result.units)
    ran = program.run(in_float32(result.graph_def, types_pb2.DT_HALF))
    assert [ran[tensor].shape for tensor in program.fetches] == [value.shape]
