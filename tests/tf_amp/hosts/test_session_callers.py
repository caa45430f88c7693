"""C++ code that makes sessions of its own, on its own threads, is answered without Python."""

from __future__ import annotations

import pytest
from environments import CONVERTS, RunPython

# A hang must fail its own test, and soon; the converter keeps Python's lock all the time.
PRELUDE = """
import faulthandler, sys
faulthandler.dump_traceback_later(100, exit=True)
import numpy as np, tensorflow as tf, tf_amp

class Model(tf.Module):
    def __init__(self):
        self.weights = tf.Variable(np.ones((8, 4), np.float32))

    @tf.function(input_signature=[tf.TensorSpec((None, 8), tf.float32)])
    def __call__(self, x):
        return tf.nn.softmax(tf.matmul(x, self.weights))

def keras_model():
    import keras
    return keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4)])

def saved():
    import tempfile
    path = tempfile.mkdtemp()
    tf.saved_model.save(model, path)
    return path

tf_amp.enable_mixed_precision_graph_rewrite()
model = Model()
assert model(np.ones((2, 8), np.float32)).shape == (2, 4)
"""
CONVERTERS = {
    "keras": "tf.lite.TFLiteConverter.from_keras_model(keras_model())",
    "function": "tf.lite.TFLiteConverter.from_concrete_functions("
    "[model.__call__.get_concrete_function()], model)",
    "saved_model": "tf.lite.TFLiteConverter.from_saved_model(saved())",
}


@pytest.mark.parametrize("converter", CONVERTERS)
def test_a_converter_that_keeps_the_lock_returns(run_forked: RunPython, converter: str) -> None:
    script = f"""{PRELUDE}
assert len({CONVERTERS[converter]}.convert()) > 500
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    session.run(tf.matmul(tf.ones((8, 8)), tf.ones((8, 8))))
assert tf_amp.status()["graphs_failed"] == 0
tf_amp.disable_mixed_precision_graph_rewrite()
assert len({CONVERTERS[converter]}.convert()) > 500
print("returned")
"""
    assert run_forked(script, CONVERTS, timeout=150).stdout.endswith("returned\n")


@pytest.mark.slow
def test_threads_that_still_run_sessions_do_not_hold_up_the_exit(run_python: RunPython) -> None:
    script = f"""{PRELUDE}
import threading, time
graph = tf.Graph()
def work():
    with graph.as_default(), tf.compat.v1.Session() as session:
        for number in range(100000):
            x = tf.constant(np.full((8, 8), number, np.float32))
            session.run(tf.matmul(x, x) * 2.0)
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
time.sleep(2)
print("leaving")
"""
    done = run_python(script, CONVERTS, timeout=150, check=False)
    assert done.stdout.endswith("leaving\n")
    assert "Timeout" not in done.stderr


def test_a_converter_beside_a_session_of_a_server_returns(run_forked: RunPython) -> None:
    """The server's session waits for an element; meanwhile anybody's graphs are laid out."""
    script = f"""{PRELUDE}
import threading, time
from tf_amp.hosts import session_plugin
server = tf.distribute.Server.create_local_server()
session_plugin.graph_plugin(tf)._patience.value = 400
with tf.Graph().as_default():
    x = tf.compat.v1.placeholder(tf.float32, (8, 8))
    queue = tf.queue.FIFOQueue(1, tf.float32, (8, 8))
    product, put = tf.matmul(queue.dequeue(), x) + 1.0, queue.enqueue(x)
    session = tf.compat.v1.Session(server.target)
    ones = np.ones((8, 8), np.float32)
    waiting = threading.Thread(target=session.run, args=(product, {{x: ones}}))
    waiting.start()
    time.sleep(1)
assert len({CONVERTERS["function"]}.convert()) > 500
session.run(put, {{x: ones}})
waiting.join()
assert tf_amp.status()["graphs_failed"] == 0
print("returned")
"""
    done = run_forked(script, CONVERTS, timeout=150)
    assert done.stdout.endswith("returned\n")
    assert "MatMul 1 of 1 in bfloat16" in done.stderr
