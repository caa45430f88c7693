"""GELUs are written for TensorFlow's remapper where it runs, and only there."""

from __future__ import annotations

import json

import pytest
import tensorflow as tf
from environments import AMP, BFLOAT16, RunPython
from tensorflow.core.protobuf import config_pb2

from graph_passes import PrecisionConfig
from tf_amp.hosts import remapper

FUNCTION = """
import json
import sys
from tf_amp import autoload
autoload.activate()
import numpy as np
import tensorflow as tf

options = json.loads(sys.argv[1])
if options:
    tf.config.optimizer.set_experimental_options(options)
w, b = tf.Variable(tf.eye(64)), tf.Variable(tf.zeros(64))

@tf.function
def layer(x):
    x = tf.nn.bias_add(tf.tensordot(x, w, 1), b)
    # As `tf.nn.gelu` writes it today; that of TensorFlow 2.17 has no tail of its own.
    return tf.tensordot(0.5 * x * tf.math.erfc(-x * 0.5**0.5), w, 1)

print(json.dumps(layer(tf.fill([4, 16, 64], -3.5)).numpy().ravel()[0].item()))
"""

SESSION = """
import json
import sys
from tf_amp import autoload
autoload.activate()
import numpy as np
import tensorflow as tf
v1 = tf.compat.v1
v1.disable_eager_execution()

config = v1.ConfigProto()
if not json.loads(sys.argv[1]).get("remapping", True):
    config.graph_options.rewrite_options.remapping = 2
x = v1.placeholder(tf.float32, [4, 16, 64])
w, b = tf.constant(np.eye(64, dtype="f")), tf.constant(np.zeros(64, "f"))
z = tf.nn.bias_add(tf.tensordot(x, w, 1), b)
y = tf.tensordot(0.5 * z * tf.math.erfc(-z * 0.5**0.5), w, 1)
with v1.Session(config=config) as session:
    print(json.dumps(session.run(y, {x: np.full([4, 16, 64], -3.5, "f")}).ravel()[0].item()))
"""


@pytest.mark.parametrize("program", [FUNCTION, SESSION], ids=["function", "session"])
@pytest.mark.parametrize("options", [{}, {"remapping": False}], ids=str)
def test_the_tail_of_a_gelu_is_there(
    run_forked: RunPython, program: str, options: dict[str, bool]
) -> None:
    done = run_forked(program, BFLOAT16, args=(json.dumps(options),))
    assert "MatMul 2 of 2 in bfloat16" in done.stderr
    true = tf.nn.gelu(tf.constant(-3.5, tf.float64)).numpy()
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx(true, rel=0.05)


def test_without_onednn_no_rule_is_named_that_needs_it(run_python: RunPython) -> None:
    done = run_python(FUNCTION, {AMP: "1", "TF_ENABLE_ONEDNN_OPTS": "0"}, args=("{}",))
    assert "What pays in float32 too is done: batch-norm, fused-update." in done.stderr


def test_without_onednn_as_well(run_python: RunPython) -> None:
    """It is switched off before TensorFlow is imported; then nothing is fast in bfloat16."""
    done = run_python(FUNCTION, {**BFLOAT16, "TF_ENABLE_ONEDNN_OPTS": "0"}, args=("{}",))
    assert "MatMul 2 of 2 in bfloat16" in done.stderr
    true = tf.nn.gelu(tf.constant(-3.5, tf.float64)).numpy()
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx(true, rel=0.05)


@pytest.mark.parametrize("option", [{"remapping": False}, {"disable_meta_optimizer": True}])
def test_options_of_functions(option: dict[str, bool]) -> None:
    before = remapper.runs_in_functions()
    tf.config.optimizer.set_experimental_options(option)
    try:
        assert not remapper.runs_in_functions()
    finally:
        tf.config.optimizer.set_experimental_options({name: not on for name, on in option.items()})
    assert remapper.runs_in_functions() == before


def test_a_session_and_a_configuration_without_it() -> None:
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.remapping = 2
    assert not remapper.runs_in_session(config)
    assert remapper.runs_in_session(config_pb2.ConfigProto()) == remapper.runs_in_functions()
    without = remapper.without_it(PrecisionConfig(disabled_rules=frozenset(("loss",))))
    assert without.disabled_rules == {"loss", "product-tail"}
