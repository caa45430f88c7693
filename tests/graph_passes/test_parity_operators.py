"""Parity mode on graphs of a few ops, one for each behaviour of TensorFlow's own pass.

Each graph is checked three ways: against what is written here, against the oracle, and against
the post-conditions.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from graph_diff import added, retyped
from graph_text import graph
from oracle import Oracle
from parity import assert_parity, converted


class Case(NamedTuple):
    """A graph and what becomes of it.

    Attributes:
        text: the graph.
        fetches: the nodes that are fetched.
        low: the nodes to be converted, by target dtype; a dtype left out is checked against the
            oracle alone.
        casts: the Casts to be added.
    """

    text: str
    fetches: str
    low: dict[str, str]
    casts: int


def in_both(names: str) -> dict[str, str]:
    return {"float16": names, "bfloat16": names}


CASES = {
    "no allow op": Case(
        """
        x = Const(1.234, [32])
        deny1 = Exp(x)
        clear1 = Relu(deny1)
        infer1 = Sqrt(clear1)
        clear2 = Relu(infer1)
        out = Identity(clear2)
        """,
        "out",
        in_both(""),
        0,
    ),
    "simple": Case(
        """
        x = Const(0.03125, [32, 32])
        deny1 = Exp(x)
        clear1 = Relu(deny1)
        infer1 = Sqrt(clear1)
        clear2 = Relu(infer1)
        allow1 = MatMul(clear2, clear2)
        clear3 = Relu(allow1)
        infer2 = Log(clear3)
        clear4 = Relu(infer2)
        deny2 = SparseMatMul(clear4, clear4)
        clear5 = Relu(deny2)
        out = Identity(clear5)
        """,
        "out",
        in_both("clear2 allow1 clear3"),
        2,
    ),
    "bidirectional clear chain": Case(
        """
        x = Const(0.03125, [32, 32])
        clear1 = Relu(x)
        clear2 = Relu(x)
        allow1 = MatMul(clear1, clear1)
        clear3 = ShapeN(clear1, clear2)
        clear4 = Relu(clear2)
        out1 = Identity(allow1)
        out2 = Identity(clear4)
        """,
        "out1 out2",
        in_both("clear1 clear2 clear3 clear4 allow1"),
        3,
    ),
    "preserved fetches": Case(
        """
        x = Const(0.03125, [32, 32])
        allow1 = MatMul(x, x)
        clear1 = Relu(allow1)
        infer1 = Sqrt(clear1)
        deny1 = Exp(infer1)
        clear2 = Relu(deny1)
        allow2 = MatMul(clear2, clear2)
        clear3 = Relu(allow2)
        deny2 = Exp(clear3)
        clear4 = Relu(deny2)
        out = Identity(clear4)
        """,
        "allow1 clear2 clear3",
        {"float16": "allow2"},
        2,
    ),
    "node on another device": Case(
        """
        x = Const(0.03125, [32, 32])
        clear1 = Relu(x)
        allow1 = MatMul(clear1, clear1)
        infer1 = Tanh(allow1)
        allow2 = MatMul(infer1, infer1) @ "/job:localhost/replica:0/task:0/device:TPU:0"
        clear2 = Relu(allow2)
        out = Identity(clear2)
        """,
        "out",
        in_both("clear1 allow1 infer1"),
        2,
    ),
    "node of a task, on whatever device": Case(
        """
        x = Const(0.03125, [32, 32])
        allow1 = MatMul(x, x)
        allow2 = MatMul(x, x) @ "/job:localhost/replica:0/task:0"
        out1 = Identity(allow1)
        out2 = Identity(allow2)
        """,
        "out1 out2",
        in_both("allow1"),
        2,
    ),
    "read of a variable": Case(
        """
        x = Const(0.03125, [32, 32])
        var1 = VariableV2(dtype=float32, shape=[32, 32])
        clear1 = Identity(var1)
        allow1 = MatMul(x, clear1)
        x2 = Const(0.03125, [32, 32])
        clear2 = Identity(x2)
        allow2 = MatMul(x, clear2)
        out1 = Identity(allow1)
        out2 = Identity(allow2)
        """,
        "out1 out2",
        in_both("allow1 clear2 allow2"),
        5,
    ),
    "fused batch norm": Case(
        """
        x = Const(0.5, [2, 8, 8, 6])
        w = Const(0.25, [3, 3, 6, 6])
        s = Const(1.5, [6])
        none = Const(0.0, [0])
        allow1 = Conv2D(x, w, strides=[1, 1, 1, 1], padding="SAME")
        bn1 = FusedBatchNorm(allow1, s, s, none, none)
        bng1 = FusedBatchNormGrad(bn1[0], allow1, s, bn1[1], bn1[2])
        infer1 = Add(bn1[0], bng1[0])
        allow2 = Conv2D(infer1, w, strides=[1, 1, 1, 1], padding="SAME")
        out = Identity(allow2)
        """,
        "out",
        in_both("allow1 bn1 bng1 infer1 allow2"),
        3,
    ),
    "type attributes that repeat and lists of them": Case(
        """
        x = Const(0.03125, [32, 32])
        allow1 = MatMul(x, x)
        clear1 = IdentityN(allow1, allow1, allow1)
        infer1 = AddN(clear1[0], clear1[1], clear1[2])
        allow2 = MatMul(infer1, infer1)
        out = Identity(allow2)
        """,
        "out",
        in_both("allow1 clear1 infer1 allow2"),
        2,
    ),
    "entries of a type list apart": Case(
        """
        x = Const(0.03125, [32, 32])
        n = Const(3, [2])
        allow1 = MatMul(x, x)
        deny1 = Exp(x)
        clear1 = IdentityN(allow1, n, deny1)
        allow2 = MatMul(clear1[0], clear1[2])
        out = Identity(allow2)
        """,
        "out",
        in_both("allow1 clear1 allow2"),
        3,
    ),
    "existing cast": Case(
        """
        x = Const(True, [32, 32])
        cast1 = Cast(x, DstT=float32)
        allow1 = MatMul(cast1, cast1)
        out = Identity(allow1)
        """,
        "out",
        in_both("cast1 allow1"),
        1,
    ),
    "loop edge of two colours": Case(
        """
        x = Const(0.03125, [32, 32])
        deny1 = Exp(x)
        enter1 = Enter(deny1, frame_name="loop")
        merge1 = Merge(enter1, next1)
        more = Const(False, after=[merge1])
        go = LoopCond(more)
        switch1 = Switch(merge1, go)
        infer1 = Sqrt(switch1[1])
        allow1 = MatMul(infer1, infer1)
        next1 = NextIteration(allow1)
        exit1 = Exit(switch1[0])
        merge2 = Merge(enter1, next1)
        out = Identity(exit1)
        """,
        "out merge2",
        in_both("allow1"),
        2,
    ),
    "tensor list: set and get": Case(
        """
        x = Const(0.03125, [32, 32])
        shape = Const([32, 32])
        allow1 = MatMul(x, x)
        tl1 = TensorListReserve(shape, 8, element_dtype=float32)
        tl1w1 = TensorListSetItem(tl1, 1, x)
        tl1w2 = TensorListSetItem(tl1w1, 2, allow1)
        tl1rs = TensorListResize(tl1w2, 6)
        tl1r1 = TensorListGetItem(tl1rs, 2, shape, element_dtype=float32)
        infer1 = Mul(tl1r1, tl1r1)
        allow2 = MatMul(allow1, infer1)
        tl1w3 = TensorListSetItem(tl1rs, 3, allow2)
        tl1r2 = TensorListGetItem(tl1w3, 3, shape, element_dtype=float32)
        tl2 = TensorListReserve(shape, 8, element_dtype=float32)
        tl2w1 = TensorListSetItem(tl2, 1, x)
        tl2r1 = TensorListGetItem(tl2w1, 1, shape, element_dtype=float32)
        out1 = Identity(tl1r2)
        out2 = Identity(tl2r1)
        """,
        "out1 out2",
        in_both("allow1 allow2 infer1 tl1 tl1w1 tl1w2 tl1r1 tl1w3 tl1r2"),
        2,
    ),
    "tensor list: push and pop": Case(
        """
        x = Const(0.03125, [32, 32])
        shape = Const([32, 32])
        allow1 = MatMul(x, x)
        tl1 = EmptyTensorList(shape, 8, element_dtype=float32)
        tl1w1 = TensorListPushBack(tl1, x)
        tl1w2 = TensorListPushBack(tl1w1, allow1)
        tl1r1 = TensorListPopBack(tl1w2, shape, element_dtype=float32)
        infer1 = Tanh(tl1r1[1])
        allow2 = MatMul(allow1, infer1)
        tl1w3 = TensorListPushBack(tl1r1[0], allow2)
        tl1r2 = TensorListPopBack(tl1w3, shape, element_dtype=float32)
        tl2 = EmptyTensorList(shape, 8, element_dtype=float32)
        tl2w1 = TensorListPushBack(tl2, x)
        tl2r1 = TensorListPopBack(tl2w1, shape, element_dtype=float32)
        out1 = Identity(tl1r2[1])
        out2 = Identity(tl2r1[1])
        """,
        "out1 out2",
        in_both("allow1 allow2 infer1 tl1 tl1w1 tl1w2 tl1r1 tl1w3 tl1r2"),
        2,
    ),
    "tensor list: from a tensor": Case(
        """
        x = Const(0.03125, [32, 32])
        shape = Const([32])
        allow1 = MatMul(x, x)
        tl1 = TensorListFromTensor(allow1, shape)
        tl1r1 = TensorListStack(tl1, shape, element_dtype=float32)
        infer1 = Tanh(tl1r1)
        allow2 = MatMul(infer1, infer1)
        tl2 = TensorListFromTensor(allow1, shape)
        row = Const(0.03125, [32])
        tl2w1 = TensorListPushBack(tl2, row)
        out1 = Identity(allow2)
        out2 = Identity(tl2w1)
        """,
        "out1 out2",
        in_both("allow1 allow2 infer1 tl1 tl1r1 tl2 tl2w1"),
        3,
    ),
    "tensor list: push a batch, split and concatenate": Case(
        """
        x = Const(0.03125, [32, 32])
        shape = Const([32, 32])
        wide = Const([-1, 32, 32])
        allow1 = MatMul(x, x)
        tl1 = EmptyTensorList(shape, 8, element_dtype=float32)
        tl2 = EmptyTensorList(shape, 8, element_dtype=float32)
        pair = Pack(allow1, allow1)
        handles = Pack(tl1, tl2)
        both = TensorListPushBackBatch(handles, pair)
        parts = Split(0, both, num_split=2)
        scalar = Const([1], [0])
        one = Reshape(parts[0], scalar)
        two = Reshape(parts[1], scalar)
        tl3 = TensorListConcatLists(one, two, element_dtype=float32)
        tl3r1 = TensorListPopBack(tl3, shape, element_dtype=float32)
        infer1 = Tanh(tl3r1[1])
        allow2 = MatMul(infer1, infer1)
        out = Identity(allow2)
        """,
        "out",
        in_both("allow1 pair tl1 tl2 both tl3 tl3r1 infer1 allow2"),
        2,
    ),
    "tensor list through a function": Case(
        """
        def push(items: variant, x: float32):
            shape = Const([32, 32])
            more = TensorListPushBack(items, x)
            last = TensorListPopBack(more, shape, element_dtype=float32)
            return last[0], last[1]

        x = Const(0.03125, [32, 32])
        shape = Const([32, 32])
        allow1 = MatMul(x, x)
        tl1 = EmptyTensorList(shape, 8, element_dtype=float32)
        tl1w1 = TensorListPushBack(tl1, x)
        called = push(tl1w1, x)
        tl1r1 = TensorListPopBack(called[0], shape, element_dtype=float32)
        tl2 = EmptyTensorList(shape, 8, element_dtype=float32)
        tl2w1 = TensorListPushBack(tl2, x)
        tl2w2 = TensorListPushBack(tl2w1, allow1)
        tl2r1 = TensorListPopBack(tl2w2, shape, element_dtype=float32)
        infer1 = Tanh(tl2r1[1])
        allow2 = MatMul(tl1r1[1], infer1)
        out1 = Identity(allow2)
        out2 = Identity(called[1])
        """,
        "out1 out2",
        {"float16": "allow1 allow2 infer1 tl2 tl2w1 tl2w2 tl2r1"},
        3,
    ),
    "batched product": Case(
        """
        x = Const(0.03, [64, 32, 32])
        allow1 = BatchMatMul(x, x)
        out = Identity(allow1)
        """,
        "out",
        in_both("allow1"),
        2,
    ),
    "infer after allow": Case(
        """
        x = Const(0.5, [2, 8, 8, 6])
        w = Const(0.25, [3, 3, 6, 6])
        b = Const(0.5, [6])
        allow1 = Conv2D(x, w, strides=[1, 1, 1, 1], padding="SAME")
        infer1 = BiasAdd(allow1, b)
        clear1 = Relu(infer1)
        out = Identity(clear1)
        """,
        "out",
        in_both("allow1 infer1 clear1"),
        4,
    ),
    "infer after deny": Case(
        """
        x = Const(0.5, [2, 8, 8, 6])
        b = Const(0.5, [6])
        deny1 = Pow(x, x)
        infer1 = BiasAdd(deny1, b)
        clear1 = Relu(infer1)
        out = Identity(clear1)
        """,
        "out",
        in_both(""),
        0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_graph_of_a_few_ops(oracle: Oracle, name: str) -> None:
    case = CASES[name]
    before = graph(case.text)
    after = assert_parity(oracle, before, tuple(case.fetches.split())).proto
    if oracle.mode.target_dtype in case.low:
        assert converted(before, after) == set(case.low[oracle.mode.target_dtype].split())
        assert len(added(before, after)) == case.casts


ACTIVATIONS = """
    Elu Erf Erfc Inv Log Log1p LogSoftmax Reciprocal Sigmoid Softmax Softplus Sqrt Tanh
