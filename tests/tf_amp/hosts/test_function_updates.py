"""Fused updates in programs as they are: in a step, under the gate of a loss scale, on replicas."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from environments import AMP, BFLOAT16, REWRITE, WITHOUT_UNITS, RunPython

FLOAT16 = {**BFLOAT16, f"{REWRITE}_DTYPE": "float16"}
OFF = {f"{REWRITE}_RULES_DISABLE": "fused-update"}

PRELUDE = f"""
import json
import sys
from tf_amp import autoload
autoload.activate()
import numpy as np
import tensorflow as tf
import tf_amp
sys.path.append({str(Path(__file__).parent)!r})
from function_harness import most_nodes

def updates():
    return most_nodes(lambda node: node.op == "ResourceApplyAdam")
"""

FIT = """
import contextlib
import keras
keras.utils.set_random_seed(0)
place = contextlib.nullcontext()
if sys.argv[1:]:
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
    place = tf.device("CPU:1")
if "replicas" in sys.argv:
    place = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope()
with place:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(4)])
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    if "together" in sys.argv:
        model.optimizer.build(model.trainable_variables)  # otherwise outside, by `fit`
x = np.random.default_rng(0).standard_normal((32, 8)).astype("f")
history = model.fit(x, np.tanh(x[:, :4]), batch_size=16, epochs=2, shuffle=False, verbose=0)
weights = np.concatenate([w.ravel() for w in model.get_weights()]).tolist()
casts = most_nodes(lambda node: node.op == "Cast" and node.attr["DstT"].type == 14)
losses = history.history["loss"]
print(json.dumps({"updates": updates(), "casts": casts, "loss": losses, "weights": weights}))
"""

SKIPPED = """
import keras
keras.utils.set_random_seed(0)
layers = [keras.layers.Embedding(1000, 8), keras.layers.Flatten(), keras.layers.Dense(4)]
model = keras.Sequential([keras.Input((2,), dtype="int32"), *layers])
model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
x, y = np.array([[1, 2], [2, 2], [3, 9], [2, 1]]), np.ones((4, 4), "f")
def state():
    return [v.numpy().copy() for v in (*model.variables, *model.optimizer.variables)]
