"""Rules from the values of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from environments import RunPython

import tf_amp
from graph_passes.policy.rules import load_rules
from tf_amp.calibration import calibrate
from tf_amp.calibration.ranges import Range
from tf_amp.comparison.callables import load_signatures
from tf_amp.comparison.compare import results_of
from tf_amp.model_files import ModelError

MAIN = "import sys; from tf_amp.cli.main import main; sys.exit(main())"
WIDTH = 16
LARGE, SMALL = (4.0, 4e4), (1e-4, 6e-5)
"""Magnitudes of inputs and of the planted weight: in range each, their product is not."""


def save(path: Path, planted: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Path:
    """Four products, of which the third one is planted."""
    weight = tf.constant(np.eye(WIDTH, dtype=np.float32) + 0.01)

    def call(x: tf.Tensor) -> dict[str, tf.Tensor]:
        for number in range(4):
            if number == 2:
                with tf.name_scope("planted"):
                    x = planted(x, weight)
            else:
                x = tf.nn.relu(tf.matmul(x, weight, name=f"product_{number}"))
        return {"y": x}

    module = tf.Module()
    module.call = tf.function(call, input_signature=[tf.TensorSpec([None, WIDTH], name="x")])
    tf.saved_model.save(module, str(path), signatures=module.call)
    return path


def scaled(scale: float) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    def planted(x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        x = tf.matmul(x, weight * scale, name="product")
        # Log is on the deny list: nothing else that is converted reads the values.
        return tf.exp(tf.math.log(x) - np.log(scale).astype(np.float32))

    return planted


def cancelling(x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Float16 has 2 values between 1000 and 1001."""
    x = tf.matmul(x + 1000.0, weight, name="product")
    return x - 1000.0 * tf.reduce_sum(weight, 0)


def batches(size: float = 1.0, count: int = 3) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shape = (8, WIDTH)
    return [{"x": size * (0.5 + rng.random(shape, np.float32))} for _ in range(count)]


def beyond(model: Path, samples: list, rules: tuple, tolerance: float = 0.01) -> bool:
    """Whether the model is off when it is converted with rules."""
    config = tf_amp.PrecisionConfig(target_dtype="float16", device="GPU", rules=rules)
    low = model.with_name("low")
    tf_amp.convert_saved_model(model, low, config=config, force=True)
    return bool(tf_amp.compare_models(model, low, samples).beyond(tolerance))


@pytest.mark.parametrize(
    ("planted", "said"),
    [(LARGE, "max |x| 3.4"), (SMALL, "100% of the values underflow")],
    ids=["over", "under"],
)
def test_names_the_planted_node(tmp_path: Path, planted: tuple, said: str) -> None:
    size, scale = planted
    model, samples = save(tmp_path / "model", scaled(scale)), batches(size)
    found = tf_amp.calibrate(model, samples, tolerance=0.01)
    assert [rule.node for rule in found.rules] == ["planted/product"]
    assert said in found.rules[0].why and "over 3 batches" in found.rules[0].why
    assert (found.batches, found.runs, found.holds) == (3, 1, True)
    assert (found.flops_share_before, found.flops_share) == (1, 0.75)
    file = tmp_path / "rules.toml"
    file.write_text(found.text)
    assert beyond(model, samples, ())
    assert not beyond(model, samples, load_rules(file, "call"))


def test_what_is_in_range_needs_no_rule(tmp_path: Path) -> None:
    found = tf_amp.calibrate(save(tmp_path / "model", cancelling), batches())
    assert (found.rules, found.flops_share, found.runs, found.holds) == ((), 1, 0, None)


def test_bisects_what_no_range_tells(tmp_path: Path) -> None:
    model, samples = save(tmp_path / "model", cancelling), batches()
    assert beyond(model, samples, ())
    found = tf_amp.calibrate(model, samples, tolerance=0.01)
    assert found.holds and not beyond(model, samples, found.rules)
    assert found.flops_share == 0.75
    # Besides, what reads the inputs of the addition stays float32; no other product does.
    products = [rule.node for rule in found.rules if "product" in rule.node]
    assert products == ["planted/product"] and len(found.rules) <= 3
    assert found.runs <= 20
    assert all("off by over 0.01 with it in float16" in rule.why for rule in found.rules)


def test_float32_is_loaded_and_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = save(tmp_path / "model", cancelling), batches()
    loaded, run = [], []

    def load(path: Path) -> dict[str, Any]:
        loaded.append(path)
        return load_signatures(path)

    def results(signature: Any, given: Any) -> Any:
        run.append(signature)
        return results_of(signature, given)

    monkeypatch.setattr(calibrate, "load_signatures", load)
    monkeypatch.setattr(calibrate, "results_of", results)
    config = tf_amp.PrecisionConfig(target_dtype="float16", device="GPU")
    found = calibrate.calibrate(model, samples, config, tolerance=0.01)
    assert found.runs > 2
    assert loaded.count(model) == 1 and len(run) == 1


