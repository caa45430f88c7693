"""The warning of float16 training that nothing scales. All of it runs in subprocesses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from environments import FLOAT16, REWRITE, RunPython

START = f"""
import sys
import tf_amp.autoload
tf_amp.autoload.activate()
sys.path.insert(0, {str(Path(__file__).parent)!r})
"""
LOSS_SCALING = "TF_ENABLE_AUTO_MIXED_PRECISION_LOSS_SCALING"
SAID = "and no loss scale of tf_amp's is in it"
REMEDIES = (
    "LossScaleManager(StaticLossScale(1024))",
    "manager.multiply(loss)",
    "manager.unscale(gradients)",
    "tf_amp.enable_mixed_precision_graph_rewrite(optimizer)",
    f"{REWRITE}_DTYPE=bfloat16",
    f"{LOSS_SCALING}=0",
)


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of the warning."""
    return [line for line in done.stderr.splitlines() if SAID in line]


def test_loops(run_forked: RunPython) -> None:
    """Each function is warned of once, however often it is traced, and no other one."""
    done = run_forked(
        START + "import unscaled_cases as cases; cases.main(); print(*cases.TOLD_OF)", FLOAT16
    )
    told, float32, expected = done.stdout.splitlines()
    assert told == expected
    assert float32 == "kept_float32"
    lines = said(done)
    names = [line.split("'")[1] for line in lines]
    assert [name for name in told.split() if name not in names] == ["with_an_optimizer_not_wrapped"]
    assert len(names) == len(told.split()) - 1
    assert all(line.startswith("tf_amp: WARNING: ") for line in lines)
    assert [remedy for remedy in REMEDIES if remedy not in lines[0]] == []
    assert done.stderr.count("A custom training loop applies gradients with SGD") == 1


def test_sessions(run_forked: RunPython) -> None:
    """Optimizers scale, also in a graph that is imported; what was built without them does not."""
    done = run_forked(START + "import unscaled_session_cases as cases; cases.main()", FLOAT16)
    of_optimizers = [
        line
        for name in ("by_sgd", "by_adam")
        for line in (f"{name} False", "imported False", "made without True")
    ]
    of_variables = [*of_optimizers, "by hand True False"]
    assert done.stdout.splitlines() == [
        *of_variables * 2,
        "of TensorFlow False False",
        *("fixed False", "fixed True"),  # by 128, and by 1
        "of two False",
    ]
    assert "A custom training loop" not in done.stderr
    lines = said(done)
    assert len(lines) == 7
    assert "'session graph (GradientDescent)' trains in float16" in lines[0]


LOOP = """
import tensorflow as tf
import tf_amp
{before}
w = tf.Variable(tf.ones([8, 8]))

@tf.function(jit_compile={compiled})
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x @ w))
    w.assign_sub(0.01 * tape.gradient(loss, w))

step(tf.ones([8, 8]))
print(*tf_amp.status().trained_unscaled)
print("without a loss scale of tf_amp's: step" in str(tf_amp.explain()))
"""
BY_CALL = "tf_amp.enable_mixed_precision_graph_rewrite()"
NOT_BY_ENABLE = {**FLOAT16, "TF_ENABLE_AUTO_MIXED_PRECISION": ""}


@pytest.mark.parametrize(
    ("env", "before", "is_said"),
    [
        (FLOAT16, "", True),
        (NOT_BY_ENABLE, BY_CALL, True),
        ({**FLOAT16, f"{REWRITE}_DTYPE": "bfloat16"}, "", False),
        ({**FLOAT16, LOSS_SCALING: "0"}, "", False),
        ({**NOT_BY_ENABLE, LOSS_SCALING: "0"}, BY_CALL, False),
    ],
    ids=["on", "by call", "bfloat16", "off", "off, by call"],
)
def test_settings(
    run_forked: RunPython, env: dict[str, str], before: str, *, is_said: bool
) -> None:
    done = run_forked(START + LOOP.format(before=before, compiled=False), env)
    assert done.stdout.splitlines() == ["step" * is_said, str(is_said)]
    assert len(said(done)) == is_said


def test_compiled_by_xla(run_forked: RunPython) -> None:
    done = run_forked(START + LOOP.format(before="", compiled=True), FLOAT16)
    assert done.stdout.splitlines() == ["step", "True"]


OF_COMPILE = """
import numpy as np
import keras
import tf_amp

def fit(optimizer):
    model = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(np.ones((32, 64), "f"), np.ones((32, 1), "f"), verbose=0)

fit(tf_amp.enable_mixed_precision_graph_rewrite(keras.optimizers.Adam()))
if {passed}:
    fit(tf_amp.enable_mixed_precision_graph_rewrite(keras.optimizers.SGD()))
else:
    fit(keras.optimizers.SGD())
"""


@pytest.mark.parametrize("passed", [False, True])
def test_a_second_optimizer(run_forked: RunPython, *, passed: bool) -> None:
    """A call gives a loss scale to the optimizer that is passed in, and the others need theirs."""
    lines = said(run_forked(START + OF_COMPILE.format(passed=passed), NOT_BY_ENABLE))
    assert len(lines) == (not passed)
    assert all("An optimizer gets a loss scale before compile()" in line for line in lines)


FIT = """
import numpy as np
import keras
import tensorflow as tf
import tf_keras
import tf_amp

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
x, y = np.ones((32, 8), np.float32), np.ones((32, 4), np.float32)

def fit(library, optimizer, jit_compile=False):
    layers = library.layers
    model = library.Sequential([layers.Input((8,)), layers.Dense(16, "relu"),
                                layers.BatchNormalization(), layers.Dense(4)])
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    model.fit(x, y, batch_size=16, verbose=0)
    model.evaluate(x, y, verbose=0)

fit(keras, "adam")
fit(keras, "sgd", jit_compile=True)
fit(keras, keras.optimizers.SGD(gradient_accumulation_steps=2))
fit(keras, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
fit(tf_keras, "adam")
fit(tf_keras, tf_keras.optimizers.legacy.SGD())
fit(tf_keras, tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD()))
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    fit(keras, "sgd")
print(tf_amp.status().trained_unscaled, tf_amp.status().functions[0].products_low)
"""


@pytest.mark.slow
def test_fit_is_not_warned_of(run_forked: RunPython) -> None:
    done = run_forked(START + FIT, FLOAT16)
    assert done.stdout.splitlines() == ["() 5"]
    assert said(done) == []
