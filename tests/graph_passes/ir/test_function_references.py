"""Which functions a graph calls."""

from __future__ import annotations

import itertools

import pytest
from graph_text import graph
from tensorflow.core.framework import node_def_pb2

from graph_passes.ir.function_references import FunctionReferences, called_functions

TEXT = """
def inner(a: float32):
    b = Relu(a)
    return b

def outer(a: float32):
    b = inner(a)
    return b

def other(a: float32):
    b = Tanh(a)
    return b

x = Const(0.5, [4])
"""


@pytest.mark.parametrize(
    ("op", "attrs", "reachable"),
    [
        ("Relu", {}, set()),
        ("inner", {}, {"inner"}),
        ("outer", {}, {"inner", "outer"}),
        ("PartitionedCall", {"f": "other"}, {"other"}),
        ("OpOfAnotherLibrary", {"run": "outer"}, {"inner", "outer"}),
    ],
)
def test_functions_that_a_graph_may_call(
    op: str, attrs: dict[str, str], reachable: set[str]
) -> None:
    graph_def = graph(TEXT)
    node = graph_def.node.add(name="y", op=op, input=["x"])
    for attr, function in attrs.items():
        node.attr[attr].func.name = function
    references = FunctionReferences(graph_def)
    assert references.reachable() == reachable
    assert references.called([node]) == {op, *attrs.values()} & reachable


@pytest.mark.parametrize(
    ("op", "marked", "pipeline"),
    [
        ("MapDataset", "", {"inner", "outer"}),
        ("OneShotIterator", "", {"inner", "outer"}),
        ("PartitionedCall", "", set()),
        ("PartitionedCall", "other", {"other"}),
        ("ReduceDataset", "other", {"inner", "outer", "other"}),
    ],
)
def test_functions_that_run_in_a_pipeline(op: str, marked: str, pipeline: set[str]) -> None:
    """Those that its ops name or that tracing has marked, and what they call."""
    graph_def = graph(TEXT)
    graph_def.node.add(name="y", op=op, input=["x"]).attr["f"].func.name = "outer"
    for function in graph_def.library.function:
        if function.signature.name == marked:
            function.attr["_tf_data_function"].b = True
    assert FunctionReferences(graph_def).of_pipelines() == pipeline


@pytest.mark.parametrize(
    ("of_program", "also", "pipeline"),
    [
        (True, "Relu", set()),
        (True, "MapDataset", {"inner", "outer"}),
        (False, "Relu", {"inner", "outer"}),
    ],
)
def test_a_loop_over_a_dataset_is_no_pipeline(
    of_program: bool, also: str, pipeline: set[str]
) -> None:
    graph_def = graph(TEXT)
    loop = graph_def.node.add(name="y", op="ScanDataset", input=["x"])
    loop.attr["f"].func.name = "outer"
    loop.attr["use_default_device"].b = not of_program
    graph_def.node.add(name="z", op=also, input=["x"]).attr["f"].func.name = "outer"
    graph_def.library.function[1].attr["_tf_data_function"].b = True
    assert FunctionReferences(graph_def).of_pipelines() == pipeline


@pytest.mark.parametrize("order", [*itertools.permutations(("body", "cond", "f"))])
def test_functions_that_a_node_calls_come_in_one_order(order: tuple[str, ...]) -> None:
    node = node_def_pb2.NodeDef(op="While")
    for name in order:
        node.attr[name].func.name = f"the {name}"
    assert list(called_functions(node)) == ["While", "the body", "the cond", "the f"]