"""


@pytest.mark.parametrize("op", ACTIVATIONS.split())
def test_activation_between_products(oracle: Oracle, op: str) -> None:
    before = graph(
        f"""
        x = Const(0.5, [8, 8])
        allow1 = MatMul(x, x)
        infer1 = {op}(allow1)
        allow2 = MatMul(infer1, x)
        out = Identity(allow2)
        """
    )
    after = assert_parity(oracle, before, ("out",)).proto
    if oracle.mode.target_dtype == "float16":
        assert converted(before, after) == {"allow1", "infer1", "allow2"}
        assert len(added(before, after)) == 2


def test_statistics_of_batch_norm_stay_float32(oracle: Oracle) -> None:
    before = graph(CASES["fused batch norm"].text)
    after = assert_parity(oracle, before, ("out",)).proto
    ops = {node.name: node.op for node in after.node}
    assert (ops["bn1"], ops["bng1"]) == ("FusedBatchNormV2", "FusedBatchNormGradV2")
    assert {(slot.node, slot.attr) for slot in retyped(before, after)} == {
        (name, "T") for name in ("allow1", "bn1", "bng1", "infer1", "allow2")
    }


@pytest.mark.parametrize("dtype", ["half", "bfloat16"])
def test_graph_in_low_precision_already(oracle: Oracle, dtype: str) -> None:
    before = graph(
        f"""
        x = Const(1.0, [32, 32])
        cast1 = Cast(x, DstT={dtype})
        allow1 = MatMul(cast1, cast1)
        clear1 = Relu(allow1)
        cast2 = Cast(clear1, DstT=float32)
        clear2 = Relu(cast2)
        out = Identity(clear2)
        """
    )
    assert not assert_parity(oracle, before, ("out",)).changed
