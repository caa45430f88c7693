"""Graphs with loops, branches and calls, each with a weight that a training step updates."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2, types_pb2
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2

BFLOAT16, FLOAT = types_pb2.DT_BFLOAT16, types_pb2.DT_FLOAT
_DATA = np.random.default_rng(0)
_WEIGHT = (_DATA.standard_normal((8, 8)) / 3).astype(np.float32)
_INPUT = _DATA.standard_normal((4, 8)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class CallGraph:
    """A GraphDef that can be run: initialize, then fetch `out` and `gradient` given `x`."""

    graph_def: graph_pb2.GraphDef
    rows: int = 4

    def run(self, rewritten: graph_pb2.GraphDef | None = None, *, lower: bool = True) -> list:
        """The values of `out` and, where there is one, `gradient`."""
        graph_def = self.graph_def if rewritten is None else rewritten
        config = config_pb2.ConfigProto()
        if not lower:
            options = config.graph_options.rewrite_options
            options.function_optimization = rewriter_config_pb2.RewriterConfig.OFF
        with tf.Graph().as_default() as graph:
            tf.graph_util.import_graph_def(graph_def, name="")
            names = {op.name for op in graph.get_operations()}
            with tf.compat.v1.Session(graph=graph, config=config) as session:
                session.run("init")
                wanted = [name for name in ("out", "gradient") if name in names]
                return session.run([f"{name}:0" for name in wanted], {"x:0": _INPUT[: self.rows]})


def build(
    loss: Callable[[tf.Tensor, tf.Variable], tf.Tensor], gradient: bool = True, rows: int = 4
) -> CallGraph:
    """The graph of a function of an input [rows, 8] and a weight [8, 8], with its gradient."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [rows, 8], name="x")
        weight = tf.Variable(_WEIGHT, name="weight")
        out = tf.identity(loss(x, weight), name="out")
        if gradient:
            (made,) = tf.gradients(tf.reduce_sum(out), [weight])
            tf.identity(made, name="gradient")
        tf.group(weight.initializer, name="init")
        return CallGraph(graph.as_graph_def(), rows)


def loop(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
    """Three rounds of one layer."""
    return tf.while_loop(
        lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h @ weight)), (0, x), name="loop"
    )[1]


