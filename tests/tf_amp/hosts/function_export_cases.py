"""Scripts for `test_function_originals`: what is exported while AMP is on, and loaded again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tensorflow as tf
from function_harness import (
    compute_types,
    live_functions,
    max_error,
    node_types,
    report,
    running,
    switch_on,
    weights,
)
from tensorflow.core.framework import graph_debug_info_pb2
from tensorflow.core.protobuf import saved_model_pb2


class Model(tf.Module):
    """A product in a loop, in a branch, in a jit-compiled function and plain."""

    def __init__(self) -> None:
        super().__init__()
        self.variable = tf.Variable(weights())

    @tf.function(jit_compile=True)
    def compiled(self, x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, self.variable)

    @tf.function(input_signature=[tf.TensorSpec((8, 64), name="x")])
    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, y: tf.Tensor) -> Any:
            return i + 1, tf.tanh(tf.matmul(y, self.variable) / 64.0)

        y = tf.while_loop(lambda i, y: i < 3, body, [0, x])[1]
        y = tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.matmul(y, self.variable), lambda: y * 2.0)
        return y + self.compiled(x)


def saved_models(directory: str) -> None:
    x = tf.constant(weights(1, (8, 64)))
    exact = Model()(x)
    switch_on()
    model = Model()
    error = max_error(model(x), exact)
    path = Path(directory) / "model"
    options = tf.saved_model.SaveOptions(save_debug_info=True)
    tf.saved_model.save(model, str(path), options=options)
    saved = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    graph = saved.meta_graphs[0].graph_def
    functions = graph.library.function
    nodes = [*graph.node, *(node for f in functions for node in f.node_def)]
    debug = graph_debug_info_pb2.GraphDebugInfo.FromString(
        (path / "debug" / "saved_model_debug_info.pb").read_bytes()
    )
    report(
        "saved",
        error=error,
        types=node_types(nodes),
        casts=sum("AutoMixedPrecision" in node.name for node in nodes),
        stacks=any(frame.func == "__call__" for frame in debug.frames_by_id.values()),
    )
    before = set(live_functions())
    loaded = tf.saved_model.load(str(path))
    report(
        "loaded",
        error=max_error(loaded(x), exact),
        types=sorted({t for n, ts in live_functions().items() if n not in before for t in ts}),
    )
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(loaded(x))
    gradient = tape.gradient(loss, loaded.variable)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x))
    own = tape.gradient(loss, model.variable)
    report("gradient", error=max_error(gradient, own), scale=float(tf.reduce_max(tf.abs(own))))
    frozen(model)
    v1_saved_model(Path(directory) / "v1", x)


def frozen(model: Model) -> None:
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    @tf.function(input_signature=[tf.TensorSpec((8, 64))])
    def plain(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, model.variable)

    graph = convert_variables_to_constants_v2(plain.get_concrete_function()).graph.as_graph_def()
    plain(tf.zeros((8, 64)))
    ran = compute_types(running(plain.get_concrete_function().name))
    report("frozen", types=node_types(graph.node), running=ran)


def v1_saved_model(path: Path, x: tf.Tensor) -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        given = v1.placeholder(tf.float32, (8, 64), name="given")
        variable = v1.get_variable("w", initializer=weights())
        product = tf.matmul(given, variable)
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(path), {"x": given}, {"y": product})
    signature = tf.saved_model.load(str(path)).signatures["serving_default"]
    got = signature(x=x)["y"]
    report(
        "v1_saved_model",
        types=compute_types(running(signature.name)),
        error=max_error(got, tf.matmul(x, weights())),
    )


def without_tf_amp(directory: str) -> None:
    """Loads what `saved_models` wrote, in a process that cannot import this project."""
    switched = [name for name in sys.modules if name.startswith(("tf_amp", "graph_passes"))]
    for name in switched:
        sys.modules[name] = None  # type: ignore[assignment]
    x = tf.constant(weights(1, (8, 64)))
    loaded = tf.saved_model.load(str(Path(directory) / "model"))
    report("without_tf_amp", error=max_error(loaded(x), Model()(x)))
