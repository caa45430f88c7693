"""Local derivatives in a program as it is: `fit` on arrays whose last batch is smaller."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from environments import BFLOAT16, REWRITE, RunPython

HERE = str(Path(__file__).parent)

FIT = """
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
model = keras.Sequential([
    keras.Input((16,)),
    keras.layers.Dense(64, activation="gelu"),
    keras.layers.Dense(64, activation=lambda x: x * tf.sigmoid(x)),
    keras.layers.Dense(10),
])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
random = np.random.default_rng(0)
x, y = random.standard_normal((100, 16)).astype("f"), random.integers(0, 10, 100)
history = model.fit(x, y, batch_size=32, epochs=3, verbose=0)
derivatives = most_nodes(lambda node: node.name.endswith("local_derivative/dx"))
print(json.dumps({"derivatives": derivatives, "loss": history.history["loss"]}))
"""


def test_fit_multiplies_each_gradient_once_and_trains_as_in_float32(run_forked: RunPython) -> None:
    bfloat16 = BFLOAT16
    without = {**bfloat16, f"{REWRITE}_RULES_DISABLE": "local-derivative"}
    float16 = {**bfloat16, f"{REWRITE}_DTYPE": "float16"}
    float32, *low = (
        json.loads(run_forked(FIT, env, args=(HERE,)).stdout)
        for env in ({}, bfloat16, float16, without)
    )
    assert [run["derivatives"] for run in (float32, *low)] == [0, 2, 2, 0]
    for run in low:
        assert run["loss"] == pytest.approx(float32["loss"], rel=2e-3)
