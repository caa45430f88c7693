"""Rules on single nodes: what becomes of graphs, units, functions and loops."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import traced_steps
import training_steps
from decisions import decisions_of
from graph_checks import check
from graph_diff import all_nodes, retyped
from graph_text import graph
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import RandomGraph, random_graphs, shuffled
from tensorflow.core.framework import graph_pb2
from test_invariants import on_graphs

from graph_passes import PrecisionConfig, Reason, Rule, rewrite_function_def, rewrite_graph_def
from graph_passes.ir.rule_matching import MARK, write_mark
from graph_passes.policy.rules import ACTIONS

CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU")
GPU = PrecisionConfig(target_dtype="float16", device="GPU")
CHAIN = """
x = Const(0.5, [512, 512])
a = MatMul(x, x)
e = Exp(a)
b = MatMul(e, x)
t = Tanh(b)
c = MatMul(t, x)
out = Identity(c)
"""


def with_rules(*rules: dict[str, Any], config: PrecisionConfig = CPU) -> PrecisionConfig:
    made = tuple(Rule(**{"origin": "r.toml [1]", "why": "so", **rule}) for rule in rules)
    return dataclasses.replace(config, rules=made)


def low_nodes(before: graph_pb2.GraphDef, config: PrecisionConfig) -> set[str]:
    result = rewrite_graph_def(before, config, preserve=("out",))
    assert result.failure is None
    check(before, result.proto, device=config.device, preserve=("out",))
    return {slot.node for slot in retyped(before, result.proto)}


@pytest.mark.parametrize("parity", [False, True])
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"action": "keep_float32", "node": "b"}, "ac"),
        ({"action": "keep_float32", "op": "MatMul"}, ""),
        ({"action": "keep_float32", "node": "e"}, "abct"),
        ({"action": "deny", "node": "b"}, "ac"),
        ({"action": "deny", "node": "t"}, "abc"),
        ({"action": "allow", "node": "e"}, "aebtc"),
        ({"action": "allow", "node": ".*"}, "aebtc"),
        ({"action": "infer", "op": "Exp"}, "aebtc"),
        ({"action": "clear", "node": "e"}, "aebtc"),
        ({"action": "infer", "node": "b"}, "ac"),
        ({"action": "infer", "op": "MatMul"}, ""),
        ({"action": "keep_float32", "node": "nothing"}, "abct"),
    ],
)
def test_rule_decides_its_nodes(rule: dict[str, str], expected: str, parity: bool) -> None:
    config = with_rules(rule, config=dataclasses.replace(CPU, parity=parity))
    assert low_nodes(graph(CHAIN), config) - {"x"} == set(expected)


def test_rule_allows_where_no_op_of_the_allow_list_is() -> None:
    before = graph("x = Const(0.5, [512, 512])\ny = Tanh(x)\nout = Identity(y)")
    assert low_nodes(before, CPU) == set()
    assert "y" in low_nodes(before, with_rules({"action": "allow", "node": "y"}))


def test_reason_names_the_rule() -> None:
    result = rewrite_graph_def(graph(CHAIN), with_rules({"action": "keep_float32", "node": "b"}))
    remark = next(r for r in result.remarks().remarks if r.node == "b")
    assert (remark.kind, remark.rule) == ("kept", "kept_by_rule")
    assert remark.reason == "kept by a rule (r.toml [1]: 'so')"
    (decision,) = (d for d in decisions_of(result.report) if d.node == "b")
    assert decision.reason is Reason.KEPT_BY_RULE
    assert sum(result.matched.values()) == 1


def test_contradiction_leaves_the_graph_as_it_is() -> None:
    before = graph(CHAIN)
    rules = ({"action": "allow", "op": "MatMul"}, {"action": "deny", "node": "b"})
    result = rewrite_graph_def(before, with_rules(*rules))
    assert result.proto is before
    assert not result.changed
    assert "RuleConflictError: two rules contradict each other on the node 'b'" in result.failure


@pytest.mark.parametrize("action", ["allow", "infer", "clear"])
def test_values_that_come_into_the_graph_keep_their_dtype(action: str) -> None:
    before = graph(
        """
        p = Placeholder(dtype=float32, shape=[8, 8])
        v = VarHandleOp(dtype=float32, shape=[8, 8])
        w = ReadVariableOp(v, dtype=float32)
        r = RandomUniform([8, 8], dtype=float32)
        i = Const([1, 2])
        f = Cast(i, DstT=float32)
        y = MatMul(p, w)
        z = MatMul(r, y)
        out = Identity(z)
        """
    )
    config = with_rules({"action": action, "node": ".*"})
    assert {"p", "v", "w", "r", "f"}.isdisjoint(low_nodes(before, config))


def test_what_is_assigned_to_a_variable_stays_float32() -> None:
    before = graph(
        """
        v = VarHandleOp(dtype=float32, shape=[512, 512])
        w = ReadVariableOp(v, dtype=float32)
        x = Placeholder(dtype=float32, shape=[512, 512])
        dy = Placeholder(dtype=float32, shape=[512, 512])
        y = MatMul(x, dy)
        s = Sub(w, y)
        out = AssignVariableOp(v, s)
        """
    )
    low = low_nodes(before, with_rules({"action": "allow", "node": "s"}))
    assert low == {"y"}


def _names(step: training_steps.Step, pattern: str) -> set[str]:
    nodes = step.function_def.node_def
    names = {node.name for node in nodes if re.fullmatch(pattern, node.name)}
    assert names
    return names


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("action", ["keep_float32", "deny"])
@pytest.mark.parametrize(
    ("build", "node", "unit"),
    [
        (training_steps.residual_cnn, r".*/batch_normalization_1/.*", "batch-norm"),
        (training_steps.residual_cnn, r".*/batch_normalization_1_2/batchnorm/Rsqrt", ""),
        (training_steps.token_mlp, r".*/layer_normalization_1/.*", ""),
        (training_steps.token_mlp, r"gradient_tape/.*/MatMul/.*", "weight-gradient"),
        (training_steps.token_mlp, r".*", ""),
    ],
)
def test_nodes_that_are_kept_are_replaced_by_no_unit(
    build: Any, node: str, unit: str, action: str, config: PrecisionConfig
) -> None:
    keras.backend.clear_session()  # the names of layers start anew
    step = training_steps.trace(build, 16)
    config = with_rules({"action": action, "node": node}, config=config)
    result = rewrite_function_def(step.function_def, config, shapes=step.shapes)
    assert result.failure is None
    after = {n.name: n for f in (result.proto, *result.extra_functions) for n in f.node_def}
    before = {n.name: n for n in step.function_def.node_def}
    for name in _names(step, node):
        assert after[name].op == before[name].op
        assert after[name].attr == before[name].attr
    if unit:
        without = dataclasses.replace(config, rules=())
        free = rewrite_function_def(step.function_def, without, shapes=step.shapes)
        found, others = (
            [u for u in one.report.fused_units if u.startswith(f"{unit}: ")]
            for one in (result, free)
        )
        assert len(found) < len(others)


def test_training_with_a_kept_scope_is_as_good() -> None:
    step = training_steps.trace(training_steps.token_mlp, None)
    config = with_rules({"action": "keep_float32", "layer": "layer_normalization"})
    result = rewrite_graph_def(step.graph_def, config, preserve=step.preserve, shapes=step.shapes)
    assert result.changed
    wanted, _ = step.train(step.graph_def, 5)
    found, _ = step.train(result.proto, 5)
    np.testing.assert_allclose(found, wanted, rtol=0.02)


def recurrence() -> traced_steps.Step:
    weight = tf.Variable(tf.random.stateless_normal((32, 32), (1, 2)) / 6)

    def gradient(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape, tf.name_scope("cell"):
            body = lambda i, h: (i + 1, tf.tanh(tf.matmul(h, weight)))  # noqa: E731
            _, h = tf.while_loop(lambda i, _: i < 5, body, (0, x))
            loss = tf.reduce_sum(tf.matmul(h, weight))
        return [tape.gradient(loss, weight)]

    return traced_steps.traced(gradient, tf.TensorSpec((4, 32)))


@pytest.mark.parametrize(
    "rule",
    [
        {"node": "cell/while/.*"},
        {"node": r".*", "function": "cell_while_body.*"},
        {"layer": "while"},
    ],
    ids=str,
)
def test_rule_holds_in_loops_and_their_gradients(rule: dict[str, str]) -> None:
    step, painted = recurrence(), dataclasses.replace(CPU, disabled_rules=frozenset(("cast-cut",)))

    def products_in_loops(config: PrecisionConfig) -> list[tuple[str, int]]:
        functions = step.rewritten(config).functions
        loops = [n for f in functions.values() for n in f.node_def if n.op.endswith("While")]
        names = [node.attr["body"].func.name for node in loops]
        bodies = [functions.get(name) or traced_steps.library(name) for name in names]
        nodes = [node for body in bodies for node in body.node_def]  # type: ignore[union-attr]
        return [(node.name, node.attr["T"].type) for node in nodes if node.op == "MatMul"]

    float32, bfloat16 = tf.float32.as_datatype_enum, tf.bfloat16.as_datatype_enum
    assert {dtype for _, dtype in products_in_loops(painted)} == {bfloat16}
    kept = products_in_loops(with_rules({"action": "keep_float32", **rule}, config=painted))
    assert len(kept) == 3
    assert {dtype for _, dtype in kept} == {float32}


RULES = st.lists(
    st.builds(
        Rule,
        action=st.sampled_from(ACTIONS),
        node=st.sampled_from(["[a-f].*", ".*1.*", ".*[02468]", ".*"]),
        op=st.sampled_from(["", "", "MatMul", "Exp", "AddV2", "Identity"]),
        level=st.sampled_from(["file", "call"]),
    ),
    min_size=1,
    max_size=2,
)


@on_graphs(120)
@given(random_graphs(), st.sampled_from([CPU, GPU]), RULES, st.integers(0, 1000))
def test_rules_keep_all_promises(
    example: RandomGraph, config: PrecisionConfig, rules: list[Rule], seed: int
) -> None:
    config = dataclasses.replace(config, rules=tuple(rules))
    result = rewrite_graph_def(example.graph_def, config, preserve=example.preserve)
    if result.failure is not None:
        assert result.failure.startswith("RuleConflictError")
        return
    check(example.graph_def, result.proto, device=config.device, preserve=example.preserve)
    mixed = rewrite_graph_def(shuffled(example.graph_def, seed), config, preserve=example.preserve)
    assert all_nodes(mixed.proto) == all_nodes(result.proto)
    assert mixed.matched == result.matched


@on_graphs(60)
@given(random_graphs(), st.sampled_from([CPU, GPU]))
def test_marks_of_all_nodes_keep_the_graph(example: RandomGraph, config: PrecisionConfig) -> None:
    marked = graph_pb2.GraphDef()
    marked.CopyFrom(example.graph_def)
    for node in marked.node:
        node.attr[MARK].s = write_mark("keep_float32", "model.py:3", "all of it")
    result = rewrite_graph_def(marked, config, preserve=example.preserve)
    assert (result.failure, result.changed) == (None, False)
