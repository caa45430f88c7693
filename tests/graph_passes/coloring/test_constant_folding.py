from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from decisions import decisions_of
from graph_diff import added
from graph_text import graph
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.framework import tensor_util

from graph_passes import PrecisionConfig, Reason, rewrite_graph_def

DTYPES = ("float16", "bfloat16")
TEXT = """
x = Placeholder(dtype=float32, shape=[2, 4])
w = Const([[0.1, 1.5, -3.0000001, 1e-3], [0.0, 7.7, 2.0, 3.3], [1, 2, 3, 4], [5, 6, 7, 8]], [4, 4])
same = Const(0.3, [4, 4])
y = MatMul(x, w)
z = MatMul(y, same)
out = Identity(z)
"""


def config(dtype: str, **options: object) -> PrecisionConfig:
    return PrecisionConfig(target_dtype=dtype, device="CPU", **options)


def node(graph_def: graph_pb2.GraphDef, name: str) -> node_def_pb2.NodeDef:
    (found,) = (n for n in graph_def.node if n.name == name)
    return found


def run(graph_def: graph_pb2.GraphDef) -> np.ndarray:
    with tf.Graph().as_default() as g, tf.compat.v1.Session(graph=g) as session:
        tf.import_graph_def(graph_def, name="")
        return session.run("out:0", {"x:0": np.arange(8, dtype=np.float32).reshape(2, 4) / 3})


@pytest.mark.parametrize("dtype", DTYPES)
def test_constants_are_stored_in_the_target_dtype_as_a_cast_would_round_them(dtype: str) -> None:
    before = graph(TEXT)
    result = rewrite_graph_def(before, config(dtype), preserve=("x", "out"))
    casts = rewrite_graph_def(
        before,
        config(dtype, disabled_rules=frozenset(("constant-folding",))),
        preserve=("x", "out"),
    )
    assert [n.input[0] for n in added(before, result.proto)] == ["x", "z"]
    assert [n.input[0] for n in added(before, casts.proto)] == ["x", "w", "same", "z"]
    for name in ("w", "same"):
        old, new = node(before, name), node(result.proto, name)
        assert new.attr["dtype"].type == new.attr["value"].tensor.dtype
        stored = tensor_util.MakeNdarray(new.attr["value"].tensor)
        exact = tensor_util.MakeNdarray(old.attr["value"].tensor)
        np.testing.assert_array_equal(stored, tf.cast(exact, dtype).numpy())
    np.testing.assert_array_equal(run(result.proto), run(casts.proto))
    reasons = {d.node: d.reason for d in decisions_of(result.report) if d.converted}
    assert reasons["w"] is Reason.FOLDED_CONSTANT
    again = rewrite_graph_def(result.proto, config(dtype), preserve=("x", "out"))
    assert again.proto == result.proto


def test_a_tensor_of_equal_values_stores_one_of_them() -> None:
    before = graph(TEXT)
    stored = node(before, "same").attr["value"].tensor
    stored.ClearField("tensor_content")
    stored.float_val.append(0.3)
    result = rewrite_graph_def(before, config("bfloat16"), preserve=("x", "out"))
    tensor = node(result.proto, "same").attr["value"].tensor
    assert tensor_util.MakeNdarray(tensor).tolist() == [[tf.cast(0.3, tf.bfloat16)] * 4] * 4
    assert len(tensor.half_val) == 1
    assert not tensor.float_val


def test_half_the_bytes_of_a_frozen_weight() -> None:
    before = graph("x = Placeholder(dtype=float32, shape=[2, 4])")
    weight = before.node.add(name="w", op="Const")
    weight.attr["dtype"].type = tf.float32.as_datatype_enum
    values = np.linspace(-70000, 70000, 4096, dtype=np.float32).reshape(4, 1024)
    weight.attr["value"].tensor.CopyFrom(tensor_util.make_tensor_proto(values))
    product = before.node.add(name="y", op="MatMul", input=["x", "w"])
    product.attr["T"].type = tf.float32.as_datatype_enum
    result = rewrite_graph_def(before, config("bfloat16"), preserve=("x", "y_out"))
    tensor = node(result.proto, "w").attr["value"].tensor
    assert len(tensor.tensor_content) == 2 * values.size
    np.testing.assert_array_equal(
        tensor_util.MakeNdarray(tensor), tf.cast(values, tf.bfloat16).numpy()
    )


@pytest.mark.parametrize(
    ("extra", "preserve"),
    [("other = Exp(w)", ("x", "out", "other")), ("", ("x", "out", "w"))],
    ids=["read in float32 too", "preserved"],
)
def test_a_constant_that_is_needed_in_float32_stays(extra: str, preserve: tuple[str, ...]) -> None:
    before = graph(TEXT + extra)
    result = rewrite_graph_def(before, config("bfloat16"), preserve=preserve)
    assert node(result.proto, "w") == node(before, "w")
    assert "w" in [n.input[0] for n in added(before, result.proto)]
    assert node(result.proto, "same") != node(before, "same")


def test_a_reader_that_nothing_reads_follows() -> None:
    before = graph(TEXT + "idle = Identity(w)\ndead = Const(0.5, [4])\nstill = Identity(dead)")
    result = rewrite_graph_def(before, config("float16"), preserve=("x", "out"))
    assert {
        node(result.proto, name).attr[attr].type for name, attr in (("w", "dtype"), ("idle", "T"))
    } == {tf.float16.as_datatype_enum}
    assert node(result.proto, "dead") == node(before, "dead")  # which nothing else reads


def test_parity_mode_keeps_constants() -> None:
    before = graph(TEXT)
    result = rewrite_graph_def(before, config("bfloat16", parity=True), preserve=("x", "out"))
    assert node(result.proto, "w") == node(before, "w")
