"""Scripts for `test_function_surroundings`: messages, tf.data, TensorFlow's own pass, faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from function_harness import (
    max_error,
    report,
    running,
    switch_on,
    weights,
)

from tf_amp import installation
from tf_amp.hosts import function_calls, function_originals


def main() -> None:
    for case in (messages, cast_stack, pipelines, dataset_loops, upstream, faults):
        case()
        installation.uninstall()


def messages() -> None:
    """The same failing function with AMP off and on."""
    variable = tf.Variable(weights())
    x = tf.constant(weights(1, (8, 64)))

    def failing() -> list[str]:
        @tf.function
        def inner(x: tf.Tensor) -> tf.Tensor:
            product = tf.matmul(x, variable)
            return tf.debugging.check_numerics(product / 0.0, "not finite")

        @tf.function
        def outer(x: tf.Tensor) -> tf.Tensor:
            # Between products, a copy of it with low-precision arguments is called.
            return tf.matmul(inner(tf.matmul(x, variable)), variable)

        return [*_message(inner, x), *_message(outer, x)]

    off = failing()
    switch_on()
    on = failing()
    report("messages", off=off, on=on)


def _message(function: Any, x: tf.Tensor) -> tuple[str, str]:
    """The frames of this file in a function's error message; whether any stack was missing."""
    try:
        function(x)
    except tf.errors.InvalidArgumentError as error:
        frames = [line.strip() for line in error.message.splitlines() if "File" in line]
        ours = "\n".join(frame.partition("function_surroundings")[2] for frame in frames)
        return ours, str("unavailable" in error.message)
    raise RuntimeError("The function was expected to fail.")


def cast_stack() -> None:
    """A node that the rewrite added has the stack of the node whose output it casts."""
    switch_on()
    variable = tf.Variable(weights())

    @tf.function
    def product(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, variable)

    product(tf.ones((8, 64)))
    function = product.get_concrete_function(tf.ones((8, 64)))._inference_function
    info = function.graph_debug_info
    nodes = [node.name for node in running(function.name).node_def]
    added = [name for name in nodes if "CastTo" in name]
    known = [name for name in added if name in info.name_to_trace_id]
    report("cast_stack", added=len(added), known=len(known), suffixes="@" in str(info))


def pipelines() -> None:
    """tf.data with AMP off and on: every bit of the results and the functions themselves."""
    variable = tf.Variable(weights())
    rows = weights(2, (6, 8, 64))

    def helper() -> Any:
        @tf.function
        def used_by_model_and_pipeline(x: tf.Tensor) -> tf.Tensor:
            return tf.matmul(x, variable)

        return used_by_model_and_pipeline

    def build(function: Any) -> dict[str, Any]:
        def branch(x: tf.Tensor) -> tf.Tensor:
            return tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.matmul(x, variable), lambda: -x)

        def loop(x: tf.Tensor) -> tf.Tensor:
            def body(i: tf.Tensor, y: tf.Tensor) -> Any:
                return i + 1, tf.matmul(y, variable) / 64.0

            return tf.while_loop(lambda i, y: i < 2, body, [0, x])[1]

        def around(x: tf.Tensor) -> tf.Tensor:
            return tf.function(lambda y: function(y) + 1.0)(x)

        data = tf.data.Dataset.from_tensor_slices(rows)
        datasets = {
            "map": data.map(lambda x: tf.matmul(x, variable), num_parallel_calls=2),
            "branch": data.map(branch),
            "loop": data.map(loop),
            "called": data.map(function),
            "called_deeper": data.map(around),
            "filter": data.filter(lambda x: tf.reduce_sum(tf.matmul(x, variable)) > 0.0),
            "interleave": data.interleave(
                lambda x: tf.data.Dataset.from_tensors(tf.matmul(x, variable)), cycle_length=2
            ),
        }
        return {name: list(d.as_numpy_iterator()) for name, d in datasets.items()}

    off = build(helper())
    switch_on()
    shared = helper()
    exact = tf.matmul(rows[0], variable)
    error_before = max_error(shared(rows[0]), exact)
    on = build(shared)
    report(
        "pipelines",
        same={name: _same(off[name], on[name]) for name in off},
        error_before=error_before,
        error_after=max_error(shared(rows[0]), exact),
    )


