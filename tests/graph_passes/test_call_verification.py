"""A call tree read back: faults put into it must be found, all names of tensors understood."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from graph_text import graph
from tensorflow.core.framework import function_pb2, node_def_pb2, types_pb2

from graph_passes.call_graph import Graph, build_call_tree
from graph_passes.call_verification import verify_calls
from graph_passes.verification import VerificationError

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
    tree = build_call_tree(graph_def, library.get, lambda op: op == "MatMul")
    body = tree.calls[0].callees[0]
    body.proto = function_pb2.FunctionDef()
    body.proto.CopyFrom(library["product"])
    region = body if name else tree
    change({node.name: node for node in region.nodes}, region.proto)
    verify_calls(tree, {"product": body.proto}, library.get)


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


def unknown_op(nodes: dict[str, node_def_pb2.NodeDef], _: Graph) -> None:
    nodes["z"].op = "OpOfSomeLibrary"
    nodes["y"].input[:] = ["x", "z:3"]
    nodes["parts"].input[:] = [nodes["parts"].input[0], "x"]
    nodes["parts"].attr["T"].type = types_pb2.DT_FLOAT


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("", reads("z", "parts:1")),
        ("", reads("y", "x:0", "x", "^z", "^parts")),
        ("", unknown_op),
        ("product", gives("sum:product")),
        ("product", gives("sum:0")),
        ("product", reads("low", "a")),
    ],
)
def test_names_and_ops_that_are_legal(name: str, change: Change) -> None:
    verify(name, change)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("", has_dtype("z", "T", types_pb2.DT_FLOAT), "'z' (Relu) does not take the dtype"),
        ("", reads("z", "nothing"), "no node makes the tensor 'nothing'"),
        ("", reads("z", "parts:2"), "no node makes the tensor 'parts:2'"),
        ("", reads("z", "^x"), "'z' (Relu) has 0 inputs, not 1"),
        ("", reads("out", "z"), "'out' (product) does not take the dtype of 'z'"),
        ("", lambda nodes, _: setattr(nodes["z"], "name", "y"), "the same name"),
        ("", reads("call", "z"), "'call' (PartitionedCall) does not take"),
        ("product", has_dtype("low", "DstT", types_pb2.DT_BFLOAT16), "'sum' (MatMul)"),
        ("product", has_dtype("low", "SrcT", types_pb2.DT_BFLOAT16), "'low' (Cast)"),
        ("product", reads("low", "parts:output:2"), "no node makes"),
        ("product", reads("low", "b"), "no node makes the tensor 'b'"),
        ("product", gives("a"), "the result 'result_0' does not take the dtype of 'a'"),
        ("product", gives_nothing, "no node makes the tensor ''"),
        ("product", takes, "'product' takes"),
    ],
)
def test_faults(name: str, change: Change, message: str) -> None:
    with pytest.raises(VerificationError, match=re.escape(message)):
        verify(name, change)


def test_a_call_has_the_dtypes_of_its_function() -> None:
    def change(nodes: dict[str, node_def_pb2.NodeDef], function: Graph) -> None:
        function.ret["result_0"] = "low:y:0"
        nodes["low"].attr["DstT"].type = types_pb2.DT_DOUBLE
        nodes["sum"].attr["T"].type = types_pb2.DT_DOUBLE
        function.signature.output_arg[0].type = types_pb2.DT_DOUBLE

    with pytest.raises(VerificationError, match=r"'call' .* 'product' gives"):
        verify("product", change)
