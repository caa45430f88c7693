"""What is found, and what is made of it, whatever the order in which a graph lists its nodes."""

from __future__ import annotations

import random
from collections.abc import Callable

import keras
import pytest
from keras import layers
from norm_networks import NORMS, token_network
from tensorflow.core.framework import graph_pb2
from training_steps import Step, residual_cnn, trace

from graph_passes import PrecisionConfig, RewriteResult, rewrite_graph_def

CONFIGS = {
    "bfloat16": PrecisionConfig(target_dtype="bfloat16", device="CPU"),
    "float16": PrecisionConfig(target_dtype="float16", device="GPU"),
}


def encoder() -> keras.Model:
    """Attention and two products a block, between normalizations of residual sums."""
    x = inputs = keras.Input((6, 16))
    for _ in range(2):
        y = layers.MultiHeadAttention(2, 8)(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, layers.Dropout(0.1)(y)]))
        y = layers.Dense(16)(layers.Dense(32, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, y]))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def frozen_cnn() -> keras.Model:
    """Convolutions of which one has statistics that are not updated."""
    x = inputs = keras.Input((8, 8, 4))
    for number in range(2):
        normalization = layers.BatchNormalization()
        normalization.trainable = number == 1
        x = layers.ReLU()(normalization(layers.Conv2D(8, 3)(x)))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


NETWORKS: dict[str, Callable[[], keras.Model]] = {
    "encoder": encoder,
    "residual_cnn": residual_cnn,
    "frozen_cnn": frozen_cnn,
    **{name: token_network(name) for name in NORMS},
}


@pytest.fixture(scope="module", params=NETWORKS)
def step(request: pytest.FixtureRequest) -> Step:
    return trace(NETWORKS[request.param], 8)


def rewritten(
    step: Step, config: PrecisionConfig, order: Callable[[list], None] | None = None
) -> RewriteResult:
    graph_def = graph_pb2.GraphDef.FromString(step.graph_def.SerializeToString())
    nodes = list(step.graph_def.node)
    if order is not None:
        order(nodes)
    del graph_def.node[:]
    graph_def.node.extend(nodes)
    result = rewrite_graph_def(graph_def, config, preserve=step.preserve, shapes=step.shapes)
    assert result.failure is None
    return result


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_units_and_nodes_do_not_depend_on_it(step: Step, config: PrecisionConfig) -> None:
    wanted = rewritten(step, config)
    nodes = {node.name: node for node in wanted.graph_def.node}
    for order in (list.reverse, random.Random(1).shuffle, random.Random(2).shuffle):
        found = rewritten(step, config, order)
        assert sorted(found.report.fused_units) == sorted(wanted.report.fused_units)
        assert {node.name: node for node in found.graph_def.node} == nodes