def _same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(np.array_equal, first, second))


def dataset_loops() -> None:
    """Loops over datasets in a tf.function, of its own and in a pipeline: the kinds of products."""
    variable = tf.Variable(weights())
    rows = tf.data.Dataset.from_tensor_slices(weights(2, (6, 8, 64)))

    def make() -> Any:
        @tf.function
        def steps(data: Any) -> Any:
            total = tf.zeros((8, 64))
            for x in data:
                if x[0, 0] > 100.0:
                    break
                total += tf.matmul(tf.matmul(x, variable), variable)
            return total

        @tf.function
        def epoch(data: Any) -> Any:
            total = steps(data.map(lambda x: tf.matmul(x, variable)))
            nested = data.take(1).map(lambda x: tf.reduce_sum(steps(rows.take(2))) + x)
            return total, nested.reduce(0.0, lambda _, x: x[0, 0])

        return epoch

    off = make()(rows)
    installed = switch_on()
    epoch = make()
    on = epoch(rows)
    outer = running(epoch.get_concrete_function(rows)._inference_function.name)
    kinds: dict[str, set[str]] = {"in the loop": set(), "in pipelines": set()}
    pending = [(node, "in the loop") for node in outer.node_def]
    while pending:
        node, where = pending.pop()
        if node.op == "MatMul":
            kinds[where].add(tf.as_dtype(node.attr["T"].type).name)
        inside = "in pipelines" if node.op == "MapDataset" else where
        for attr in node.attr.values():
            if attr.func.name:
                pending += [(inner, inside) for inner in running(attr.func.name).node_def]
    report(
        "dataset_loops",
        kinds={where: sorted(found) for where, found in kinds.items()},
        error=max_error(on[0], off[0]),
        exact=float(on[1]) == float(off[1]),
        told=[function.name for function in installed.status().functions],
    )


def upstream() -> None:
    """TensorFlow's own pass, asked for before and after AMP is on, and after it is off."""
    name = "auto_mixed_precision_onednn_bfloat16"
    options = tf.config.optimizer
    options.set_experimental_options({name: True, "min_graph_nodes": 7})
    switch_on()
    before = options.get_experimental_options()
    options.set_experimental_options({name: True, "remapping": False})
    after = options.get_experimental_options()
    installation.uninstall()
    options.set_experimental_options({name: True})
    report(
        "upstream",
        asked_before=before[name],
        asked_after=after[name],
        others=[before["min_graph_nodes"], after["remapping"]],
        once_off=options.get_experimental_options()[name],
    )


def faults() -> None:
    """A pass that raises, a runtime that refuses: the float32 function runs."""
    x = tf.constant(weights(1, (8, 64)))
    variable = tf.Variable(weights())
    exact = tf.matmul(x, variable)
    installed = switch_on()

    def product() -> Any:
        return tf.function(lambda x: tf.matmul(x, variable))

    real = function_calls.rewrite_function_def

    def raising(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a planted fault")

    function_calls.rewrite_function_def = raising
    raised = max_error(product()(x), exact)

    function_calls.rewrite_function_def = real
    originals = function_originals.installed()
    add = originals._add
    calls = []

    def refusing_once(context: Any, definition: Any) -> None:
        calls.append(definition.signature.name)
        if len(calls) == 1:
            raise tf.errors.InvalidArgumentError(None, None, "a planted refusal")
        add(context, definition)

    originals._add = refusing_once
    refused = max_error(product()(x), exact)
    originals._add = add
    working = max_error(product()(x), exact)
    status = installed.status()
    report(
        "faults",
        raised=raised,
        refused=refused,
        calls=len(calls),
        working=working,
        failed=status["graphs_failed"],
    )
