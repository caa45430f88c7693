"""Functions that reach a plugin without their bodies."""

from __future__ import annotations

from tensorflow.core.framework import graph_pb2, types_pb2

from graph_passes import PrecisionConfig, rewrite_graph_def
from tf_amp.hosts.session_stubs import empty_stubs, fill_stubs


def _graph(*, with_body: bool) -> graph_pb2.GraphDef:
    """x -> MatMul -> function -> fetched; the function has no body unless asked for."""
    graph = graph_pb2.GraphDef()
    x = graph.node.add(name="x", op="Placeholder")
    x.attr["dtype"].type = types_pb2.DT_FLOAT
    product = graph.node.add(name="product", op="MatMul", input=["x", "x"])
    product.attr["T"].type = types_pb2.DT_FLOAT
    graph.node.add(name="called", op="swish", input=["product"])
    function = graph.library.function.add()
    function.signature.name = "swish"
    function.signature.input_arg.add(name="t", type=types_pb2.DT_FLOAT)
    function.signature.output_arg.add(name="result", type=types_pb2.DT_FLOAT)
    if with_body:
        node = function.node_def.add(name="relu", op="Relu", input=["t"])
        node.attr["T"].type = types_pb2.DT_FLOAT
        function.ret["result"] = "relu:activations:0"
    for node in graph.node:
        node.device = "/device:CPU:0"
    return graph


def test_graph_with_bodies_is_the_same_object() -> None:
    graph = _graph(with_body=True)
    filled, stubs = fill_stubs(graph)
    assert filled is graph
    assert not stubs


def test_function_that_returns_its_argument_is_no_stub() -> None:
    graph = _graph(with_body=False)
    graph.library.function[0].ret["result"] = "t"
    assert fill_stubs(graph)[0] is graph


def test_stub_gets_a_body_and_loses_it_again() -> None:
    graph = _graph(with_body=False)
    before = graph.SerializeToString(deterministic=True)
    filled, stubs = fill_stubs(graph)
    assert graph.SerializeToString(deterministic=True) == before
    assert [node.op for node in filled.library.function[0].node_def] == ["Placeholder"]
    assert empty_stubs(filled, stubs).SerializeToString(deterministic=True) == before


def test_graph_around_a_stub_is_rewritten() -> None:
    filled, stubs = fill_stubs(_graph(with_body=False))
    config = PrecisionConfig(
        target_dtype="bfloat16", device="CPU", disabled_rules=frozenset({"cost"})
    )
    result = rewrite_graph_def(filled, config, preserve=["called"])
    assert result.failure is None
    new = empty_stubs(result.proto, stubs)
    assert next(n for n in new.node if n.name == "product").attr["T"].type == types_pb2.DT_BFLOAT16
    assert [len(function.node_def) for function in new.library.function] == [0]
