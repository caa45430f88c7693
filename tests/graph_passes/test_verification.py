"""Faults put into a rewritten graph: each must be found, and the original must come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from graph_text import graph
from tensorflow.core.framework import graph_pb2, types_pb2

from graph_passes import PrecisionConfig, RewriteResult, rewrite_graph_def, stages
from graph_passes.application import Applied

TEXT = """
x = Const(0.5, [8, 8])
kept = Relu(x)
allow1 = MatMul(kept, x, after=[x])
infer1 = Tanh(allow1)
allow2 = MatMul(infer1, infer1)
out = Identity(allow2)
"""
DOWN = "x-0-CastToFp16-0-AutoMixedPrecision"
UP = "allow2-0-CastToFp32-0-AutoMixedPrecision"

Fault = Callable[[dict, graph_pb2.GraphDef], None]
FAULTS: dict[str, tuple[Fault, str]] = {}


def fault(message: str) -> Callable[[Fault], Fault]:
    """Registers a fault with a part of the message that it must give."""

    def register(inject: Fault) -> Fault:
        FAULTS[inject.__name__] = (inject, message)
        return inject

    return register


@fault("infer1")
def wrong_dtype(nodes: dict, new: graph_pb2.GraphDef) -> None:
    nodes["infer1"].attr["T"].type = types_pb2.DT_FLOAT


@fault("infer1")
def wrong_low_dtype(nodes: dict, new: graph_pb2.GraphDef) -> None:
    nodes["infer1"].attr["T"].type = types_pb2.DT_BFLOAT16


@fault("out")
def cast_left_out(nodes: dict, new: graph_pb2.GraphDef) -> None:
    nodes["out"].input[0] = "allow2"


@fault(UP)
def cast_the_wrong_way(nodes: dict, new: graph_pb2.GraphDef) -> None:
    nodes[UP].attr["SrcT"].type = types_pb2.DT_FLOAT
    nodes[UP].attr["DstT"].type = types_pb2.DT_HALF


@fault(UP)
def cast_that_changes_nothing(nodes: dict, new: graph_pb2.GraphDef) -> None:
    nodes[UP].attr["SrcT"].type = types_pb2.DT_FLOAT


@fault(UP)
def cast_of_another_tensor(nodes: dict, new: graph_pb2.GraphDef) -> None:
    nodes[UP].input[0] = "x"


@fault("Cast")
def cast_of_a_cast(nodes: dict, new: graph_pb2.GraphDef) -> None:
    nodes[UP].input[0] = DOWN


@fault("extra")
def cast_that_nothing_reads(nodes: dict, new: graph_pb2.GraphDef) -> None:
    new.node.add().CopyFrom(nodes[DOWN])
    new.node[-1].name = "extra"


@fault("same name")
def two_nodes_of_one_name(nodes: dict, new: graph_pb2.GraphDef) -> None:
    new.node.add().CopyFrom(nodes[DOWN])


@fault("nobody")
def input_that_nothing_makes(nodes: dict, new: graph_pb2.GraphDef) -> None:
    nodes["infer1"].input[0] = "nobody"


@fault("allow1")
def control_input_lost(nodes: dict, new: graph_pb2.GraphDef) -> None:
    del nodes["allow1"].input[2]


def rewrite_with(
    monkeypatch: pytest.MonkeyPatch, inject: Fault, before: graph_pb2.GraphDef
) -> RewriteResult:
    """A rewrite into which a fault is put just before the verification."""
    apply_plan = stages.apply_plan

    def apply_and_break(*arguments: object) -> Applied:
        applied = apply_plan(*arguments)
        inject({node.name: node for node in applied.proto.node}, applied.proto)
        return applied

    monkeypatch.setattr(stages, "apply_plan", apply_and_break)
    return rewrite_graph_def(before, PrecisionConfig(), preserve=("kept", "out"))


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_and_the_original_comes_back(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    inject, message = FAULTS[name]
    before = graph(TEXT)
    result = rewrite_with(monkeypatch, inject, before)
    assert result.failure is not None, "the fault was not found"
    assert message in result.failure
    assert result.proto is before
    assert not result.changed
    assert result.report.converted_nodes == 0
    assert result.rejected is not None
    assert result.rejected is not before


def test_without_a_fault_the_graph_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    result = rewrite_with(monkeypatch, lambda nodes, new: None, graph(TEXT))
    assert result.changed
    assert (result.failure, result.rejected) == (None, None)


def test_any_internal_error_gives_the_original_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault of the pass")

    monkeypatch.setattr(stages, "make_plan", broken)
    before = graph(TEXT)
    result = rewrite_graph_def(before, PrecisionConfig())
    assert result.proto is before
    assert result.failure == "RuntimeError: a fault of the pass"
