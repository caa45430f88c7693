from __future__ import annotations

from graph_text import graph
from tensorflow.core.framework import types_pb2

from graph_passes.ops.node_types import NodeTypeTable

FLOAT, INT32, HALF = types_pb2.DT_FLOAT, types_pb2.DT_INT32, types_pb2.DT_HALF


def test_nodes_that_differ_in_a_dtype_or_in_their_ports_are_of_different_kinds() -> None:
    nodes = graph(
        """
        x = Const(0.5, [4, 4])
        a = Relu(x)
        b = Relu(a)
        half = Cast(x, DstT=float16)
        c = Relu(half)
        two = AddN(x, a)
        three = AddN(x, a, b)
        """
    ).node
    table = NodeTypeTable({}.get)
    node_types = {
        node.name: kind for node, kind in zip(nodes, table.node_types_of(nodes), strict=True)
    }
    assert node_types["a"] is node_types["b"]
    assert node_types["a"] is not node_types["c"]
    assert (node_types["a"].dtypes, node_types["c"].dtypes) == ((FLOAT,), (HALF,))
    assert node_types["half"].dtypes == (FLOAT, HALF)
    assert [len(node_types[name].layout.in_slots) for name in ("two", "three")] == [2, 3]
    assert table.node_types == list(dict.fromkeys(node_types.values()))


def test_an_attr_that_is_left_out_has_its_default() -> None:
    nodes = graph("x = Const(0.5, [4])\nn = Shape(x)\nm = Shape(x, out_type=int64)").node
    table = NodeTypeTable({}.get)
    del nodes[1].attr["out_type"]
    dtypes = [kind.dtypes for kind in table.node_types_of(nodes[1:])]
    assert dtypes == [(FLOAT, INT32), (FLOAT, types_pb2.DT_INT64)]


def test_lists_of_dtypes_are_part_of_the_kind() -> None:
    nodes = graph(
        "x = Const(0.5, [4])\nn = Const(1, [4])\na = IdentityN(x, n)\nb = IdentityN(n, x)"
    ).node
    table = NodeTypeTable({}.get)
    node_types = table.node_types_of(nodes[2:])
    assert [kind.dtypes for kind in node_types] == [(FLOAT, INT32), (INT32, FLOAT)]
    assert [str(slot) for slot in node_types[0].layout.slots] == ["T[0]", "T[1]"]


def test_functions_come_before_registered_ops_and_unknown_ops_have_no_ports() -> None:
    graph_def = graph(
        """
        def Relu(a: float32, b: int32):
            return a

        x = Const(0.5, [4])
        n = Const(1, [4])
        y = Relu(x, n)
        """
    )
    node = graph_def.node[-1]
    signature = graph_def.library.function[0].signature
    (call,) = NodeTypeTable({"Relu": signature}.get).node_types_of([node])
    assert call.dtypes == (FLOAT, INT32)
    assert call.is_call
    node.op = "OpOfSomeLibrary"
    (unknown,) = NodeTypeTable({}.get).node_types_of([node])
    assert (unknown.op_type, unknown.dtypes, unknown.layout.in_slots) == (None, (), ())
    assert not unknown.is_call
    assert not unknown.is_inlined_call