model.train_on_batch(x, y)
before = state()
model.train_on_batch(x, np.full_like(y, np.inf))
skipped = all(np.array_equal(a, b) for a, b in zip(before, state()))
model.train_on_batch(x, y)
changed = sum(not np.array_equal(a, b) for a, b in zip(before, state()))
table = before[0] != model.variables[0].numpy()
read = np.flatnonzero(table.any(1)).tolist()
print(json.dumps({"updates": updates(), "skipped": skipped, "changed": changed, "read": read}))
"""


def result(done: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("env", "arguments", "fused"),
    [
        (BFLOAT16, (), 4),
        (FLOAT16, (), 4),
        (BFLOAT16, ("replicas",), 8),
        (BFLOAT16, ("together",), 4),
        (FLOAT16, ("together",), 4),
        # The slots are on CPU:0, and no one op could have them and what they are of.
        (BFLOAT16, ("apart",), 0),
        (FLOAT16, ("apart",), 0),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_training_is_the_same_with_fused_updates(
    run_forked: RunPython, env: dict[str, str], arguments: tuple[str, ...], fused: int
) -> None:
    on, off = (
        result(run_forked(PRELUDE + FIT, each, args=arguments)) for each in (env, {**env, **OFF})
    )
    assert (on["updates"], off["updates"]) == (fused, 0)
    assert on["loss"] == pytest.approx(off["loss"], rel=0.01)
    assert on["weights"] == pytest.approx(off["weights"], abs=0.005)  # an eighth of four steps


def test_on_hardware_without_units_updates_are_all_that_changes(run_forked: RunPython) -> None:
    done = run_forked(WITHOUT_UNITS + PRELUDE + FIT, {AMP: "1"})
    plain = run_forked(WITHOUT_UNITS + PRELUDE + FIT, {AMP: "1", **OFF})
    found, true = result(done), result(plain)
    assert (found["updates"], found["casts"], true["updates"]) == (4, 0, 0)
    assert found["weights"] == pytest.approx(true["weights"], abs=1e-6)
    for each in (done, plain):
        assert "AMP was asked for, but every graph stays in float32" in each.stderr
        assert ("is done: batch-norm, fused-update" in each.stderr) is (each is done)
    assert "(fit): 4 updates fused\n" in done.stderr
    assert "in bfloat16" not in done.stderr


NORMALIZED = """
import keras
keras.utils.set_random_seed(0)
layers = keras.layers
model = keras.Sequential([
    keras.Input((16, 16, 8)),
    layers.Conv2D(32, 3, padding="same", use_bias=False),
    layers.BatchNormalization(),
    layers.ReLU(),
    layers.GlobalAveragePooling2D(),
    layers.Dense(4),
])
model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
draw = np.random.default_rng(0)
x, y = draw.normal(size=(40, 16, 16, 8)).astype("f"), draw.normal(size=(40, 4)).astype("f")
losses = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0).history["loss"]
fused = most_nodes(lambda node: node.op == "FusedBatchNormGradV3")
losses.append(model.evaluate(x, y, verbose=0))
stored = most_nodes(lambda node: node.op == "FusedBatchNormV3" and not node.attr["is_training"].b)
statistics = [float(np.abs(v).sum()) for v in model.non_trainable_variables]
counted = dict(tf_amp.status().fused)
print(json.dumps({"fused": [fused, stored], "counted": counted, "values": losses + statistics}))
"""


def test_batch_normalizations_are_fused_on_hardware_without_units(run_forked: RunPython) -> None:
    """The last batch is smaller, and none was known when the step was traced."""
    by_others = {AMP: "1", f"{REWRITE}_RULES_DISABLE": "onednn-kernel"}
    done = run_forked(WITHOUT_UNITS + PRELUDE + NORMALIZED, by_others)
    found = result(done)
    assert ": 5 updates fused, 1 batch normalization fused\n" in done.stderr
    true = result(run_forked(WITHOUT_UNITS + PRELUDE + NORMALIZED, {}))
    assert (found["fused"], true["fused"]) == ([1, 0], [0, 0])
    counted = found["counted"]
    assert (counted["batch-norm"], counted["fused-update"], true["counted"]) == (1, 5, {})
    assert found["values"] == pytest.approx(true["values"], rel=1e-4)
    off = {f"{REWRITE}_RULES_DISABLE": "fused-update,batch-norm,grouped-convolution,onednn-kernel"}
    exact = result(run_forked(WITHOUT_UNITS + PRELUDE + NORMALIZED, {AMP: "1", **off}))
    assert exact["values"] == true["values"]


def test_what_xla_compiles_is_left_to_it_on_hardware_without_units(run_forked: RunPython) -> None:
    """It fuses by itself, and none of the rules pays there."""
    compiled = NORMALIZED.replace("jit_compile=False", "jit_compile=True")
    done = run_forked(WITHOUT_UNITS + PRELUDE + compiled, {AMP: "1"})
    found = result(done)
    assert found["fused"] == [0, 0]
    assert not any(found["counted"].values())
    lines = [line for line in done.stderr.splitlines() if line.startswith("tf_amp: ")]
    assert lines
    assert not any("): " in line for line in lines)


def test_a_skipped_step_changes_nothing(run_forked: RunPython) -> None:
    found = result(run_forked(PRELUDE + SKIPPED, FLOAT16))
    assert found["skipped"]
    # A table, whose size the gate's branch is not told, two weights, six slots and the iteration.
    assert (found["updates"], found["changed"]) == (2, 10)
    assert found["read"] == [1, 2, 3, 9]


IN_PLACE = """
import keras
keras.utils.set_random_seed(0)
layers = [keras.layers.Dense(800, activation="gelu"), keras.layers.Dense(1000)]
model = keras.Sequential([keras.Input((64,)), *layers])
model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
x, y = np.ones((4, 64), "f"), np.ones((4, 1000), "f")
model.train_on_batch(x, y)

def places():
    read = [w.value.read_value() for w in model.trainable_variables]
    return [value._numpy().__array_interface__["data"][0] for value in read]

seen = {tuple(places())}
for _ in range(30):
    model.train_on_batch(x, y)
    seen.add(tuple(places()))
print(json.dumps({"updates": updates(), "places": len(seen)}))
"""


def test_weights_in_float32_are_updated_in_place(run_forked: RunPython) -> None:
    """The product that gives the gradient of the layer's input reads them beside their own."""
    kept = {**BFLOAT16, f"{REWRITE}_DENYLIST_ADD": "MatMul"}
    assert result(run_forked(PRELUDE + IN_PLACE, kept)) == {"updates": 2, "places": 1}
