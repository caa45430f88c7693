"""Programs that know nothing of the package, run with the variable set, each in its own process."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import pytest
from environments import BFLOAT16, REWRITE, WITHOUT_UNITS, RunPython

import graph_passes

COST_TABLES = Path(graph_passes.__file__).parent / "cost_tables"
ON = {**BFLOAT16, f"{REWRITE}_COST_TABLE": "off"}
# A hang must fail its own test, and soon. The start file is not there in a checkout.
PRELUDE = """
import faulthandler, sys
faulthandler.dump_traceback_later(100, exit=True)
from tf_amp import autoload
autoload.activate()
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
W = rng.standard_normal((64, 64), dtype=np.float32)
X = rng.standard_normal((8, 64), dtype=np.float32)
EXACT = X @ W

def is_low(value):
    error = np.abs(np.asarray(value) - EXACT).max()
    return bool(0.0 < error < 0.5)

def run_session():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, X.shape)
        return session.run(tf.matmul(x, tf.constant(W)) + 0.0, {x: X})

@tf.function
def product(x):
    return tf.matmul(x, W)
"""


def run(
    run_python: RunPython, program: str, *, before: str = "", check: bool = True, **env: str
) -> CompletedProcess[str]:
    done = run_python(before + PRELUDE + program, ON | env, timeout=150, check=check)
    assert "fault of tf_amp" not in done.stderr
    assert "Timeout" not in done.stderr
    return done


@pytest.mark.slow
def test_keras_ctc_trains_as_in_float32(run_forked: RunPython) -> None:
    """Its loss calls a function of TensorFlow 1 (a `Defun`)."""
    program = """
import keras
def losses():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([
        layers.Input((12, 16)),
        layers.Dense(32, activation="relu"),
        layers.Bidirectional(layers.GRU(16, return_sequences=True)),
        layers.Dense(6),
    ])
    model.compile(keras.optimizers.Adam(1e-2), keras.losses.CTC(), jit_compile=False)
    x = np.random.default_rng(0).standard_normal((8, 12, 16), dtype=np.float32)
    y = np.random.default_rng(1).integers(1, 6, size=(8, 4)).astype(np.int32)
    return model.fit(x, y, epochs=3, batch_size=4, verbose=0).history["loss"]

import tf_amp
low = losses()
status = tf_amp.status()
assert status["graphs_failed"] == 0 and status["nodes_converted"] > 0, status
tf_amp.disable_mixed_precision_graph_rewrite()
wanted = losses()
assert low != wanted
np.testing.assert_allclose(low, wanted, rtol=5e-3)
"""
    assert "in bfloat16" in run(run_forked, program).stderr


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_actions_are_drawn_by_what_predict_gives(run_forked: RunPython, library: str) -> None:
    """`np.random.choice` refuses probabilities that do not add up to 1."""
    program = f"""
import {library} as keras
from tf_amp import status
keras.utils.set_random_seed(1)
def network(units, activation):
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(units, activation)]
    return keras.Sequential([keras.layers.Input((64,)), *layers])
policy, gate = network(6, "softmax"), network(3, "sigmoid")
for probabilities in policy.predict(np.tile(X, [8, 1]), verbose=0):
    np.random.choice(6, p=probabilities)
assert np.isfinite(np.log(1 - gate.predict(4 * X, verbose=0))).all()
assert [row.products_low for row in status().functions] == [2, 2], status().functions
"""
    run(run_forked, program)


def test_what_holds_in_float32_may_be_asserted(run_forked: RunPython) -> None:
    program = """
from tf_amp import status
@tf.function
def mixed(x):
    p = tf.nn.softmax(0.1 * (x @ W))
    tf.debugging.assert_near(tf.reduce_sum(p, -1), 1.0)
    gate = tf.sigmoid(p @ W + 6.0)
    tf.debugging.assert_less(gate, 1.0)
    return gate @ W
assert np.isfinite(mixed(tf.constant(X))).all()
assert [row.products_low for row in status().functions] == [3], status().functions
"""
    run(run_forked, program)


def test_keras_learns_from_distances_as_in_float32(run_forked: RunPython) -> None:
    """Pairs that are near to one another: rounded, some distances were negative, the loss NaN."""
    program = """
import keras
seen = rng.standard_normal((128, 64), dtype=np.float32)
views = seen, seen + 0.05 * rng.standard_normal((128, 64), dtype=np.float32)

def losses():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(256, "relu"), keras.layers.Dense(128)])
    optimizer = keras.optimizers.SGD(0.05)

    @tf.function
    def step(one, other):
        with tf.GradientTape() as tape:
            a, b = model(one), model(other)
            squares = tf.reduce_sum(a * a, 1)[:, None] + tf.reduce_sum(b * b, 1)[None]
            near = squares - 2.0 * tf.matmul(a, b, transpose_b=True)
            far = tf.maximum(0.0, 4.0 - tf.sqrt(near))
            same = tf.eye(128)
            loss = tf.reduce_mean(same * near + (1.0 - same) * far**2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return [float(step(*map(tf.constant, views))) for _ in range(6)]

import tf_amp
low = losses()
tf_amp.disable_mixed_precision_graph_rewrite()
np.testing.assert_allclose(low, losses(), rtol=0.02)
"""
    assert "in bfloat16" in run(run_forked, program).stderr


@pytest.mark.slow
@pytest.mark.parametrize("work", ["product(X)", "run_session()", "fit()"])
def test_workers_forked_after_the_import(run_python: RunPython, work: str) -> None:
    """As of a server that preloads its application: what a fork copies must go on in each child."""
    program = f"""
import os
def fit():
    import keras
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64, use_bias=False)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, EXACT, verbose=0)
    model.set_weights([W])
    return model.predict(X, verbose=0)

