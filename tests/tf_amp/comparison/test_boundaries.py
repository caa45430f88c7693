"""The inside of a converted model beside the float32 one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from cpu_units import bfloat16_errors_behind_products

import tf_amp
from tf_amp.comparison.compare import Comparison, compare
from tf_amp.comparison.output_figures import OutputFigures

WIDTH = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Products in a loop, in a function that is called twice, and one with values to lose."""
    path = tmp_path_factory.mktemp("models") / "model"
    weight = tf.Variable(np.eye(WIDTH, dtype=np.float32) + 0.01)

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(tf.matmul(x, weight, name="called"))

    def call(x: tf.Tensor) -> dict[str, tf.Tensor]:
        for _ in tf.range(3):
            x = tf.nn.relu(tf.matmul(x, weight, name="turning"))
        x = inner(inner(x))
        y = tf.matmul(x, weight * 3e4, name="planted") * 1e-4
        return {"y": tf.math.log(tf.matmul(y, weight, name="last"))}

    module = tf.Module()
    module.weight = weight
    module.call = tf.function(call, input_signature=[tf.TensorSpec([None, WIDTH], name="x")])
    tf.saved_model.save(module, str(path), signatures=module.call)
    return path


def compared(model: Path, dtype: str, size: float, keep: str = "", **options: bool) -> Comparison:
    low = model.with_name("low")
    rules = [tf_amp.Rule(action="keep_float32", node=keep, why="a test")] if keep else []
    config = tf_amp.PrecisionConfig(target_dtype=dtype, device="GPU", rules=tuple(rules))
    tf_amp.convert_saved_model(model, low, config=config, force=True, **options)
    x = size * (0.5 + np.random.default_rng(0).random((4, WIDTH), np.float32))
    return compare(model, low, [{"x": x}, {"x": x / 2}], rounds=0, boundaries=True)


def by_node(found: Comparison) -> dict[str, OutputFigures]:
    return {o.name.rpartition("/")[2].partition(":")[0]: o for o in found.boundaries}


@pytest.mark.parametrize("weights", [False, True])
def test_every_product_is_found_in_loops_and_functions(model: Path, weights: bool) -> None:
    found = compared(model, "bfloat16", 1.0, weights=weights)
    inside = by_node(found)
    assert {"turning", "called", "planted", "last"} <= inside.keys()
    order = [o.name.rpartition("/")[2] for o in found.boundaries]
    assert order.index("turning") < order.index("called") < order.index("last")
    values = 2 * 4 * WIDTH  # of two samples
    assert inside["turning"].values == 3 * values
    assert inside["called"].values == 2 * values
    assert inside["last"].values == values
    for figures in inside.values():
        assert 0 < figures.max_relative < 0.03 * bfloat16_errors_behind_products()
        assert figures.cosine > 0.999
        assert figures.overflowed == figures.flushed == 0
    assert inside["last"].op == "MatMul"
    assert found.boundaries_alone == 0


def test_what_overflows_inside_is_named(model: Path) -> None:
    inside = by_node(compared(model, "float16", 4.0))
    assert inside["planted"].overflowed == 1
    assert inside["called"].overflowed == 0
    kept = compared(model, "float16", 4.0, keep=".*planted|.*mul.*")
    assert all(o.overflowed == 0 for o in (*kept.outputs, *kept.boundaries))
    assert "planted" not in by_node(kept)


def test_what_a_fold_gives_is_beside_the_node_that_it_replaced(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    inputs = keras.Input([8, 8, 3], name="image")
    x = keras.layers.Conv2D(8, 3, use_bias=False)(inputs)
    x = keras.layers.BatchNormalization(beta_initializer="ones")(x)
    keras.Model(inputs, keras.layers.ReLU()(x)).export(str(tmp_path / "model"))
    config = tf_amp.PrecisionConfig(target_dtype="bfloat16", device="CPU")
    tf_amp.convert_saved_model(tmp_path / "model", tmp_path / "low", config=config)
    found = compare(tmp_path / "model", tmp_path / "low", rounds=0, boundaries=True)
    folded = [o for o in found.boundaries if "/folded" in o.name]
    assert folded and found.boundaries_alone == 0
    assert all(0 < o.max_relative < 0.02 and o.cosine > 0.9999 for o in folded)


def test_calls_of_one_function_at_once_are_not_mixed_up(tmp_path: Path) -> None:
    weight = tf.Variable(np.random.default_rng(0).random((64, 64), np.float32) / 32)

    @tf.function
    def tower(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(tf.nn.tanh(tf.matmul(x, weight)), weight)

    module = tf.Module()
    module.weight = weight
    module.call = tf.function(
        lambda x: {"y": tf.add_n([tower(x * 4.0**-power) for power in range(8)])},
        input_signature=[tf.TensorSpec([None, 64], name="x")],
    )
    tf.saved_model.save(module, str(tmp_path / "model"), signatures=module.call)
    config = tf_amp.PrecisionConfig(target_dtype="bfloat16", device="GPU")
    tf_amp.convert_saved_model(tmp_path / "model", tmp_path / "low", config=config)
    sample = {"x": np.ones((64, 64), np.float32)}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads interrupt each other wherever they may
    try:
        found = compare(
            tmp_path / "model", tmp_path / "low", [sample] * 8, rounds=0, boundaries=True
        ).boundaries
    finally:
        sys.setswitchinterval(interval)
    assert found
    assert max(figures.max_relative for figures in found) < 0.05


def test_a_model_beside_itself_has_no_low_precision(model: Path) -> None:
    found = compare(model, model, rounds=0, count=1, boundaries=True)
    assert (found.boundaries, found.boundaries_alone) == ((), 0)


def test_loops_of_tensorflow_1_are_looked_into(tmp_path: Path) -> None:
    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            x = tf.compat.v1.placeholder(tf.float32, (None, WIDTH), name="x")
            weight = tf.constant(np.eye(WIDTH, dtype=np.float32) * 0.9)
            looped = tf.while_loop(
                lambda i, y: i < 3,
                lambda i, y: (i + 1, tf.matmul(tf.nn.relu(y), weight, name="turning")),
                [0, x],
            )
            tf.nn.softmax(tf.matmul(looped[1], weight), name="out")
    finally:
        tf.compat.v1.enable_control_flow_v2()
    model = tmp_path / "model.pb"
    model.write_bytes(graph.as_graph_def().SerializeToString())
    tf_amp.convert_saved_model(model, tmp_path / "low.pb")
    found = compare(model, tmp_path / "low.pb", rounds=0, boundaries=True)
    assert "turning" in by_node(found)
