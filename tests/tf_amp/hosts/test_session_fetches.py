"""Sessions whose nodes run under several sets of fetches, each with a graph of its own.

A session keeps one kernel for all stateful nodes of a name: what such a node is, and of which
dtype, must be the same in all of its graphs.
"""

from __future__ import annotations

import json

import pytest
from environments import BFLOAT16, RunPython

BEGIN = """
import json
import sys
from tf_amp import autoload
autoload.activate()
import numpy as np
import tensorflow as tf
from tensorflow.python.training import moving_averages
v1 = tf.compat.v1
v1.disable_eager_execution()
x = v1.placeholder(tf.float32, [64, 64])
w = v1.get_variable("w", initializer=np.eye(64, dtype="f") / 2, use_resource=True)
product = tf.matmul(x, w)
"""
AVERAGE = """
kept = v1.get_variable("kept", initializer=np.ones(64, "f"), use_resource=True)
mean = tf.reduce_mean(product, 0)
update = moving_averages.assign_moving_average(kept, mean, 0.9, zero_debias=False)
with tf.control_dependencies([update]):
    one = tf.reduce_mean(tf.square(tf.nn.relu(product)))
nodes = v1.get_default_graph().get_operations()
(step,) = [node.outputs[0] for node in nodes if node.name.endswith("AssignMovingAvg/mul")]
other, result = [one, step], kept
"""
CHECK = """
checked = v1.check_numerics(product, "not a number")
one = tf.matmul(tf.matmul(checked, w), w) * 1.0
other = tf.reduce_sum(checked) * 1.0
result = one
"""
END = """
sets = [one, other] if sys.argv[1] == "one first" else [other, one]
with v1.Session() as session:
    session.run(v1.global_variables_initializer())
    feed = {x: np.full((64, 64), 3, "f")}
    for number in range(6):
        session.run(sets[number % 2], feed)
    print(json.dumps(session.run(result, feed).ravel()[:4].tolist()))
"""


@pytest.mark.parametrize("program", [AVERAGE, CHECK], ids=["update", "check"])
@pytest.mark.parametrize("order", ["one first", "other first"])
def test_what_runs_under_two_sets_of_fetches(
    run_forked: RunPython, program: str, order: str
) -> None:
    script = BEGIN + program + END
    runs = [run_forked(script, env, args=(order,)) for env in ({}, BFLOAT16)]
    assert "1 update fused" in runs[1].stderr or "MatMul 3 of 3 in bfloat16" in runs[1].stderr
    plain, low = (json.loads(run.stdout.splitlines()[-1]) for run in runs)
    assert low == pytest.approx(plain, rel=0.01)


SAME_AND_MORE = """
more = tf.identity(tf.matmul(tf.nn.relu(product), w))
with v1.Session() as session:
    session.run(v1.global_variables_initializer())
    feed = {x: np.full((64, 64), 3, "f")}
    for number in range(4):
        session.run(tf.identity(product, name=f"made{number}"), feed)
    session.run(more, feed)
with tf.Graph().as_default(), v1.Session() as session:
    of_another = v1.placeholder(tf.float32, [64, 64])
    session.run(tf.nn.relu(tf.matmul(of_another, of_another)) * 2.0, {of_another: np.eye(64)})
"""


def test_what_other_fetches_of_a_graph_have_told_is_not_told_again(run_forked: RunPython) -> None:
    said = run_forked(BEGIN + SAME_AND_MORE, BFLOAT16).stderr.splitlines()
    lines = [line.partition("MatMul ")[2] for line in said if "tf_amp: session graph" in line]
    assert [line.partition(" in")[0] for line in lines] == ["1 of 1", "2 of 2", "1 of 1"]
