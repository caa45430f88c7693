"""Conversions and units up to a limit."""

from __future__ import annotations

import functools
import json

import pytest
from environments import RunPython
from tensorflow.core.framework import graph_pb2

from graph_passes import PrecisionConfig, RewriteResult, rewrite_graph_def
from tf_amp.hosts.conversion_numbers import ConversionNumbers

CONFIG = PrecisionConfig(target_dtype="float16", device="GPU")


def network(reverse: bool = False) -> graph_pb2.GraphDef:
    """Two products, a layer normalization between them, a loop and a second product in it."""
    import tensorflow as tf

    w = tf.Variable(tf.ones([16, 16]))

    @tf.function
    def run(x: tf.Tensor) -> tf.Tensor:
        y = tf.nn.relu(x @ w)
        mean, variance = tf.nn.moments(y, [-1], keepdims=True)
        y = tf.nn.batch_normalization(y, mean, variance, None, None, 1e-3)
        for _ in tf.range(3):
            y = tf.nn.relu(y @ w)
        return tf.identity(y @ w)

    graph = run.get_concrete_function(tf.TensorSpec([8, 16])).graph.as_graph_def()
    if reverse:
        nodes = list(graph.node)[::-1]
        del graph.node[:]
        graph.node.extend(nodes)
    return graph


def rewrite(numbers: ConversionNumbers, graph: graph_pb2.GraphDef) -> RewriteResult:
    return numbers.rewrite(functools.partial(rewrite_graph_def, graph), CONFIG)


def made(result: RewriteResult) -> set[int]:
    remarks = result.remarks().remarks
    kept = {r.number for r in remarks if r.kind == "kept"}
    return {r.number for r in remarks if r.number and r.kind != "kept"} - kept


def test_every_limit_makes_the_first_ones_alone() -> None:
    graph = network()
    assert not rewrite(ConversionNumbers(None), graph).numbers
    every = rewrite(ConversionNumbers(1000), graph)
    total = max(every.numbers.values())
    assert sorted(every.numbers.values()) == list(range(1, total + 1))
    assert made(every) == set(range(1, total + 1))
    assert any(r.kind == "unit" and r.number for r in every.remarks().remarks)
    for limit in range(total + 1):
        result = rewrite(ConversionNumbers(limit), graph)
        assert result.failure is None
        assert max(made(result), default=0) <= limit
        assert result.numbers == every.numbers
        kept = [r for r in result.remarks().remarks if r.rule == "bisect_limit"]
        assert bool(kept) == (limit < total)
        # Only what has a number is beyond a limit.
        assert all(r.number is not None and r.number > limit for r in kept if r.node)
    plain = rewrite_graph_def(graph, CONFIG)
    assert every.graph_def == plain.graph_def
    assert not rewrite(ConversionNumbers(0), graph).report.converted_nodes


def test_numbers_do_not_depend_on_the_order_of_nodes() -> None:
    one, other = (rewrite(ConversionNumbers(5), network(reverse=r)) for r in (False, True))

    def named(result: RewriteResult) -> dict:
        # Each tracing gives functions other numbers.
        return {
            (rule, function.rstrip("0123456789"), node.rstrip("0123456789")): number
            for (rule, function, node), number in result.numbers.items()
        }

    assert named(one) == named(other)


def test_numbers_go_on_from_graph_to_graph_and_stay() -> None:
    numbers = ConversionNumbers(1000)
    first, again = (rewrite(numbers, network()) for _ in range(2))
    assert sorted(first.numbers.values()) == sorted(again.numbers.values())
    other = network()
    for node in other.node:
        node.name += "_b"
        node.input[:] = [i.split(":")[0] + "_b" + i[len(i.split(":")[0]) :] for i in node.input]
    last = rewrite(numbers, other)
    assert min(last.numbers.values()) > 1
    assert max(last.numbers.values()) > max(first.numbers.values())


PROGRAM = """
from tf_amp import autoload
autoload.activate()
import json, sys, logging
import numpy as np, tensorflow as tf
import tf_amp
tf.random.set_seed(0)
x = tf.random.normal([32, 64])
w = tf.Variable(tf.random.normal([64, 64]))

@tf.function
def step(x):
    return tf.nn.relu(tf.nn.relu(x @ w) @ w) @ w

y = step(x)
s = tf_amp.status()
exact = tf.nn.relu(tf.nn.relu(x @ w) @ w) @ w
print(json.dumps([s.nodes_converted, bool(np.array_equal(y, exact))]))
"""


@pytest.mark.parametrize(("limit", "converted"), [("0", 0), ("1", 1), ("", 5)])
def test_variable(run_forked: RunPython, limit: str, converted: int) -> None:
    rewrite = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE"
    env = {
        "TF_ENABLE_AUTO_MIXED_PRECISION": "1",
        f"{rewrite}_DTYPE": "bfloat16",
        f"{rewrite}_IGNORE_PERFORMANCE": "1",
        f"{rewrite}_BISECT_LIMIT": limit,
    }
    nodes, exact = json.loads(run_forked(PROGRAM, env).stdout.splitlines()[-1])
    assert nodes >= converted if converted == 5 else nodes == converted
    assert exact == (converted == 0)
