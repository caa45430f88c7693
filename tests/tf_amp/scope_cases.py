"""What scopes do to real programs; imported inside the subprocess of their tests."""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "hosts"))

import keras
import numpy as np
import session_harness
import tensorflow as tf
from function_harness import report, running, switch_on, weights
from tensorflow.core.framework import function_pb2
from tensorflow.python.eager import context

import tf_amp
from graph_passes import PrecisionConfig, rewrite_graph_def
from graph_passes.ir.rule_matching import MARK
from tf_amp.hosts.function_redirects import with_callees
from tf_amp.tracing.models import plan_model

PRODUCTS = ("MatMul", "Conv2D", "BatchMatMulV2")


def find(name: str) -> function_pb2.FunctionDef | None:
    return running(name) if context.context().has_function(name) else None


def products(concrete: Any) -> dict[str, list[int]]:
    """The dtypes of products that run, those with a mark and the others."""
    functions = with_callees((running(concrete.name),), find)
    nodes = [n for function in functions for n in function.node_def if n.op in PRODUCTS]
    kinds = {True: "marked", False: "others"}
    found: dict[str, list[int]] = {"marked": [], "others": []}
    for node in nodes:
        found[kinds[MARK in node.attr]].append(node.attr["T"].type)
    return {kind: sorted(dtypes) for kind, dtypes in found.items()}


def case(name: str, function: Any, jit_compile: bool = False) -> None:
    traced = tf.function(function, jit_compile=jit_compile)
    x, w = (tf.constant(weights(seed)) for seed in (1, 2))
    got, wanted = traced(x, w / 8), function(x, w / 8)
    error = max(
        float(np.abs(a - b).max() / np.abs(b).max())
        for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(wanted), strict=True)
    )
    report(name, error=error, **products(traced.get_concrete_function(x, w)))


def gradient_of(function: Any) -> Any:
    def gradient(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = tf.reduce_sum(function(x, w))
        return tape.gradient(loss, w)

    return gradient


def plain(x: Any, w: Any) -> Any:
    y = tf.matmul(x, w)
    with tf_amp.keep_float32("the logits overflow"):
        y = tf.matmul(tf.nn.elu(y), w)
    return tf.matmul(tf.nn.elu(y), w)


def loop(x: Any, w: Any) -> Any:
    y = tf.matmul(x, w)
    with tf_amp.keep_float32():
        body = lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w)))  # noqa: E731
        y = tf.while_loop(lambda i, _: i < 3, body, (0, y), maximum_iterations=3)[1]
    return tf.matmul(y, w)


def branch(x: Any, w: Any) -> Any:
    y = tf.matmul(x, w)
    with tf_amp.keep_float32():
        y = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.matmul(y, w), lambda: tf.matmul(-y, w))
    return tf.matmul(y, w)


def inside_a_branch(x: Any, w: Any) -> Any:
    def of(y: Any) -> Any:
        with tf_amp.keep_float32():
            return tf.matmul(y, w)

    y = tf.matmul(x, w)
    return tf.matmul(tf.cond(tf.reduce_sum(x) > 0, lambda: of(y), lambda: of(-y)), w)


def called(x: Any, w: Any) -> Any:
    inner = tf.function(lambda h: tf.tanh(tf.matmul(h, w)))
    y = tf.matmul(x, w)
    with tf_amp.keep_float32():
        y = inner(y)
    return tf.matmul(y, w)


def only_called(x: Any, w: Any) -> Any:
    inner = tf.function(lambda h: tf.matmul(tf.tanh(tf.matmul(h, w)), w))
    with tf_amp.keep_float32():
        return inner(x)


@tf.custom_gradient
def with_its_gradient(y: Any, w: Any) -> Any:
    def gradient(dz: Any) -> Any:
        return tf.matmul(dz, w, transpose_b=True), tf.matmul(y, dz, transpose_a=True)

    return tf.matmul(y, w), gradient


def defines_its_gradient(x: Any, w: Any) -> Any:
    y = tf.matmul(x, w)
    with tf_amp.keep_float32():
        y = with_its_gradient(y, w)
    return tf.matmul(y, w)


def for_all_rows(x: Any, w: Any) -> Any:
    def of(row: Any) -> Any:
        with tf_amp.keep_float32():
            return tf.matmul(row[None], w)[0]

    return tf.matmul(tf.vectorized_map(of, tf.matmul(x, w)), w)


@tf_amp.keep_float32("as a decorator")
def decorated(x: Any, w: Any) -> Any:
    return tf.matmul(x, w)


def nested(x: Any, w: Any) -> Any:
    with tf_amp.keep_float32():
        y = tf.matmul(x, w)
        with tf_amp.allow("this one may"):
            y = tf.exp(tf.matmul(y, w) * 1e-3)
    return y


