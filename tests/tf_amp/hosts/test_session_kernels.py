"""Sessions in float32 that name oneDNN's kernels, in graphs as users of TensorFlow 1 write them."""

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
PRELUDE = f"""
{WITHOUT_UNITS}
import tf_amp.plan
tf_amp.plan.uses_onednn = lambda: False
from tf_amp import autoload
autoload.activate()
import json
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()


def ops_of(metadata):
    return sorted(n.op for g in metadata.partition_graphs for n in g.node if "_Mkl" in n.op)


def traced(session, fetches, feed):
    metadata = tf.RunMetadata()
    options = tf.RunOptions(output_partition_graphs=True)
    values = session.run(fetches, feed, options=options, run_metadata=metadata)
    return values, ops_of(metadata)


draw = np.random.RandomState(0)
"""

TRAINING = """
def norm(x):
    scale = tf.get_variable("scale", [64], initializer=tf.ones_initializer())
    offset = tf.get_variable("offset", [64], initializer=tf.zeros_initializer())
    return tf.nn.fused_batch_norm(x, scale, offset)[0]


x, y = tf.placeholder(tf.float32, [None, 16, 16, 16]), tf.placeholder(tf.int64, [None])
glorot = tf.glorot_uniform_initializer
kernels = [
    tf.get_variable("first", [3, 3, 16, 64], initializer=glorot(1), use_resource=False),
    tf.get_variable("second", [3, 3, 64, 64], initializer=glorot(2), use_resource=True),
]
h = tf.nn.relu(tf.nn.conv2d(x, kernels[0], 1, "SAME"))
h = tf.nn.max_pool2d(h, 2, 2, "SAME")
h = norm(tf.nn.conv2d(h, kernels[1], 1, "SAME"))
logits = tf.reduce_mean(h, [1, 2])
loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
train_op = tf.train.MomentumOptimizer(0.001, 0.9).minimize(loss)
facts = {"losses": []}
with tf.train.MonitoredSession() as session:
    for rows in (48, 32, 7, 0, 48):
        batch = draw.randn(rows, 16, 16, 16).astype("f")
        feed = {x: batch, y: draw.randint(0, 64, rows)}
        (value, _), ops = traced(session, [loss, train_op], feed)
        facts["losses"].append(float(value))
    facts["ops"] = ops
print(json.dumps(facts))
"""

BY_REFERENCE = """
x = tf.placeholder(tf.float32, [64, 512])
kernels = [
    tf.get_variable(name, initializer=0.05 * draw.randn(512, 512).astype("f"), use_resource=False)
    for name in ("first", "second", "third")
]
h = x
for kernel in kernels:
    h = tf.nn.relu(h @ kernel)
loss = tf.reduce_mean((h - 1.0) ** 2)
train_op = tf.train.GradientDescentOptimizer(2.0).minimize(loss)
facts = {"losses": []}
# By one thread the order is the same in each run.
with tf.Session(config=tf.ConfigProto(inter_op_parallelism_threads=1)) as session:
    session.run(tf.global_variables_initializer())
    feed = {x: draw.randn(64, 512).astype("f")}
    for _ in range(5):
        (value, _), ops = traced(session, [loss, train_op], feed)
        facts["losses"].append(float(value))
    facts["ops"] = ops
print(json.dumps(facts))
"""

LOOP = """
kernel = tf.constant(0.1 * draw.randn(3, 3, 64, 64).astype("f"))
x = tf.placeholder(tf.float32, [4, 32, 32, 64])
_, y = tf.while_loop(
    lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(tf.nn.conv2d(h, kernel, 1, "SAME"))), [0, x]
)
positive = tf.reduce_sum(x) > 0
y = tf.cond(positive, lambda: tf.nn.max_pool2d(y, 3, 2, "SAME"), lambda: y[:, ::2, ::2])
(dx,) = tf.gradients(tf.reduce_sum(y**2), x)
facts = {"gradients": []}
with tf.Session() as session:
    for sign in (1, -1):
        feed = {x: sign * np.abs(draw.randn(4, 32, 32, 64)).astype("f")}
        value, ops = traced(session, dx, feed)
        facts["gradients"].append(value[:, ::8, ::8, ::16].tolist())
facts["ops"] = ops
print(json.dumps(facts))
"""


def facts_of(run: RunPython, program: str, env: dict[str, str]) -> dict[str, Any]:
    done = run(PRELUDE + program, env)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found["ops"]:
        assert "tf_amp: session graph" in done.stderr
        assert "ops by oneDNN's kernels" in done.stderr
    return found


def test_training_by_ref_and_resource_variables(run_forked: RunPython) -> None:
    plain, found = (facts_of(run_forked, TRAINING, env) for env in ({}, {AMP: "1"}))
    assert plain["ops"] == []
    assert found["ops"] == [
        "_MklNativeConv2DBackpropFilter",
        "_MklNativeConv2DBackpropFilter",
        "_MklNativeConv2DBackpropInput",
        "_MklNativeFusedBatchNormGradV3",
        "_MklNativeMaxPool",
        "_MklNativeMaxPoolGrad",
    ]
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-4)


def test_gradients_read_ref_variables_before_they_are_updated(run_forked: RunPython) -> None:
    plain, found = (facts_of(run_forked, BY_REFERENCE, env) for env in ({}, {AMP: "1"}))
    assert (plain["ops"], found["ops"]) == ([], ["_MklMatMul"] * 2)
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_loops_and_branches_of_control_flow_v1(run_forked: RunPython) -> None:
    plain, found = (facts_of(run_forked, LOOP, env) for env in ({}, {AMP: "1"}))
    assert plain["ops"] == []
    assert "_MklNativeConv2DBackpropInput" in found["ops"]
    gradients, expected = np.asarray(found["gradients"]), np.asarray(plain["gradients"])
    assert gradients == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_switched_off_the_graph_is_as_it_was(run_forked: RunPython) -> None:
    plain = facts_of(run_forked, TRAINING, {})
    off = facts_of(run_forked, TRAINING, {AMP: "1", f"{REWRITE}_RULES_DISABLE": "onednn-kernel"})
    assert off == plain
