"""What blocks most, and for how long it is looked for."""

from __future__ import annotations

import dataclasses

import pytest
import tensorflow as tf

from graph_passes import ListEdit, PrecisionConfig
from tf_amp.tracing.blockers import find_blockers
from tf_amp.tracing.models import plan_model
from tf_amp.tracing.text import blockers_text
from tf_amp.tracing.trace import TracedGraph


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> TracedGraph:
    """Two denied ops between products, the second one with the larger tensors."""
    path = tmp_path_factory.mktemp("graph") / "graph.pb"
    with tf.Graph().as_default() as built:
        x = tf.compat.v1.placeholder(tf.float32, [64, 64])
        x = tf.nn.elu(tf.exp(tf.matmul(x, tf.ones([64, 64]))))
        x = tf.nn.elu(tf.pow(tf.matmul(x, tf.ones([64, 4096])), 2.0))
        tf.identity(tf.matmul(x, tf.ones([4096, 64])), name="made")
    path.write_bytes(built.as_graph_def().SerializeToString())
    config = PrecisionConfig(target_dtype="float16", device="GPU")
    return plan_model(path, config).graphs[0]


def test_all_candidates_are_tried_within_the_budget(graph: TracedGraph) -> None:
    search = find_blockers([graph])
    assert [blocker.change.op for blocker in search.found] == ["Pow", "Exp"]
    assert all(blocker.cast_bytes < 0 for blocker in search.found)
    assert search.not_tried == ()
    assert "not tried" not in blockers_text(search, {})


def test_what_there_is_no_time_for_is_named(graph: TracedGraph) -> None:
    search = find_blockers([graph], budget=0.0)
    assert len(search.found) == 1
    (left,) = [change for change in search.not_tried if change.op in ("Exp", "Pow")]
    assert left.op != search.found[0].change.op
    said = blockers_text(search, {})
    assert f"{len(search.not_tried)} more candidate" in said
    assert left.what in said
    assert "--blockers-budget" in said


@pytest.mark.parametrize("others", ["", "Tanh", "Tanh, Relu"])
def test_what_a_variable_denies_is_taken_out_of_it(graph: TracedGraph, others: str) -> None:
    variable = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DENYLIST_ADD"
    edit = ListEdit(list_name="deny", action="add", op="MatMul", source=variable)
    config = dataclasses.replace(graph.config, list_edits=(edit,))
    denied = dataclasses.replace(graph, config=config, remarks=graph.plan(config))
    (change,) = [b.change for b in find_blockers([denied]).found if b.change.op == "MatMul"]
    want = f"export {variable}={others.replace(' ', '')}" if others else f"unset {variable}"
    assert change.line({variable: f"MatMul,{others}" if others else "MatMul"}) == want
    assert change.applied(config) == graph.config
