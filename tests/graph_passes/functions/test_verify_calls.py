"""A call tree read back: faults put into it must be found, all names of tensors understood."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from graph_text import graph
from tensorflow.core.framework import function_pb2, node_def_pb2, types_pb2

from graph_passes.emit.verify_units import VerificationError
from graph_passes.functions.call_tree import CallTrees, Graph, Region, node_types_with
from graph_passes.functions.verify_calls import verify_tree
from graph_passes.ir.graph_view import GraphView
from graph_passes.ir.view import view_body
from graph_passes.ops.kernels import kernel_support

HALF = types_pb2.DT_HALF
TEXT = """
def product(a: float32):
    parts = Split(0, a, num_split=2)
    low = Cast(parts[1], DstT=float16)
    sum = MatMul(low, low, transpose_b=True, after=[parts])
    return sum

x = Const(0.5, [8, 8])
y = MatMul(x, x, after=[x])
call = PartitionedCall(y, Tout=[float16], f=product)
parts = Split(0, call, num_split=2)
z = Relu(parts[1], after=[x])
out = product(y)
"""

Change = Callable[[dict[str, node_def_pb2.NodeDef], Graph], None]


def verify(name: str, change: Change) -> None:
    """Verifies the tree of the text, after a change to the graph or function of a name."""
    graph_def = graph(TEXT)
    library = {function.signature.name: function for function in graph_def.library.function}
    node_types = node_types_with(library.get)

    def copy(region: Region) -> Graph:
        new = type(region.proto)()
        new.CopyFrom(region.proto)
        return new

    def view(region: Region) -> GraphView:
        return view_body(region.proto, None, node_types)

    tree = CallTrees(library.get, lambda op: op == "MatMul", graph_def).build(graph_def)
    new = tree.with_bodies(copy)
    region = new.calls[0].callees[0] if name else new
    change({node.name: node for node in region.nodes}, region.proto)
    pairs = zip(tree.walk(), new.walk(), strict=True)
    verify_tree(pairs, view, view, kernel_support("GPU", HALF), ("out",))


def reads(node: str, *tensors: str) -> Change:
    """Gives a node other inputs."""
    return lambda nodes, _: nodes[node].input.__setitem__(slice(None), tensors)


def has_dtype(node: str, attr: str, dtype: int) -> Change:
    """Gives a node another dtype."""
    return lambda nodes, _: setattr(nodes[node].attr[attr], "type", dtype)


def gives(tensor: str) -> Change:
    """Gives the function another result."""
    return lambda _, function: function.ret.update({"result_0": tensor})


def takes(_: object, function: function_pb2.FunctionDef) -> None:
    function.signature.input_arg[0].type = HALF


def gives_nothing(_: object, function: function_pb2.FunctionDef) -> None:
    function.ret.clear()


def adds_a_reader(tensor: str) -> Change:
    """Adds a node that reads a tensor in half precision."""

    def change(_: object, function: function_pb2.FunctionDef) -> None:
        added = function.node_def.add(name="added", op="Relu", input=[tensor])
        added.attr["T"].type = HALF

    return change


def calls_another(nodes: dict[str, node_def_pb2.NodeDef], _: Graph) -> None:
    nodes["call"].attr["f"].func.name = "another"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("", lambda *_: None),
        ("", reads("z", "parts:1", "^x")),
        ("", reads("z", "parts:1", "^x", "^out")),
        ("", reads("out", "y", "^y")),
    ],
)
def test_more_may_be_waited_for(name: str, change: Change) -> None:
    verify(name, change)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "",
            has_dtype("z", "T", types_pb2.DT_FLOAT),
            "'z' takes DT_FLOAT, but 'parts'",
        ),
        ("", reads("z", "nothing", "^x"), "no node makes the tensor 'nothing'"),
        ("", reads("z", "parts:2", "^x"), "'z' reads 'parts:2', not 'parts:1'"),
        ("", reads("z", "^x"), "node 'z' has 0 inputs, not 1"),
        ("", reads("z", "parts", "^x"), "'z' reads 'parts', not 'parts:1'"),
        ("", reads("z", "parts:1"), "node 'z' has lost a control input"),
        ("", reads("z", "parts:1", "^x", "^gone"), "'z' waits for 'gone', not there"),
        ("", reads("out", "z"), "'out' reads 'z', not 'y'"),
        ("", lambda nodes, _: setattr(nodes["z"], "name", "other"), "node 'z' is gone"),
        ("", lambda nodes, _: setattr(nodes["z"], "device", "/CPU:0"), "'z' has another device"),
        ("", reads("call", "x"), "'call' reads 'x', not 'y'"),
        ("", calls_another, "the call 'call' calls 'another'"),
        (
            "product",
            has_dtype("low", "DstT", types_pb2.DT_BFLOAT16),
            "'sum' takes DT_HALF, but 'low'",
        ),
        (
            "product",
            has_dtype("low", "SrcT", types_pb2.DT_BFLOAT16),
            "'low' takes DT_BFLOAT16",
        ),
        (
            "product",
            reads("low", "parts:output:2"),
            "'low' reads 'parts:output:2', not",
        ),
        ("product", reads("low", "b"), "no node makes the tensor 'b'"),
        ("product", adds_a_reader("low:nothing:0"), "no node makes the tensor 'low:nothing:0'"),
        ("product", adds_a_reader("low:y:1"), "no node makes the tensor 'low:y:1'"),
        ("product", adds_a_reader("a"), "'added' does not take the dtype of 'a'"),
        ("product", gives("a"), "'result_0' reads 'a', not 'sum:product:0'"),
        ("product", gives_nothing, "no node makes the tensor ''"),
        ("product", takes, "the dtypes that 'product' takes"),
        (
            "product",
            lambda _, function: setattr(function.signature.input_arg[0], "name", "other"),
            "the signature of 'product' changed",
        ),
    ],
)
def test_faults(name: str, change: Change, message: str) -> None:
    with pytest.raises(VerificationError, match=re.escape(message)):
        verify(name, change)


def test_a_call_has_the_dtypes_of_its_function() -> None:
    def change(nodes: dict[str, node_def_pb2.NodeDef], function: Graph) -> None:
        nodes["low"].attr["DstT"].type = types_pb2.DT_DOUBLE
        nodes["sum"].attr["T"].type = types_pb2.DT_DOUBLE
        function.signature.output_arg[0].type = types_pb2.DT_DOUBLE

    with pytest.raises(VerificationError, match=r"'call' .* 'product' gives"):
        verify("product", change)