def test_tolerance_that_nothing_holds_but_float32(tmp_path: Path) -> None:
    found = tf_amp.calibrate(save(tmp_path / "model", cancelling), batches(), tolerance=0.0)
    assert (found.holds, found.flops_share) == (True, 0)


def test_loops_and_variables(tmp_path: Path) -> None:
    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable(tf.eye(WIDTH))

        @tf.function(input_signature=[tf.TensorSpec([None, WIDTH], name="x")])
        def call(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
            for number in tf.range(6):
                grown = tf.nn.relu(tf.matmul(x, self.weight * 10, name="grow"))
                x = tf.where(number < 5, grown, tf.math.log(grown))
            return {"y": x}

    model = Model()
    tf.saved_model.save(model, str(tmp_path / "model"), signatures=model.call)
    found = tf_amp.calibrate(tmp_path / "model", batches())
    # Only the last turns are out of range.
    assert any(rule.node.endswith("grow") for rule in found.rules)
    assert all("max |x| 1" in rule.why for rule in found.rules)


def test_keras_file(tmp_path: Path) -> None:
    import keras

    weights = [np.eye(WIDTH) * 300, np.zeros(WIDTH)]
    model = keras.Sequential(
        [keras.Input((WIDTH,), name="x"), *(keras.layers.Dense(WIDTH) for _ in "abc")]
    )
    for layer in model.layers:
        layer.set_weights(weights)
    model.save(tmp_path / "model.keras")
    found = tf_amp.calibrate(tmp_path / "model.keras", batches())
    # 300, 9e4, 2.7e7: what reads 9e4 is out of range too.
    products = [rule.node for rule in found.rules if rule.node.endswith("MatMul")]
    assert len(products) == 2
    assert not beyond(tmp_path / "model.keras", batches(), found.rules)


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([], "no samples"),
        ([{"z": 1}], "lack the input"),
        ([{"x": np.zeros((0, WIDTH))}], "no rows"),
    ],
)
def test_samples_that_do_not_fit(tmp_path: Path, samples: list, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        tf_amp.calibrate(save(tmp_path / "model", cancelling), samples)


def test_frozen_graph(tmp_path: Path) -> None:
    size, scale = LARGE
    graph, weight = tf.Graph(), np.eye(WIDTH, dtype=np.float32)
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, WIDTH], name="x")
        tf.nn.relu(tf.matmul(x, tf.constant(weight), name="product"), name="y")
        with tf.name_scope("planted"):
            scaled(scale)(x, tf.constant(weight + np.linspace(0, 0.02, WIDTH, dtype=np.float32)))
    path = tmp_path / "graph.pb"
    path.write_bytes(graph.as_graph_def().SerializeToString())
    found = tf_amp.calibrate(path, batches(size), batches=1, tolerance=0.01)
    assert [rule.node for rule in found.rules] == ["planted/product"]
    assert (found.batches, found.holds) == (1, True)


def test_batches_are_counted_from_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="batches=0"):
        tf_amp.calibrate(tmp_path, batches(), batches=0)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_ranges_add_up(name: str) -> None:
    dtype = tf.as_dtype(name).as_numpy_dtype
    values = np.float32([0, 1, -7e4, 1e-9, 2.0**-24, np.inf, np.nan, 1e-44])
    found = Range()
    for part in np.split(values, 4):
        found.add(part, dtype)
    with np.errstate(over="ignore"):
        low = values.astype(dtype).astype(np.float32)
    assert found.largest == 7e4 and found.non_finite == 2 and found.nonzero == 5
    assert found.over == np.count_nonzero(np.isfinite(values) & ~np.isfinite(low))
    assert found.flushed == np.count_nonzero((low == 0) & (values != 0))
    assert found.underflow == found.flushed / 5


@pytest.mark.slow
def test_command(run_python: RunPython, tmp_path: Path) -> None:
    size, scale = LARGE
    model, rules = save(tmp_path / "model", scaled(scale)), tmp_path / "rules.toml"
    np.savez(tmp_path / "x.npz", **batches(size)[0])
    target = ("--dtype", "float16", "--device", "GPU")
    arguments = ("calibrate", str(model), "--inputs", str(tmp_path / "x.npz"), *target)
    arguments = (*arguments, "--tolerance", "0.01", "-o", str(rules))
    done = run_python(MAIN, args=arguments)
    assert "FLOPs in float16: 100% without the rules, 75.0% with them" in done.stdout
    assert "1 rule from" in done.stdout and "over 1 batch\n" in done.stdout
    assert [rule.node for rule in load_rules(rules)] == ["planted/product"]
    done = run_python(MAIN, args=arguments, check=False)
    assert done.returncode == 1 and "exists" in done.stderr  # the file is not replaced
    planned = ("plan", str(model), *target, "--rules", str(rules))
    text = run_python(MAIN, args=planned).stdout
    assert "meets nodes of 1 function" in text and "3 of 4" in text
