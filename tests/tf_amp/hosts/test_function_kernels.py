"""Functions in float32 that name oneDNN's kernels, in programs as people write them."""

from __future__ import annotations

import json
import platform
from typing import Any

import numpy as np
import pytest
from environments import AMP, REWRITE, WITHOUT_UNITS, RunPython

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="builds for other processors have no such kernels"
)

# Whether TensorFlow takes the kernels by itself depends on the CPU.
TAKES_NONE = "import tf_amp.plan\ntf_amp.plan.uses_onednn = lambda: False\n"

PROGRAM = """
import json
import os
import tempfile
from tf_amp import autoload
autoload.activate()
import keras
import numpy as np
import tensorflow as tf
import tf_amp
from tensorflow.python.eager import context as context_lib
from tensorflow.python.saved_model import loader_impl

keras.utils.set_random_seed(0)
layers = keras.layers
model = keras.Sequential([
    keras.Input((16, 16, 16)),
    layers.Conv2D(64, 3, padding="same", activation="relu"),
    layers.DepthwiseConv2D(3, padding="same"),
    layers.MaxPooling2D(),
    layers.Conv2D(64, 3, padding="same"),
    layers.BatchNormalization(),
    layers.GlobalAveragePooling2D(),
    layers.Dense(4),
])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.05), loss, jit_compile=False)
draw = np.random.default_rng(0)
x, y = draw.normal(size=(80, 16, 16, 16)).astype("f"), draw.integers(0, 4, 80)
facts = {"losses": model.fit(x, y, batch_size=32, epochs=3, verbose=0).history["loss"]}
facts["predicted"] = model.predict(x[:5], verbose=0).tolist()


def named(functions):
    ops = {node.op for function in functions for node in function.node_def}
    return sorted(op for op in ops if op.startswith("_MklNative"))


context = context_lib.context()
facts["ops"] = named(map(context.get_function_def, context.list_function_names()))
facts["counted"] = tf_amp.status().fused.get("onednn-kernel")
folder = os.path.join(tempfile.mkdtemp(), "saved")
tf.saved_model.save(model, folder)
library = loader_impl.parse_saved_model(folder).meta_graphs[0].graph_def.library
facts["saved"] = named(library.function)
print(json.dumps(facts))
"""


NAMED = (
    *("Conv2DBackpropFilter", "Conv2DBackpropInput"),
    *("DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropInput"),
    *("FusedBatchNormGradV3", "MaxPool", "MaxPoolGrad"),
)


def facts_of(run: RunPython, env: dict[str, str], prelude: str = TAKES_NONE) -> dict[str, Any]:
    done = run(WITHOUT_UNITS + prelude + PROGRAM, env)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found["counted"]:
        assert f", {found['counted']} ops by oneDNN's kernels\n" in done.stderr
    return found


def test_what_keras_trains_names_them_and_what_it_saves_does_not(run_forked: RunPython) -> None:
    plain, found = facts_of(run_forked, {}), facts_of(run_forked, {AMP: "1"})
    assert found["ops"] == [f"_MklNative{op}" for op in NAMED]
    assert found["counted"] == 7  # five rows to predict have too little to do
    assert (plain["ops"], plain["counted"], found["saved"]) == ([], None, [])
    for name in ("losses", "predicted"):
        assert np.asarray(found[name]) == pytest.approx(np.asarray(plain[name]), abs=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "prelude"),
    [
        pytest.param({f"{REWRITE}_RULES_DISABLE": "onednn-kernel"}, TAKES_NONE, id="switched off"),
        pytest.param({"TF_ENABLE_ONEDNN_OPTS": "0"}, TAKES_NONE, id="none are wanted"),
        pytest.param({"TF_ENABLE_ONEDNN_OPTS": "1"}, "", id="TensorFlow takes them"),
    ],
)
def test_where_they_are_not_named(run_python: RunPython, env: dict[str, str], prelude: str) -> None:
    found = facts_of(run_python, {AMP: "1", **env}, prelude)
    assert (found["ops"], found["counted"]) == ([], None)
