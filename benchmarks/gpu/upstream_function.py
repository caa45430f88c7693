"""A function as TensorFlow's own pass would make it, although that pass skips what XLA compiles."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from oracle import run_oracle, with_fetches
from tensorflow.core.framework import graph_pb2
from tensorflow.python.eager import context as context_lib


def through_upstream(function: Any, arguments: list[tf.Tensor], dtype: str) -> Any:
    """Runs the pass on the graph of a function and makes a compiled function of the result.

    Args:
        function: a `tf.function` that XLA does not compile.
        arguments: what it is to be traced with.
        dtype: "float16" or "bfloat16"; the process was started with `oracle_environment` of it.

    Returns:
        A `tf.function` of the same arguments and variables, with the results in a flat list.

    Raises:
        oracle.OracleError: TensorFlow refused what its pass had made.
    """
    concrete = function.get_concrete_function(*arguments)
    graph = concrete.graph
    results = [tensor.name for tensor in graph.outputs]
    effects = [operation.name for operation in graph.control_outputs]
    inputs = [tensor.op.name for tensor in graph.inputs]
    kept = [*inputs, *effects, *(name.partition(":")[0] for name in results)]
    rewritten = run_oracle(with_fetches(graph.as_graph_def(), kept), dtype)
    context = context_lib.context()
    for definition in rewritten.library.function:
        if not context.has_function(definition.signature.name):
            context.add_function_def(definition)
    # A placeholder that is given another tensor would stay, and XLA has no kernel for it.
    body = graph_pb2.GraphDef(versions=rewritten.versions, library=rewritten.library)
    body.node.extend(node for node in rewritten.node if node.name not in inputs)
    read = {name.lstrip("^").partition(":")[0] for node in body.node for name in node.input}

    @tf.function(jit_compile=True, autograph=False)
    def again(*given: tf.Tensor) -> list[tf.Tensor]:
        captured = map(tf.compat.v1.get_default_graph().capture, concrete.captured_inputs)
        tensors = dict(zip(inputs, (*given, *captured), strict=True))
        imported = tf.graph_util.import_graph_def(
            body,
            input_map={f"{name}:0": tensors[name] for name in inputs if name in read},
            return_elements=[*results, *effects],
            name="",
        )
        with tf.control_dependencies(imported[len(results) :]):
            return [tf.identity(tensor) for tensor in imported[: len(results)]]

    return again
