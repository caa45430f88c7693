"""Scripts for `test_function`: what tf.function, gradients, loops and threads end up running."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import tensorflow as tf
from function_harness import (
    compute_types,
    dots,
    live_functions,
    max_error,
    node_types,
    report,
    running,
    switch_on,
    weights,
)
from tensorflow.python.eager import context

from tf_amp import installation
from tf_amp.hosts import function_originals

THREADS, FUNCTIONS_PER_THREAD = 8, 6


def main() -> None:
    variable = tf.Variable(weights())
    x = tf.constant(weights(1, (8, 64)))
    exact = tf.matmul(x, variable)
    installed = switch_on()
    tracing(variable, x, exact)
    v1_graphs(variable, x)
    removal(variable, x)
    extra_functions(x)
    threads(variable, x)
    status = installed.status()
    report("status", failed=status["graphs_failed"], rewritten=status["graphs_rewritten"])


def tracing(variable: tf.Variable, x: tf.Tensor, exact: tf.Tensor) -> None:
    @tf.function
    def plain(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, variable)

    @tf.function
    def outer(x: tf.Tensor) -> tf.Tensor:
        return plain(x) + 1.0

    @tf.function(jit_compile=True)
    def jitted(x: tf.Tensor) -> tf.Tensor:
        return plain(x) * 2.0

    @tf.function
    def around_jitted(x: tf.Tensor) -> tf.Tensor:
        return jitted(x)

    @tf.function
    def loop(x: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, y: tf.Tensor) -> Any:
            return i + 1, tf.tanh(tf.matmul(y, variable) / 64.0)

        return tf.while_loop(lambda i, y: i < 3, body, [0, x])[1]

    @tf.function
    def branch(x: tf.Tensor) -> tf.Tensor:
        return tf.cond(
            tf.reduce_sum(x) > 0.0,
            lambda: tf.matmul(x, variable),
            lambda: tf.matmul(-x, variable),
        )

    @tf.function
    def tape_inside(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(plain(x) ** 2.0)
        return tape.gradient(loss, variable)

    for function in (outer, jitted, around_jitted, loop, branch, tape_inside):
        function(x)
    gradients = []
    for function in (loop, jitted, branch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(x) ** 2.0)
        gradients.append(tape.gradient(loss, variable))
    concrete = plain.get_concrete_function(x)
    report(
        "tracing",
        functions=live_functions(),
        hlo=dots(jitted, x),
        error=max_error(plain(x), exact),
        gradient_dtypes=sorted({gradient.dtype.name for gradient in gradients}),
        variable_dtype=variable.dtype.name,
        outputs=[arg.type for arg in concrete.function_def.signature.output_arg],
        runs=compute_types(running(concrete.name)),
        function_def=compute_types(concrete.function_def),
        traced_graph=node_types(concrete.graph.as_graph_def().node),
    )


def v1_graphs(variable: tf.Variable, x: tf.Tensor) -> None:
    """A v1 graph copies the float32 original; `wrap_function` runs the rewritten branches."""

    @tf.function
    def called(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, tf.ones((64, 64)))

    called(x)
    graph = tf.Graph()
    with graph.as_default():
        called(tf.compat.v1.placeholder(tf.float32, (8, 64)))
    library = graph.as_graph_def().library.function

    def with_branch(x: tf.Tensor) -> tf.Tensor:
        return tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.matmul(x, variable), lambda: x)

    wrapped = tf.compat.v1.wrap_function(with_branch, [tf.TensorSpec((8, 64))])
    positive = tf.abs(x)
    error = max_error(wrapped(positive), tf.matmul(positive, variable))
    report("v1_graphs", library=[compute_types(f) for f in library], wrapped_error=error)


def removal(variable: tf.Variable, x: tf.Tensor) -> None:
    originals = function_originals.installed()

    @tf.function
    def short_lived(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, variable)

    short_lived(x)
    name = short_lived.get_concrete_function(x).name
    kept = originals.find(context.context(), name) is not None
    del short_lived
    gc.collect()
    after = originals.find(context.context(), name) is not None
    report("removal", kept=kept, kept_after=after)


def extra_functions(x: tf.Tensor) -> None:
    """A rewritten definition may bring functions of its own, which leave with its last user."""

    @tf.function
    def body(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(x)

    @tf.function
    def caller(x: tf.Tensor) -> tf.Tensor:
        return body(x)

    runtime, originals = context.context(), function_originals.installed()
    caller(x)
    name = caller.get_concrete_function(x).name
    clone = running(body.get_concrete_function(x).name)
    clone.signature.name = "clone_of_body"
    replacement = running(name)
    for node in replacement.node_def:
        if node.op.endswith("PartitionedCall"):
            node.attr["f"].func.name = "clone_of_body"
    originals.swap(runtime, replacement, (clone,))
    present = runtime.has_function("clone_of_body")
    same = max_error(caller(x), tf.nn.relu(x))
    del caller
    gc.collect()
    report(
        "extra_functions",
        present=present,
        error=same,
        present_after=runtime.has_function("clone_of_body"),
    )


def threads(variable: tf.Variable, x: tf.Tensor) -> None:
    errors: list[str] = []
    kept: list[Any] = []

    def trace_some(number: int) -> None:
        try:
            for step in range(FUNCTIONS_PER_THREAD):

                @tf.function(jit_compile=step == FUNCTIONS_PER_THREAD - 1)
                def threaded(x: tf.Tensor, step: int = step) -> tf.Tensor:
                    product = tf.matmul(x, variable)
                    return tf.cond(
                        tf.reduce_sum(x) > 0.0, lambda: product + step, lambda: product - step
                    )

                threaded(x)
                kept.append(threaded)
        except Exception as error:
            errors.append(f"thread {number}: {error!r}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    running_threads = [threading.Thread(target=trace_some, args=(n,)) for n in range(THREADS)]
    for thread in running_threads:
        thread.start()
    for thread in running_threads:
        thread.join()
    sys.setswitchinterval(interval)
    types = {str(compute_types(running(f.get_concrete_function(x).name))) for f in kept}
    report("threads", errors=errors, traced=len(kept), types=sorted(types))


def keras() -> None:
    """One line per Keras entry point, and what XLA is given."""
    import keras
    import tf_keras

    installed = switch_on()
    rows = weights(3, (64, 16, 16, 3))
    labels = (rows.sum(axis=(1, 2, 3)) > 0.0).astype("int32")
    for name, library, jit in (
        ("keras", keras, False),
        ("keras_jit", keras, True),
        ("tf_keras", tf_keras, False),
    ):
        library.utils.set_random_seed(0)
        layers = library.layers
        model = library.Sequential(
            [
                layers.Input((16, 16, 3)),
                layers.Conv2D(16, 3, activation="relu"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(2),
            ]
        )
        loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"], jit_compile=jit)
        before = installed.status()["graphs_rewritten"]
        model.fit(rows, labels, batch_size=32, epochs=1, verbose=0)
        model.evaluate(rows, labels, batch_size=32, verbose=0)
        predicted = model.predict(rows[:8], verbose=0)
        functions = live_functions()
        report(
            name,
            rewritten=installed.status()["graphs_rewritten"] - before,
            types=sorted({dtype for types in functions.values() for dtype in types}),
            predicted=str(predicted.dtype),
            weights=sorted({str(w.dtype) for w in model.get_weights()}),
        )
        del model
        gc.collect()


def off_again() -> None:
    """After `uninstall`, definitions are byte for byte what they are without AMP."""
    variable = tf.Variable(weights())
    x = tf.constant(weights(1, (8, 64)))

    def trace() -> tuple[bytes, list[str]]:
        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.softmax(tf.matmul(x, variable)))
            return tape.gradient(loss, variable)

        step(x)
        definition = running(step.get_concrete_function(x).name)
        definition.signature.name = "step"
        return definition.SerializeToString(deterministic=True), dots(
            tf.function(lambda x: tf.matmul(x, variable), jit_compile=True), x
        )

    from tensorflow.python.eager.polymorphic_function import atomic_function

    never, never_hlo = trace()
    hook = atomic_function.from_func_graph
    switch_on()

    @tf.function
    def older(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, variable)

    @tf.function
    def around(x: tf.Tensor) -> tf.Tensor:
        return older(x)

    exact = tf.matmul(x, variable)
    error_on = min(max_error(older(x), exact), max_error(around(x), exact))
    rewritten, rewritten_hlo = trace()
    installation.uninstall()
    after, after_hlo = trace()

    @tf.function
    def newer(x: tf.Tensor) -> tf.Tensor:
        return older(x)

    report(
        "off_again",
        changed=rewritten != never,
        same=after == never,
        hlo=[never_hlo, rewritten_hlo, after_hlo],
        hook_gone=atomic_function.from_func_graph is hook,
        error_on=error_on,
        error_of_older=max_error(older(x), exact),
        error_around=max_error(around(x), exact),
        error_of_newer=max_error(newer(x), exact),
    )
    installed = switch_on()
    again, _ = trace()
    report("on_again", same=again == rewritten, rewritten=installed.status()["graphs_rewritten"])
