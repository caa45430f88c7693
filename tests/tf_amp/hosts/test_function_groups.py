"""Keras' convolutions of groups, which it has XLA compile, in programs as people write them."""

from __future__ import annotations

import json
import re
import subprocess

import numpy as np
import pytest
from cpu_units import HAS_ONEDNN, NO_ONEDNN
from environments import AMP, REWRITE, WITHOUT_UNITS, RunPython

ON = {AMP: "1", f"{REWRITE}_DTYPE": "bfloat16"}
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason=NO_ONEDNN)
# oneDNN has the kernels on CPUs without such units too.
UNITS = """
import tf_amp.cost_tables
import tf_amp.hardware
import tf_amp.plan
tf_amp.hardware.probe_cpu_flags = lambda: frozenset({"avx512_bf16"})
tf_amp.hardware.probe_gpu_capabilities = list
tf_amp.cost_tables.device_class = lambda _: "cpu-avx512_bf16"
tf_amp.plan.device_class = tf_amp.cost_tables.device_class
"""

PROGRAM = """
import json
import os
import sys
import tempfile
from tf_amp import autoload
autoload.activate()
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as context_lib
from tensorflow.python.saved_model import loader_impl

keras.utils.set_random_seed(0)
layers = keras.layers
model = keras.Sequential([
    keras.Input((16, 16, 32)),
    layers.Conv2D(64, 3, padding="same", groups=8, use_bias=False),
    layers.BatchNormalization(),
    layers.ReLU(),
    layers.Conv2D(64, 7, padding="same", groups=64),
    layers.Conv2D(64, 3, padding="same", groups=4, strides=2),
    layers.GlobalAveragePooling2D(),
    layers.Dense(10),
])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, jit_compile=False)
draw = np.random.default_rng(0)
x, y = draw.normal(size=(40, 16, 16, 32)).astype("f"), draw.integers(0, 10, 40)
losses = model.fit(x, y, batch_size=16, epochs=3, verbose=0).history["loss"]
facts = {"losses": losses, "predicted": model.predict(x[:5], verbose=0).tolist()}

names = context_lib.context().list_function_names()
# What was planned again for the batch has the longer name.
pending = [max((name for name in names if "step_on_iterator" in name), key=len)]
calls = []
while pending:
    for node in context_lib.context().get_function_def(pending.pop()).node_def:
        callee = node.attr["f"].func.name if "f" in node.attr else ""
        if "_conv_xla" in callee:
            calls.append("_XlaMustCompile" in node.attr and node.attr["_XlaMustCompile"].b)
        elif callee:
            pending.append(callee)
facts["calls"] = [len(calls), sum(calls)]

folder = os.path.join(tempfile.mkdtemp(), "saved")
model.export(folder)
library = loader_impl.parse_saved_model(folder).meta_graphs[0].graph_def.library
exported = [f for f in library.function if "_conv_xla" in f.signature.name]
facts["exported"] = [len(exported), sum(f.attr["_XlaMustCompile"].b for f in exported)]
loaded = tf.saved_model.load(folder)
facts["served"] = loaded.serve(x[:5]).numpy().tolist()
facts["eager"] = model(x[:5]).numpy().tolist()
print(json.dumps(facts))
"""


def facts_of(done: subprocess.CompletedProcess[str]) -> dict[str, list[float]]:
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@needs_onednn
def test_they_run_without_xla_and_are_exported_as_they_were(run_forked: RunPython) -> None:
    # Convolutions so small are slower in bfloat16 on some CPUs.
    done = run_forked(UNITS + PROGRAM, {**ON, f"{REWRITE}_RULES_DISABLE": "cost"})
    true = facts_of(run_forked(PROGRAM, {}))
    found = facts_of(done)
    assert (true["calls"], found["calls"]) == ([6, 6], [6, 0])
    assert true["exported"] == found["exported"] == [3, 3]
    assert re.search(r"Conv2DBackpropInput [1-3] of 3", done.stderr)
    assert "compiled by XLA" not in done.stderr
    for name in ("losses", "predicted", "served", "eager"):
        assert np.asarray(found[name]) == pytest.approx(np.asarray(true[name]), abs=0.01), name
    assert found["losses"] != true["losses"]


def test_on_hardware_without_units_they_run_without_xla_in_float32(run_forked: RunPython) -> None:
    done = run_forked(WITHOUT_UNITS + PROGRAM, {AMP: "1"})
    true = facts_of(run_forked(PROGRAM, {}))
    found = facts_of(done)
    assert (true["calls"], found["calls"]) == ([6, 6], [6, 0])
    assert true["exported"] == found["exported"] == [3, 3]
    rules = "batch-norm, fused-update, grouped-convolution"
    assert f"What pays in float32 too is done: {rules}" in done.stderr
    line = ": 13 updates fused, 1 batch normalization fused, 6 grouped convolutions without XLA"
    assert line in done.stderr
    for name in ("losses", "predicted", "served", "eager"):
        assert np.asarray(found[name]) == pytest.approx(np.asarray(true[name]), abs=1e-4), name


@pytest.mark.slow
@needs_onednn
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"TF_ENABLE_ONEDNN_OPTS": "0"}, "every graph stays in float32"),
        ({f"{REWRITE}_RULES_DISABLE": "grouped-convolution"}, "it is compiled by XLA"),
    ],
)
def test_xla_keeps_them_where_nothing_else_has_their_gradients(
    run_python: RunPython, more: dict[str, str], said: str
) -> None:
    done = run_python(UNITS + PROGRAM, {**ON, **more})
    assert facts_of(done)["calls"] == [6, 6]
    assert said in done.stderr
