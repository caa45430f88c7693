"""Scripts for `test_function_deferred`: functions that were traced inside another one."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import tensorflow as tf
from function_harness import compute_types, dots, max_error, report, running, switch_on, weights
from tensorflow.python.saved_model import loader_impl

from tf_amp import installation
from tf_amp.hosts import function_originals

DEPTH = 40


def main() -> None:
    variable = tf.Variable(weights())
    x = tf.constant(weights(1, (8, 64)))
    exact = tf.matmul(x, variable)
    installed = switch_on()
    chain(installed, variable, x)
    called_later(installed, variable, x, exact)
    planned_float32()
    planned_float32_elsewhere()
    lines(variable, x)
    of_tensorflow_1(installed, x)
    gradient(variable, x)
    compiled(variable, x)
    pipeline(variable, x, exact)
    export(variable, x)
    lost_graph(variable, x)
    threads(variable, x, exact)
    heard(variable, x)
    makes_variables(installed, x)
    interrupted(variable, x, exact)
    report("status", failed=installed.status()["graphs_failed"])
    switched_off(variable, x, exact)


def traced_inside(variable: tf.Variable, x: tf.Tensor, **options: Any) -> Any:
    """A function that was traced by its caller, which has a product beside the call."""

    @tf.function(**options)
    def inner(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, variable)

    @tf.function
    def outer(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(inner(x), variable)

    outer(x)
    inner.outer = outer  # lives as long
    return inner


def planned_float32() -> None:
    """A loop whose product a solver reads in the next round, which its body alone does not show."""

    @tf.function
    def loop(x: tf.Tensor) -> tf.Tensor:
        total = 0.0
        for _ in tf.range(3):
            total += tf.reduce_sum(tf.linalg.inv(x))
            x = tf.matmul(x, x)
        return total + x

    x = 0.9 * tf.eye(64) + 0.01 * weights()
    seen = loop(x)
    report("planned_float32", error=max_error(seen, loop.python_function(x)))


def planned_float32_elsewhere() -> None:
    """A product that a solver reads, in a function that is called by itself as well."""
    for case in ("before", "between"):

        @tf.function
        def covariance(x: tf.Tensor) -> tf.Tensor:
            return tf.matmul(x, x, transpose_b=True)

        @tf.function
        def solved(x: tf.Tensor) -> tf.Tensor:
            return tf.linalg.inv(covariance(x) + 0.01 * tf.eye(64))

        x = tf.constant(weights())
        if case == "between":
            solved(x)
        low = covariance(x)
        exact = tf.linalg.inv(tf.matmul(x, x, transpose_b=True) + 0.01 * tf.eye(64))
        report(
            f"planned_float32_{case}",
            error=max_error(solved(x), exact) / float(tf.reduce_max(tf.abs(exact))),
            low=max_error(low, tf.matmul(x, x, transpose_b=True)),
        )


def types_of(function: Any, x: tf.Tensor) -> list[int]:
    return compute_types(running(function.get_concrete_function(x).name))


def counted(installed: Any) -> dict[str, int]:
    return {name: installed.status()[name] for name in ("nodes_total", "nodes_converted", "casts")}


def chain(installed: Any, variable: tf.Variable, x: tf.Tensor) -> None:
    def layer(callee: Callable[[tf.Tensor], tf.Tensor]) -> Any:
        return tf.function(lambda x: tf.nn.relu(tf.matmul(callee(x), variable)))

    function: Any = tf.nn.relu
    for _ in range(DEPTH):
        function = layer(function)
    before = installed.status()["graphs_seen"]
    function(x)
    report("chain", graphs=installed.status()["graphs_seen"] - before)


def called_later(installed: Any, variable: tf.Variable, x: tf.Tensor, exact: tf.Tensor) -> None:
    inner = traced_inside(variable, x)
    before, counts = types_of(inner, x), counted(installed)
    error = max_error(inner(x), exact)
    report(
        "called_later",
        before=before,
        after=types_of(inner, x),
        error=error,
        counted_again=counted(installed) != counts,
    )


def lines(variable: tf.Variable, x: tf.Tensor) -> None:
    """The log lines of functions that call one by its name, where its product is planned apart."""
    said: dict[str, str] = {}
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.update([record.getMessage().split(": ", 1)])  # type: ignore[method-assign]
    logging.getLogger("tf_amp").addHandler(handler)

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(tf.matmul(x, variable))

    @tf.function
    def branch(x: tf.Tensor) -> tf.Tensor:
        return inner(x) if tf.reduce_sum(x) > 0 else x

    @tf.function
    def in_loop(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            x = inner(x)
        return x

    @tf.function
    def in_both(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            x = inner(x)
        return branch(x)

    @tf.function
    def beside(x: tf.Tensor) -> tf.Tensor:
        return branch(inner(x))

    for function in (in_loop, in_both, beside):
        function(x)
    logging.getLogger("tf_amp").removeHandler(handler)
    report("lines", said={name: line.split(",")[0] for name, line in said.items()})


def of_tensorflow_1(installed: Any, x: tf.Tensor) -> None:
    """What is told of a frozen graph, and of a SavedModel that is one, once they are called."""
    v1 = tf.compat.v1
    folder = tempfile.mkdtemp()
    with tf.Graph().as_default(), v1.Session() as session:
        fed = v1.placeholder(tf.float32, (8, 64), name="x")
        made = tf.identity(tf.matmul(fed, tf.constant(weights())), name="y")
        frozen = session.graph.as_graph_def()
        v1.saved_model.simple_save(session, f"{folder}/model", {"x": fed}, {"y": made})
    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tf_amp").addHandler(handler)

    def rows() -> int:
        return len(installed.status()["functions"])

    before = rows()
    wrapped = v1.wrap_function(lambda: tf.import_graph_def(frozen, name=""), [])
    wrapped.prune("x:0", "y:0")(x)
    pruned = rows()
    tf.saved_model.load(f"{folder}/model").signatures["serving_default"](x)
    logging.getLogger("tf_amp").removeHandler(handler)
    report("of_tensorflow_1", said=said, rows=[pruned - before, rows() - pruned])


def gradient(variable: tf.Variable, x: tf.Tensor) -> None:
    inner = traced_inside(variable, x)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(inner(x))
    got, wanted = tape.gradient(loss, variable), tf.matmul(x, tf.ones((8, 64)), transpose_a=True)
    report("gradient", error=max_error(got, wanted))


def compiled(variable: tf.Variable, x: tf.Tensor) -> None:
    inner = traced_inside(variable, x, jit_compile=True)
    report("compiled", hlo=dots(inner, x))


def pipeline(variable: tf.Variable, x: tf.Tensor, exact: tf.Tensor) -> None:
    """The pipeline keeps float32, whether the function is called by itself before or after."""
    inner = traced_inside(variable, x)
    dataset = tf.data.Dataset.from_tensors(x).map(inner)
    first, types = max_error(next(iter(dataset)), exact), types_of(inner, x)
    alone = max_error(inner(x), exact)
    again = max_error(next(iter(dataset)), exact)
    report("pipeline", first=first, types=types, alone=alone, again=again)

    @tf.function
    def traced_there(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, variable) if x[0, 0] < 100.0 else x

    dataset = tf.data.Dataset.from_tensors(x).map(lambda x: traced_there(x) * 1.0)
    first = max_error(next(iter(dataset)), exact)
    alone = max_error(traced_there(x), exact)
    again = max_error(next(iter(dataset)), exact)
    report("traced_by_a_pipeline", first=first, alone=alone, again=again)


def export(variable: tf.Variable, x: tf.Tensor) -> None:
    inner = traced_inside(variable, x)
    module = tf.Module()
    module.variable, module.inner = variable, inner
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder, inner.get_concrete_function(x))
        saved = loader_impl.parse_saved_model(folder)
    library = saved.meta_graphs[0].graph_def.library.function
    report("export", types=sorted({t for f in library for t in compute_types(f)}))


def lost_graph(variable: tf.Variable, x: tf.Tensor) -> None:
    """The graph of a concrete function goes with it; the caller goes on calling it by name."""

    @tf.function
    def outer(x: tf.Tensor) -> tf.Tensor:
        inner = tf.function(lambda x: tf.matmul(x, variable))
        return inner.get_concrete_function(x)(x)

    report("lost_graph", error=max_error(outer(x), tf.matmul(x, variable)))


def threads(variable: tf.Variable, x: tf.Tensor, exact: tf.Tensor) -> None:
    errors: list[float] = []
    for _ in range(8):
        inner = traced_inside(variable, x)
        start = threading.Barrier(4)

        def call(inner: Any = inner, start: threading.Barrier = start) -> None:
            start.wait()
            errors.append(max_error(inner(x), exact))

        running_threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in running_threads:
            thread.start()
        for thread in running_threads:
            thread.join()
    report("threads", calls=len(errors), errors=sorted(set(errors)))


def heard(variable: tf.Variable, x: tf.Tensor) -> None:
    """Who hears of a function waits for a thread that calls another one first."""
    first, other = (tf.function(lambda x, k=k: tf.matmul(x, variable) + k) for k in (1.0, 2.0))
    waited: list[bool] = []

    def call_elsewhere(_: logging.LogRecord) -> None:
        logging.getLogger("tf_amp").removeHandler(handler)
        thread = threading.Thread(target=other, args=(x,), daemon=True)
        thread.start()
        thread.join(20)
        waited.append(thread.is_alive())

    handler = logging.Handler(logging.INFO)
    handler.emit = call_elsewhere  # type: ignore[method-assign]
    logging.getLogger("tf_amp").addHandler(handler)
    first(x)
    report("heard", waited=waited)


def makes_variables(installed: Any, x: tf.Tensor) -> None:
    """Functions that make a variable in their first trace, in ways that lead to other traces."""

    def product(*, lifted: bool) -> Any:
        made: list[tf.Variable] = []

        @tf.function
        def function(x: tf.Tensor) -> tf.Tensor:
            if not made:
                start = tf.constant(weights())
                made.append(tf.Variable(start if lifted else start + 0.0 * x[0, 0]))
            return tf.matmul(x, made[0])

        return function

    for name, lifted, call in (
        ("called", True, lambda function: function(x)),
        ("asked_for", True, lambda function: function.get_concrete_function(x)(x)),
        ("not_lifted", False, lambda function: function(x)),
    ):
        before = installed.status()["graphs_seen"]
        error = max_error(call(product(lifted=lifted)), tf.matmul(x, weights()))
        seen = installed.status()["graphs_seen"] - before
        report(f"makes_variables_{name}", error=error, graphs=seen)


def interrupted(variable: tf.Variable, x: tf.Tensor, exact: tf.Tensor) -> None:
    originals, first = function_originals.installed(), iter((True,))
    add = originals._add

    def add_at_last(*args: Any) -> None:
        if next(first, False):
            raise KeyboardInterrupt
        add(*args)

    planning = mock.patch("graph_passes.pipeline.apply_plan", side_effect=KeyboardInterrupt)
    adding = mock.patch.object(originals, "_add", add_at_last)
    for name, patch in (("planning", planning), ("adding", adding)):
        inner, raised = traced_inside(variable, x), False
        with patch:
            try:
                inner(x)
            except KeyboardInterrupt:
                raised = True
        report(f"interrupted_{name}", raised=raised, error=max_error(inner(x), exact))


def switched_off(variable: tf.Variable, x: tf.Tensor, exact: tf.Tensor) -> None:
    inner = traced_inside(variable, x)
    installation.uninstall()
    report("switched_off", error=max_error(inner(x), exact))