children = []
for _ in range(2):
    child = os.fork()
    if not child:
        code = 3
        try:
            code = 0 if is_low({work}) else 4
        finally:
            os._exit(code)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert codes == [0, 0], codes
assert is_low({work})
"""
    run(run_python, program)


@pytest.mark.parametrize(
    "convert",
    [
        "tf.mlir.experimental.convert_graph_def(graph().as_graph_def())",
        "tf.mlir.experimental.convert_function(concrete())",
        "tf.lite.TFLiteConverter.from_concrete_functions([concrete()]).convert()",
    ],
)
def test_importers_of_mlir_return(run_forked: RunPython, convert: str) -> None:
    """In Python's lock they import graphs in C++, which may run sessions of their own."""
    program = f"""
def graph():
    graph = tf.Graph()
    with graph.as_default():
        tf.matmul(tf.compat.v1.placeholder(tf.float32, X.shape), tf.constant(W))
    return graph

def concrete():
    return product.get_concrete_function(tf.TensorSpec(X.shape))

run_session()
assert is_low(product(X))
assert len({convert}) > 100
assert is_low(product(X)) and is_low(run_session())
"""
    run(run_forked, program)


def test_kernels_that_units_alone_have_are_not_put_in_for_a_table_of_another_cpu(
    run_forked: RunPython,
) -> None:
    """With AVX2 at most, oneDNN's for the gradients of filter and bias ends in an error."""
    program = """
from tensorflow.python.eager import context
kernel = tf.Variable(rng.standard_normal((3, 3, 32, 32), dtype=np.float32))
bias = tf.Variable(tf.zeros(32))

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        y = tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), bias)
        loss = tf.reduce_mean(tf.nn.conv2d(tf.nn.relu(y), kernel, 1, "SAME") ** 2)
    return tape.gradient(loss, [kernel, bias])

step(rng.standard_normal((8, 64, 64, 32), dtype=np.float32))
names = context.context().list_function_names()
nodes = [node for name in names for node in context.context().get_function_def(name).node_def]
low = {node.op for node in nodes if node.attr["T"].type == tf.bfloat16.as_datatype_enum}
assert "Conv2DBackpropFilter" in low, low
assert not [node.name for node in nodes if node.name.endswith("and_bias")]
"""
    named = {f"{REWRITE}_COST_TABLE": str(COST_TABLES / "cpu-avx512_bf16-bfloat16.toml")}
    run(run_forked, program, before=WITHOUT_UNITS, **named)


def test_what_stays_float32_is_counted_once(run_forked: RunPython) -> None:
    program = """
import keras, tf_amp
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile("sgd", "mse", jit_compile=False)
model.fit(X, X[:, :1], verbose=0)
square = tf.function(lambda x: tf.matmul(x, x, transpose_b=True))
square(X)
tf.function(lambda x: square(x) + 1.0)(X)
print(*(row.products for row in tf_amp.status().functions))
"""
    done = run(run_forked, program, TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DENYLIST_ADD="MatMul")
    assert done.stdout == "5 1\n"
    assert "no matrix product or convolution was converted (4 updates fused)" in done.stderr


def test_tflite_is_given_the_float32_function_and_mlir_shows_what_runs(
    run_forked: RunPython,
) -> None:
    program = """
assert is_low(product(X))
concrete = product.get_concrete_function(tf.TensorSpec(X.shape))
assert "bf16" in tf.mlir.experimental.convert_function(concrete)
content = tf.lite.TFLiteConverter.from_concrete_functions([concrete]).convert()
interpreter = tf.lite.Interpreter(model_content=content)
interpreter.allocate_tensors()
interpreter.set_tensor(interpreter.get_input_details()[0]["index"], X)
interpreter.invoke()
got = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
np.testing.assert_allclose(got, EXACT, atol=1e-4)
"""
    run(run_forked, program)


@pytest.mark.slow
@pytest.mark.parametrize("registered", ["before", "after"])
@pytest.mark.parametrize("work", ["product(X)", "run_session()"])
def test_work_at_exit(
    run_python: RunPython, run_forked: RunPython, registered: str, work: str
) -> None:
    """What was registered before the import runs after the package has left."""
    program = f"""
import atexit, os
def at_exit():
    error = float(np.abs(np.asarray({work}) - EXACT).max())
    print("at exit", error < 0.5, flush=True)
atexit.register(at_exit)
"""
    prelude, imports, rest = PRELUDE.partition("from tf_amp import autoload")
    early = program if registered == "before" else ""
    late = program if registered == "after" else ""
    start = run_python if early else run_forked  # which has imported TensorFlow
    done = start(prelude + early + imports + rest + late, ON, timeout=150)
    assert done.stdout == "at exit True\n"
    assert "Timeout" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("work", ["product(X)", "run_session()"])
def test_daemon_threads_work_until_the_exit(run_python: RunPython, work: str) -> None:
    program = f"""
import threading
started = threading.Barrier(3)
def endlessly():
    assert is_low({work})
    started.wait()
    while True:
        assert is_low({work})
for _ in range(2):
    threading.Thread(target=endlessly, daemon=True).start()
started.wait()
print("leaving", flush=True)
"""
    # A thread that comes back from C++ in the end of Python 3.11 may abort, as without the package.
    assert run(run_python, program, check=False).stdout == "leaving\n"
