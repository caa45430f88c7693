"""Tracebacks of the user's errors."""

from __future__ import annotations

import json

import pytest
from environments import BFLOAT16, RunPython

# Keras stays unimported until the first error has been seen.
SCRIPT = """
import json, pathlib, sys, traceback
import numpy as np, tensorflow as tf
import tf_amp.autoload
tf_amp.autoload.activate()

PACKAGE = str(pathlib.Path(tf_amp.__file__).parent)

def frames_inside(run):
    "How many frames of ours lie behind the outermost filter."
    try:
        run()
    except Exception as error:
        names = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        first = next(i for i, name in enumerate(names) if name.endswith("traceback_utils.py"))
        return sum(name.startswith(PACKAGE) for name in names[first:])
    raise SystemExit("no error")

@tf.function
def pick(x, index):
    return tf.gather(tf.matmul(x, x), index)

def out_of_range():
    pick(tf.ones([4, 4]), tf.constant([9]))

facts = {"function": frames_inside(out_of_range)}
KERAS = sys.argv[1]
keras = __import__(KERAS)

class Checked(keras.layers.Layer):
    def call(self, x):
        tf.debugging.assert_less(x, 0.5)
        return x

model = keras.Sequential([keras.layers.Dense(5, kernel_initializer="ones"), Checked()])
model.compile("sgd", "mse", run_eagerly=False)
facts["fit"] = frames_inside(lambda: model.fit(np.full((4, 5), 9, "f"), np.ones((4, 5)), verbose=0))
tf_amp.disable_mixed_precision_graph_rewrite()
facts["replaced"] = any(
    hasattr(__import__(name, fromlist=["include_frame"]).include_frame, "original")
    for name in ("tensorflow.python.util.traceback_utils", KERAS + ".src.utils.traceback_utils")
)
print(json.dumps(facts))
"""


@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
def test_frames_of_the_hooks_are_left_out(run_forked: RunPython, keras: str) -> None:
    ran = run_forked(SCRIPT, BFLOAT16, args=(keras,))
    assert json.loads(ran.stdout.splitlines()[-1]) == {"function": 0, "fit": 0, "replaced": False}


def test_they_are_shown_where_filtering_is_off(run_forked: RunPython) -> None:
    shown = """
import tensorflow as tf, tf_amp.autoload
tf_amp.autoload.activate()
tf.debugging.disable_traceback_filtering()

@tf.function
def pick(x, index):
    return tf.gather(tf.matmul(x, x), index)

pick(tf.ones([4, 4]), tf.constant([9]))
"""
    ran = run_forked(shown, BFLOAT16, check=False)
    assert "hosts/function.py" in ran.stderr
