"""Where values come from: through calls, branches and loops."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tf_amp.loss_scale.data_flow import DataFlow, Program

VARIABLES = [tf.Variable(0.0), tf.Variable(0.0)]


def call(x: Any, y: Any) -> Any:
    return tf.function(lambda x, y: (y, x * 2.0))(x, y)[1]


def branch(x: Any, y: Any) -> Any:
    return tf.cond(y > 0, lambda: x * 2.0, lambda: x)


def loop(x: Any, y: Any) -> Any:
    _, kept, _ = tf.while_loop(
        lambda n, kept, other: n < 3,
        lambda n, kept, other: (n + 1, kept * 2.0, other + kept),
        (0, x, y),
    )
    return kept


def call_of_two(x: Any, y: Any) -> Any:
    return tf.function(lambda x, y: x * y)(x, y)


def traced(function: Any) -> DataFlow:
    concrete = tf.function(function).get_concrete_function(tf.constant(1.0), tf.constant(1.0))
    known = concrete.graph._functions
    return DataFlow(
        Program(
            concrete._inference_function.cached_definition,
            lambda name: known[name].cached_definition if name in known else None,
        )
    )


@pytest.mark.parametrize(
    ("function", "made_of"),
    [(call, {"x"}), (branch, {"x"}), (loop, {"x"}), (call_of_two, {"x", "y"})],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_only_what_a_value_is_made_of(function: Any, made_of: set[str]) -> None:
    flow = traced(function)
    result = ("", "Identity", 0)
    assert result in flow.nodes
    found = {name for body, name, _ in flow.back([result]) if not body}
    assert found & {"x", "y"} == made_of


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["here", "in a function"])
def test_variables_are_found_behind_calls(wrap: Any) -> None:
    def write(x: Any, y: Any) -> Any:
        wrap(lambda: VARIABLES[1].assign(x))()
        return tf.cond(y > 0, lambda: VARIABLES[0].assign(y), lambda: y)

    flow = traced(write)
    writes = [place for place, node in flow.nodes.items() if node.op == "AssignVariableOp"]
    sources = [flow.sources(flow.makers[place][0]) for place in writes]
    assert [{body for body, _, _ in found} for found in sources] == [{""}, {""}]
    first, second = sources
    assert first.isdisjoint(second)


def test_a_function_that_is_not_known_is_a_node_like_others() -> None:
    concrete = tf.function(call).get_concrete_function(tf.constant(1.0), tf.constant(1.0))
    definition = concrete._inference_function.cached_definition
    flow = DataFlow(Program(definition, lambda name: None))
    assert flow.back([("", "Identity", 0)]) >= {("", "x", 0), ("", "y", 0)}
