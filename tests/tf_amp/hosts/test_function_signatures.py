"""Keras LSTM models through the public path: loops keep their state and weights in bfloat16."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest
from environments import CONVERTS

CODE = """
    import json
    import sys

    import numpy as np
    import tensorflow as tf

    amp, jit = sys.argv[1] == "amp", sys.argv[2] == "jit"
    if amp:
        import tf_amp

        tf_amp.enable_mixed_precision_graph_rewrite()
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Input((6,), dtype="int32"),
            keras.layers.Embedding(20, 16),
            keras.layers.LSTM(16, return_sequences=True),
            keras.layers.Dense(20),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=jit)
    x = np.random.default_rng(0).integers(0, 20, (32, 6)).astype("int32")
    history = model.fit(x, np.roll(x, 1, 1), batch_size=8, epochs=3, verbose=0, shuffle=False)

    from tensorflow.python.eager import context

    SOURCES = ("ReadVariableOp", "TensorListPopBack")
    bodies = {}
    for name in context.context().list_function_names():
        name = name.decode() if isinstance(name, bytes) else name
        if "_amp_" not in name or "body" not in name:
            continue
        function = context.context().get_function_def(name)
        makers = {node.name: node.op for node in function.node_def}
        bodies[name] = {
            "casts": sum(node.op == "Cast" for node in function.node_def),
            "casts of weights": sum(
                node.op == "Cast"
                and makers.get(node.input[0].split(":")[0]) in SOURCES
                for node in function.node_def
            ),
            "products": sorted(
                tf.as_dtype(n.attr["T"].type).name for n in function.node_def if n.op == "MatMul"
            ),
            "state": [tf.as_dtype(a.type).name for a in function.signature.input_arg],
        }
    print(json.dumps({"loss": history.history["loss"], "bodies": bodies}))
"""
ENV = {
    **CONVERTS,
    # The layers of this test are so small that the cost table would leave them in float32.
    "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_RULES_DISABLE": "cost",
}


@pytest.mark.parametrize("jit", ["no", pytest.param("jit", marks=pytest.mark.slow)])
def test_lstm_trains_with_loops_in_bfloat16(
    run_forked: Callable[..., subprocess.CompletedProcess[str]], jit: str
) -> None:
    plain, amp = (
        json.loads(run_forked(CODE, ENV, args=(kind, jit)).stdout.splitlines()[-1])
        for kind in ("float32", "amp")
    )
    assert plain["bodies"] == {}
    assert amp["loss"] != plain["loss"]
    assert amp["loss"] == pytest.approx(plain["loss"], rel=0.01)
    assert len(amp["bodies"]) >= 2
    for name, body in amp["bodies"].items():
        assert set(body["products"]) == {"bfloat16"}, name
        assert body["casts of weights"] == 0, name
        assert "bfloat16" in body["state"], name
    forward = [body for name, body in amp["bodies"].items() if "grad" not in name]
    assert {body["casts"] for body in forward} == {0}
