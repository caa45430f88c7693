from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from decisions import decisions_of
from graph_text import graph
from parity import converted
from traced_graphs import trace

from graph_passes import ListEdit, PrecisionConfig, list_notes, load_op_lists, rewrite_graph_def

BETWEEN = (
    "x = Const(0.5, [8, 8])\na = MatMul(x, x)\nt = Tanh(a)\nb = MatMul(t, t)\nout = Identity(b)"
)


def edit(list_name: str, action: str, op: str, source: str = "") -> ListEdit:
    return ListEdit(list_name=list_name, action=action, op=op, source=source)


def edited(*edits: ListEdit, **arguments: object) -> PrecisionConfig:
    return PrecisionConfig(list_edits=edits, **arguments)


@pytest.mark.parametrize("parity", [False, True])
@pytest.mark.parametrize(
    ("op", "list_name"),
    [("MatMul", "allow"), ("Tanh", "infer"), ("Relu", "clear"), ("Exp", "deny")],
)
def test_lists_of_well_known_ops(op: str, list_name: str, parity: bool) -> None:
    lists = load_op_lists(PrecisionConfig(parity=parity))
    assert lists.list_of(op) == list_name
    assert op in lists.ops(list_name)
    assert lists.entries[op].reason


def test_op_on_no_list_has_a_reason() -> None:
    lists = load_op_lists(PrecisionConfig())
    assert lists.list_of("While") is None
    assert lists.unlisted["While"]


def test_the_gradient_of_pixels_that_are_copied_often_is_added_up_in_float32() -> None:
    def gradient(x, weights, mixed):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            pooled = tf.nn.conv2d(x, weights, 1, "SAME")  # of a whole image, as DeepLab has it
            spread = tf.image.resize(pooled, (64, 64), "nearest")
            made = tf.nn.conv2d(spread, mixed, 1, "SAME")
        return tape.gradient(made, weights)

    shapes = (2, 1, 1, 8), (1, 1, 8, 8), (3, 3, 8, 8)
    traced = trace(gradient, *map(tf.TensorSpec, shapes))
    config = PrecisionConfig(
        target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("cast-cut",))
    )
    draw = np.random.default_rng(0)
    values = [draw.uniform(0.5, 1, shape).astype(np.float32) for shape in shapes]
    result = traced.rewrite(config)
    assert "Conv2DBackpropInput" in {d.op for d in decisions_of(result.report) if d.converted}
    (expected,), (found,) = (traced.run(g, *values) for g in (traced.graph_def, result.graph_def))
    np.testing.assert_allclose(found, expected, rtol=0.02)


@pytest.mark.parametrize(
    ("edits", "op", "now"),
    [
        ([edit("allow", "add", "Sin")], "Sin", "allow"),
        ([edit("infer", "remove", "Tanh")], "Tanh", None),
        ([edit("deny", "add", "Tanh")], "Tanh", "deny"),
        ([edit("deny", "add", "Tanh"), edit("deny", "remove", "Tanh")], "Tanh", None),
        ([edit("deny", "add", "Tanh"), edit("clear", "add", "Tanh")], "Tanh", "clear"),
        ([edit("allow", "remove", "Tanh")], "Tanh", "infer"),
    ],
)
def test_edits_apply_in_order(edits: list[ListEdit], op: str, now: str | None) -> None:
    assert load_op_lists(edited(*edits)).list_of(op) == now


@pytest.mark.parametrize(("change", "low"), [(None, "a t b"), (edit("deny", "add", "Tanh"), "a b")])
def test_an_edit_changes_what_is_converted(change: ListEdit | None, low: str) -> None:
    before = graph(BETWEEN)
    config = edited(*([change] if change else []))
    after = rewrite_graph_def(before, config, preserve=("out", "x")).proto
    assert converted(before, after) == set(low.split())


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (edit("deny", "add", "Tanh", "DENYLIST_ADD"), "DENYLIST_ADD moved 'Tanh' from the infer"),
        (edit("deny", "remove", "Tanh"), "but it is on the infer list; nothing was changed"),
        (edit("deny", "remove", "While"), "but it is on no list; nothing was changed"),
        (edit("allow", "add", "Matmul", "ALLOWLIST_ADD"), "ALLOWLIST_ADD.*'Matmul'.*'MatMul'"),
        (edit("allow", "add", "MATMUL"), "Did you mean 'MatMul'"),
        (edit("allow", "add", "BatchMatMulV9"), "Did you mean 'BatchMatMulV[23]'"),
    ],
)
def test_surprising_edit_gives_a_note(change: ListEdit, note: str) -> None:
    import re

    (said,) = list_notes(edited(change))
    assert re.search(note, said), said
    report = rewrite_graph_def(graph(BETWEEN), edited(change)).report
    assert report.notes == (said,)


def test_unknown_op_without_a_neighbour_gets_no_suggestion() -> None:
    (note,) = list_notes(edited(edit("allow", "add", "Zzzzzzzzzzzz")))
    assert "custom ops" in note
    assert "Did you mean" not in note


@pytest.mark.parametrize(
    "change", [edit("allow", "add", "MatMul"), edit("infer", "remove", "Tanh")]
)
def test_plain_edit_gives_no_note(change: ListEdit) -> None:
    assert list_notes(edited(change)) == ()


@pytest.mark.parametrize(
    ("level", "low"),
    [("", "a t b"), ("TENSOR_CORES_ONLY", "a b"), ("TREAT_INFER_AS_DENY", "a b")],
)
def test_levels(level: str, low: str) -> None:
    before = graph(BETWEEN)
    after = rewrite_graph_def(before, PrecisionConfig(level=level), preserve=("out", "x")).proto
    assert converted(before, after) == set(low.split())


def test_lists_of_the_levels() -> None:
    cores = load_op_lists(PrecisionConfig(level="TENSOR_CORES_ONLY"))
    assert {entry.list_name for entry in cores.entries.values()} == {"allow"}
    strict = load_op_lists(PrecisionConfig(level="TREAT_INFER_AS_DENY"))
    assert strict.list_of("Tanh") == "deny"
    assert not strict.ops("infer")


def test_forcing_converts_what_no_list_holds_but_no_constant() -> None:
    before = graph("x = Const(0.5, [8, 8])\ns = Sin(x)\ne = Exp(s)\nout = Identity(e)")
    assert not rewrite_graph_def(before, PrecisionConfig()).changed
    after = rewrite_graph_def(
        before, PrecisionConfig(level="UNSAFE_FORCE_ALL"), preserve=("out", "x")
    ).proto
    assert converted(before, after) == {"s", "e"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_indices_of_what_a_product_makes_are_found(dtype: str) -> None:
    x = np.eye(8, dtype=np.float32)
    found = trace(lambda x: tf.where(x @ x @ x), tf.TensorSpec((8, 8)))
    result = found.rewrite(PrecisionConfig(target_dtype=dtype, device="CPU"))
    assert result.report.converted_nodes
    (indices,) = found.run(result.graph_def, x)
    np.testing.assert_array_equal(indices, np.argwhere(x))
