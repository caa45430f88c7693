from __future__ import annotations

import pytest
from graph_text import graph
from tensorflow.core.framework import types_pb2

from graph_passes.ops.op_types import OpType, Slot, registered_op_type

FLOAT, INT32, HALF = types_pb2.DT_FLOAT, types_pb2.DT_INT32, types_pb2.DT_HALF
NODES = """
x = Const(0.5, [4, 4])
n = Const(1, [4])
matmul = MatMul(x, x)
shape = Shape(x)
gather = GatherV2(x, n, 0)
many = IdentityN(x, n, x)
parts = Split(0, x, num_split=2)
sum = AddN(x, x, x)
cast = Cast(n, DstT=float32)
items = EmptyTensorList([4], 8, element_dtype=float32)
"""


def op_type(name: str) -> OpType:
    found = registered_op_type(name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("x", [], ["dtype"]),
        ("matmul", ["T", "T"], ["T"]),
        ("shape", ["T"], ["out_type"]),
        ("gather", ["Tparams", "Tindices", "Taxis"], ["Tparams"]),
        ("many", ["T[0]", "T[1]", "T[2]"], ["T[0]", "T[1]", "T[2]"]),
        ("parts", ["DT_INT32", "T"], ["T", "T"]),
        ("sum", ["T", "T", "T"], ["T"]),
        ("cast", ["SrcT"], ["DstT"]),
        ("items", ["shape_type", "DT_INT32"], ["DT_VARIANT"]),
    ],
)
def test_slots_of_the_ports(name: str, inputs: list[str], outputs: list[str]) -> None:
    (node,) = [node for node in graph(NODES).node if node.name == name]
    layout = op_type(node.op).layout_of(node)
    assert [str(layout.slots[slot]) for slot in layout.in_slots] == inputs
    assert [str(layout.slots[slot]) for slot in layout.out_slots] == outputs


def test_attribute_without_a_port_is_a_slot() -> None:
    (node,) = [node for node in graph(NODES).node if node.name == "items"]
    assert Slot("element_dtype") in op_type(node.op).layout_of(node).slots


def test_dtypes_of_slots() -> None:
    (node,) = [node for node in graph(NODES).node if node.name == "many"]
    identity = op_type("IdentityN")
    assert [identity.dtype_of(node, Slot("T", i)) for i in range(3)] == [FLOAT, INT32, FLOAT]
    assert identity.dtype_of(node, Slot("", fixed=INT32)) == INT32


def test_attribute_left_out_has_its_default() -> None:
    (node,) = [node for node in graph(NODES).node if node.name == "shape"]
    del node.attr["out_type"]
    assert op_type("Shape").dtype_of(node, Slot("out_type")) == INT32
    assert "out_type" not in node.attr


@pytest.mark.parametrize(
    ("op", "slot", "dtype", "legal"),
    [
        ("MatMul", Slot("T"), HALF, True),
        ("Cholesky", Slot("T"), types_pb2.DT_BFLOAT16, False),
        ("Identity", Slot("T"), types_pb2.DT_STRING, True),
        ("Split", Slot("", fixed=INT32), HALF, False),
    ],
)
def test_dtypes_that_an_op_definition_admits(op: str, slot: Slot, dtype: int, legal: bool) -> None:
    assert op_type(op).allows(slot, dtype) == legal


def test_ops_that_run_functions() -> None:
    assert op_type("While").runs_functions
    assert op_type("Case").runs_functions
    assert not op_type("MatMul").runs_functions


def test_unknown_op() -> None:
    assert registered_op_type("OpOfSomeLibrary") is None