def main() -> None:
    switch_on(disabled_rules=frozenset(("cast-cut",)))
    simple = (plain, loop, branch, inside_a_branch, called, only_called)
    for function in (*simple, defines_its_gradient, for_all_rows):
        case(function.__name__, function)
        case(f"gradient of {function.__name__}", gradient_of(function))
    case("XLA", plain, jit_compile=True)
    case("XLA, gradient of a loop", gradient_of(loop), jit_compile=True)
    case("decorator", lambda x, w: tf.matmul(decorated(x, w), w))
    case("traced in a scope", lambda x, w: _in_scope(plain)(x, w))
    _nested()
    _threads()
    _layer()


def _in_scope(function: Any) -> Any:
    def run(x: Any, w: Any) -> Any:
        with tf_amp.keep_float32("all of it"):
            return function(x, w)

    return run


def _nested() -> None:
    traced = tf.function(nested)
    x = tf.constant(weights(1))
    traced(x, x)
    definition = running(traced.get_concrete_function(x, x).name)
    types = {n.op: n.attr["T"].type for n in definition.node_def if n.op in ("Exp", "MatMul")}
    marks = {n.attr[MARK].s.decode().split(";")[2] for n in definition.node_def if MARK in n.attr}
    lines = {n.attr[MARK].s.decode().split(";")[1] for n in definition.node_def if MARK in n.attr}
    report("nested", types=types, marks=sorted(marks), lines=sorted(lines))


def _threads() -> None:
    """A scope is the business of the thread that opened it."""
    entered, done = threading.Event(), threading.Event()

    def hold() -> None:
        with tf_amp.keep_float32():
            entered.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(60)
    traced, x = tf.function(lambda x: tf.matmul(x, x) + 1.0), tf.constant(weights(1))
    traced(x)
    found = products(traced.get_concrete_function(x))
    done.set()
    thread.join()
    report("threads", **found)


class Head(keras.layers.Dense):
    def call(self, inputs: Any) -> Any:
        with tf_amp.keep_float32("the head"):
            return super().call(inputs)


def _layer() -> None:
    layers = [keras.layers.Dense(64, activation="relu"), Head(64), keras.layers.Dense(64)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", jit_compile=False)
    x = weights(3)
    model.fit(x, x, verbose=0)
    steps = [n for n in context.context().list_function_names() if "one_step_on_data_" in n]
    last = running(max(steps, key=lambda name: int(name.rpartition("_")[2])))
    nodes = {n.name: n for n in last.node_def if n.op == "MatMul"}
    kept = sorted({n.attr["T"].type for n in nodes.values() if "head" in n.name})
    others = sorted({n.attr["T"].type for n in nodes.values() if "head" not in n.name})
    report("layer", head=kept, others=others, count=sum("head" in name for name in nodes))


def session() -> None:
    """A session of TensorFlow 1, with Grappler's own optimizers, and a training step."""
    with session_harness.amp(), tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, (64, 64), "x")
        w = tf.compat.v1.get_variable("w", initializer=weights(2))
        y = tf.nn.relu(tf.matmul(x, w, name="before"))
        with tf_amp.keep_float32("why not"):
            y = tf.nn.relu(tf.matmul(y, w, name="kept"))
        loss = tf.reduce_sum(tf.matmul(y, w, name="behind"))
        update = tf.compat.v1.train.GradientDescentOptimizer(1e-3).minimize(loss)
        init = tf.compat.v1.global_variables_initializer()
        ran = session_harness.run_new_session([loss, update], {x: weights(1)}, init=init)
    types = {n: ran.dtype(n) for n, node in ran.nodes.items() if "MatMul" in node.op}
    report("session", types=types)


def off() -> None:
    """Scopes without AMP, and what is exported with them."""
    case("off", plain)
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (64, 64), "x")
        y = tf.matmul(x, x)
        with tf_amp.keep_float32("why not"):
            y = tf.matmul(y, x, name="kept")
        loss = tf.reduce_sum(tf.matmul(y, x))
        tf.gradients(loss, x)
        with tf.compat.v1.Session() as session:
            session.run(loss, {x: weights(1)})
    config = PrecisionConfig(
        target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("cast-cut",))
    )
    _saved(config)
    result = rewrite_graph_def(graph.as_graph_def(), config, preserve=("x",))
    types = {n.name: n.attr["T"].type for n in result.proto.node if n.op == "MatMul"}
    remark = next(r for r in result.remarks().remarks if r.node == "kept")
    report("offline", types=types, failure=result.failure, reason=remark.reason)


def _saved(config: PrecisionConfig) -> None:
    """A SavedModel has the marks, before and after it is loaded and saved again."""
    module = tf.Module()
    module.weight = tf.Variable(weights(2))
    module.call = tf.function(
        lambda x: plain(x, module.weight), input_signature=[tf.TensorSpec([None, 64])]
    )
    with tempfile.TemporaryDirectory() as folder:
        once, again = Path(folder) / "once", Path(folder) / "again"
        tf.saved_model.save(module, str(once))
        tf.saved_model.save(tf.saved_model.load(str(once)), str(again))
        for path in (once, again):
            (graph,) = plan_model(path, config).graphs
            products = {r.node: r for r in graph.remarks.remarks if r.op == "MatMul"}
            report(path.name, kinds=sorted(remark.kind for remark in products.values()))