def nested_loop(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
    """A loop in a loop; both rounds use the weight."""

    def outer(i: tf.Tensor, h: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        inner = tf.while_loop(
            lambda j, _: j < 2, lambda j, k: (j + 1, tf.tanh(k @ weight)), (0, h), name="inner"
        )
        return i + 1, inner[1]

    return tf.while_loop(lambda i, _: i < 2, outer, (0, x), name="loop")[1]


def assigning_loop(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
    """Every round changes the weight that it has used."""
    return _loop_that_writes(x, weight, lambda made: _shrink(weight, made))


def indirectly_assigning_loop(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
    """As `assigning_loop`, but a function called in the body writes."""
    return _loop_that_writes(
        x, weight, tf.function(lambda made: _shrink(weight, made), autograph=False)
    )


def _loop_that_writes(
    x: tf.Tensor, weight: tf.Variable, write: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    def body(i: tf.Tensor, h: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # A round waits for the state of the one before, not for what that has written.
        with tf.control_dependencies([h]):
            product = h @ weight
        return i + 1, write(tf.tanh(product))

    return tf.while_loop(lambda i, _: i < 3, body, (0, x), name="loop")[1]


def _shrink(weight: tf.Variable, made: tf.Tensor) -> tf.Tensor:
    """Changes the weight once something is made; gives that back behind it."""
    with tf.control_dependencies([made]):
        change = weight.assign(weight * 0.5)
    with tf.control_dependencies([change]):
        return tf.identity(made)


def mixed_loop(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
    """A loop whose float32 argument is used by a matrix product and by a denied op."""
    scale = tf.exp(x)
    return tf.while_loop(
        lambda i, _: i < 3,
        lambda i, h: (i + 1, tf.tanh((h + tf.exp(scale * 0.1)) @ weight + scale @ weight)),
        (0, x),
        name="loop",
    )[1]


def list_loop(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
    """A loop that reads and writes tensor lists."""
    rows = tf.TensorArray(tf.float32, 4, element_shape=[1, 8]).unstack(x[:, None] @ weight)
    made = tf.TensorArray(tf.float32, 4, element_shape=[1, 8])
    _, made = tf.while_loop(
        lambda i, _: i < 4,
        lambda i, a: (i + 1, a.write(i, tf.tanh(rows.read(i) @ weight))),
        (0, made),
        name="loop",
    )
    return made.concat() @ weight


def branch(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
    """Matrix products before, in and behind the branches of a condition."""
    h = x @ weight
    h = tf.cond(
        tf.reduce_sum(x) > -1e6, lambda: tf.nn.relu(h @ weight), lambda: tf.nn.relu(h), name="if"
    )
    return h @ weight


def case(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
    """Matrix products before, in and behind a choice of three."""
    h = x @ weight
    branches = [lambda: h @ weight, lambda: tf.nn.relu(h), lambda: tf.tanh(h @ weight)]
    return tf.switch_case(tf.constant(2), branches, name="case") @ weight


def calls(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
    """One function called between matrix products, and again where everything is denied."""
    layer = tf.function(lambda h: tf.nn.relu(h * 0.5), autograph=False)
    layer = layer.get_concrete_function(tf.TensorSpec([4, 8], tf.float32))
    low = layer(x @ weight) @ weight
    return low + tf.exp(layer(tf.exp(x)))


def cells(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
    """One layer as a function, called three times in a row."""
    layer = tf.function(lambda h, w: tf.tanh(h @ w), autograph=False)
    for _ in range(3):
        x = layer(x, weight.read_value())
    return x


SHAPES = {
    function.__name__: function
    for function in (loop, nested_loop, mixed_loop, list_loop, branch, case, calls, cells)
}
"""Graphs that can be differentiated, by name."""


def nodes_named(nodes: object, op: str) -> list[node_def_pb2.NodeDef]:
    """The nodes of an op type."""
    return [node for node in nodes if node.op == op]  # type: ignore[attr-defined]


def function_named(graph_def: graph_pb2.GraphDef, name: str) -> function_pb2.FunctionDef:
    """A function of the library."""
    return next(f for f in graph_def.library.function if f.signature.name == name)


def loops(
    graph_def: graph_pb2.GraphDef,
) -> Iterator[tuple[node_def_pb2.NodeDef, function_pb2.FunctionDef]]:
    """The loops of the main graph with their bodies."""
    for node in graph_def.node:
        if node.op in ("While", "StatelessWhile"):
            yield node, function_named(graph_def, node.attr["body"].func.name)


def casts_of_weights(function: function_pb2.FunctionDef) -> list[str]:
    """Casts of what a ReadVariableOp of the same body reads."""
    reads = {node.name for node in nodes_named(function.node_def, "ReadVariableOp")}
    return [
        node.name
        for node in nodes_named(function.node_def, "Cast")
        if node.input[0].partition(":")[0] in reads
    ]


def dtypes_of(nodes: object, op: str) -> Counter[int]:
    """How many nodes of an op type have each dtype `T`."""
    return Counter(node.attr["T"].type for node in nodes_named(nodes, op))


def nested_calls(depth: int, top: str = "MatMul", body: str = "MatMul") -> graph_pb2.GraphDef:
    """A graph that calls a function that calls another, and so on; the last is a product.

    Args:
        depth: how many functions there are, "f0" to f"{depth - 1}".
        top: the op beside the call in the main graph, one of `_OUTPUTS`.
        body: the same in all functions but the last.
    """
    graph_def = graph_pb2.GraphDef()
    graph_def.node.add(name="x", op="Placeholder").attr["dtype"].type = FLOAT
    _add_op(graph_def.node, top, "x")
    _add_call(graph_def.node, "op", "f0")
    for number in range(depth):
        function = graph_def.library.function.add()
        function.signature.name = f"f{number}"
        function.signature.input_arg.add(name="x", type=FLOAT)
        function.signature.output_arg.add(name="y", type=FLOAT)
        op = body if number < depth - 1 else "MatMul"
        _add_op(function.node_def, op, "x")
        function.ret["y"] = f"op:{_OUTPUTS[op]}:0"
        if number < depth - 1:
            _add_call(function.node_def, function.ret["y"], f"f{number + 1}")
            function.ret["y"] = "call:output:0"
    return graph_def


_OUTPUTS = {"MatMul": "product", "Tanh": "y", "Exp": "y"}


def _add_op(nodes: Any, op: str, tensor: str) -> None:
    node = nodes.add(name="op", op=op, input=[tensor] * (2 if op == "MatMul" else 1))
    node.attr["T"].type = FLOAT


def _add_call(nodes: Any, tensor: str, function: str) -> None:
    call = nodes.add(name="call", op="PartitionedCall", input=[tensor])
    call.attr["Tin"].list.type.append(FLOAT)
    call.attr["Tout"].list.type.append(FLOAT)
    call.attr["f"].func.name = function
