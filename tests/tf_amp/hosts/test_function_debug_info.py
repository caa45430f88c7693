"""Python lines of nodes that are traced in the threads of a strategy's replicas."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf
from environments import BFLOAT16, REWRITE, RunPython

from tf_amp.hosts.function_debug_info import source_lines, user_lines
from tf_amp.tracing.trace import read_traces

PROGRAM = """
from tf_amp import autoload
autoload.activate()
import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

def hidden(x, w):
    return tf.matmul(x, w)  # helper

with strategy.scope():
    w = tf.Variable(tf.ones([64, 64]))

@tf.function
def step(x):
    def replica(x):
        with tf.GradientTape() as tape:
            y = hidden(x, w)
            if tf.reduce_sum(y) > 0.0:
                y = tf.nn.elu(y)  # branch
            loss = tf.reduce_sum(y)  # inner function
        w.assign_sub(tape.gradient(loss, w))
        return loss

    return strategy.run(replica, args=(x,))

step(tf.ones([32, 64]))
"""


def test_what_replicas_make_has_lines(run_forked: RunPython, tmp_path: Path) -> None:
    env = {**BFLOAT16, f"{REWRITE}_LOG_PATH": str(tmp_path)}
    run_forked(PROGRAM, env)
    (trace,) = read_traces(tmp_path)
    (step,) = [graph.remarks for graph in trace.graphs if graph.remarks.name == "step"]
    places = [remark for remark in step.remarks if remark.node]
    assert [remark for remark in places if not remark.lines] == []
    numbers = {
        remark.node: int(remark.lines[0].rpartition("script.py:")[2] or 0) for remark in places
    }
    program = PROGRAM.splitlines()

    def line(what: str) -> int:
        return next(number for number, text in enumerate(program, 1) if what in text)

    for prefix in ("", "replica_1/"):
        assert numbers[f"{prefix}MatMul"] == line("# helper")
        assert numbers[f"{prefix}Sum_1"] == line("# inner function")
        assert numbers[f"gradient_tape/{prefix}Tile"] == line("tape.gradient")
    elus = {node: number for node, number in numbers.items() if node.endswith("cond/Elu")}
    assert set(elus.values()) == {line("# branch")}
    assert len(elus) == 2


CTC = """
from tf_amp import autoload
autoload.activate()
import tensorflow as tf

@tf.function
def step(x, w):
    with tf.GradientTape() as tape:
        tape.watch(w)
        logits = tf.reshape(tf.matmul(x, w), [20, 4, 8])
        labels, lengths = tf.ones([4, 3], tf.int32), tf.fill([4], 3)
        loss = tf.nn.ctc_loss(labels, logits, lengths, tf.fill([4], 20), blank_index=0)
    return tape.gradient(tf.reduce_sum(loss), w)

step(tf.ones([80, 64]), tf.ones([64, 8]))
"""


def test_a_function_of_v1_has_no_lines_and_stops_nothing(
    run_forked: RunPython, tmp_path: Path
) -> None:
    env = {**BFLOAT16, f"{REWRITE}_LOG_PATH": str(tmp_path)}
    done = run_forked(CTC, env)
    assert "Traceback" not in done.stderr
    (trace,) = read_traces(tmp_path)
    (step,) = [graph.remarks for graph in trace.graphs if graph.remarks.name == "step"]
    assert any(remark.lines for remark in step.remarks if remark.is_product)


def test_every_gradient_has_the_lines_of_what_it_is_of() -> None:
    with tf.Graph().as_default() as graph:
        x, w = tf.ones([4, 4]), tf.ones([4, 4])
        y = tf.matmul(x, w, name="product")
        tf.gradients(y, w)
        tf.gradients(y, w)
        with tf.name_scope("penalty"):
            tf.gradients(y, w)
    lines = source_lines(graph)
    (own,) = lines("", "product")
    for scope in ("gradients", "gradients_1", "penalty/gradients"):
        node = f"{scope}/product_grad/MatMul"
        assert graph.get_operation_by_name(node).type == "MatMul"
        assert lines("", node) == (own,)


ILLEGAL = """
from tf_amp import autoload
autoload.activate()
import tensorflow as tf

@tf.function
def step(x, w, u, labels):
    logits = tf.matmul(tf.matmul(x, u), w)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)  # loss

try:
    step(tf.ones([64, 32]), tf.ones([32, 1024]), tf.ones([32, 32]), tf.fill([64], -1))
except tf.errors.InvalidArgumentError as error:
    print(error)
"""


def test_an_error_in_what_was_replaced_names_the_line(run_forked: RunPython) -> None:
    env = BFLOAT16
    said = run_forked(ILLEGAL, env).stdout
    number = next(n for n, text in enumerate(ILLEGAL.splitlines(), 1) if "# loss" in text)
    assert "label" in said
    assert f"line {number}, in step" in said
    assert "stack traces unavailable" not in said


def test_lines_are_shown_where_the_working_directory_was_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    frame = SimpleNamespace(filename="/of/a/program/model.py", lineno=3)
    stack = SimpleNamespace(get_user_frames=lambda: [frame])
    assert user_lines(stack) == ("/of/a/program/model.py:3",)
