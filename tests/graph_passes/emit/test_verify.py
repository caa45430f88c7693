"""Faults put into a rewritten graph: each must be found, and the original must come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from graph_text import graph
from tensorflow.core.framework import function_pb2, graph_pb2, types_pb2

from graph_passes import (
    PrecisionConfig,
    RewriteResult,
    pipeline,
    rewrite_function_def,
    rewrite_graph_def,
)
from graph_passes.coloring.plan import Plan
from graph_passes.emit.apply import Applied

TEXT = """
x = Const(0.5, [8, 8])
kept = Relu(x)
allow1 = MatMul(kept, x, after=[x])
infer1 = Tanh(allow1)
pair = IdentityN(infer1, allow1)
allow2 = MatMul(infer1, pair[1])
out = Identity(allow2)
other = MatMul(unknown, allow2)
"""
DOWN = "x-0-CastToFp16-0-AutoMixedPrecision"
UP = "allow2-0-CastToFp32-0-AutoMixedPrecision"
UNKNOWN = "unknown-0-CastToFp16-0-AutoMixedPrecision"


def text_with_an_unknown_op() -> graph_pb2.GraphDef:
    graph_def = graph(TEXT)
    graph_def.node.add(name="unknown", op="OpOfSomeLibrary", input=["allow2"])
    return graph_def


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


@fault("no node makes the tensor")
def cast_that_is_missing(nodes: dict, new: graph_pb2.GraphDef) -> None:
    new.node.remove(nodes[UP])


@fault("'pair' has other ports")
def type_more(nodes: dict, new: graph_pb2.GraphDef) -> None:
    nodes["pair"].attr["T"].list.type.append(types_pb2.DT_HALF)


@fault("between DT_FLOAT and DT_HALF")
def cast_for_an_unknown_op_the_wrong_way(nodes: dict, new: graph_pb2.GraphDef) -> None:
    nodes[UNKNOWN].attr["SrcT"].type = types_pb2.DT_HALF
    nodes[UNKNOWN].attr["DstT"].type = types_pb2.DT_FLOAT


def rewrite_with(
    monkeypatch: pytest.MonkeyPatch, inject: Fault, before: graph_pb2.GraphDef
) -> RewriteResult:
    """A rewrite into which a fault is put just before the verification."""
    apply_plan = pipeline.apply_plan

    def apply_and_break(*arguments: object) -> Applied:
        applied = apply_plan(*arguments)
        inject({node.name: node for node in applied.proto.node}, applied.proto)
        return applied

    monkeypatch.setattr(pipeline, "apply_plan", apply_and_break)
    return rewrite_graph_def(before, PrecisionConfig(), preserve=("kept", "out"))


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_and_the_original_comes_back(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    inject, message = FAULTS[name]
    before = text_with_an_unknown_op()
    result = rewrite_with(monkeypatch, inject, before)
    assert result.failure is not None, "the fault was not found"
    assert message in result.failure
    assert result.proto is before
    assert not result.changed
    assert result.report.converted_nodes == 0
    assert result.rejected is not None
    assert result.rejected is not before


def test_without_a_fault_the_graph_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    result = rewrite_with(monkeypatch, lambda nodes, new: None, text_with_an_unknown_op())
    assert result.changed
    assert (result.failure, result.rejected) == (None, None)


FUNCTION = """
def step(a: float32):
    x = Const(0.5, [8, 8])
    allow1 = MatMul(x, a)
    infer1 = Tanh(allow1)
    allow2 = MatMul(infer1, infer1)
    return allow2
"""

FunctionFault = Callable[[function_pb2.FunctionDef], None]


def signature_changed(new: function_pb2.FunctionDef) -> None:
    new.signature.output_arg[0].name = "other"
    new.ret["other"] = new.ret.pop("result_0")


def control_result_added(new: function_pb2.FunctionDef) -> None:
    new.control_ret["done"] = "allow1"


def result_not_cast(new: function_pb2.FunctionDef) -> None:
    new.ret["result_0"] = "allow2:product:0"


def name_of_a_graph(new: function_pb2.FunctionDef) -> None:
    (allow1,) = (node for node in new.node_def if node.name == "allow1")
    allow1.input[1] = allow1.input[1].removesuffix(":y:0")


def wrong_dtype_in_a_function(new: function_pb2.FunctionDef) -> None:
    (infer1,) = (node for node in new.node_def if node.name == "infer1")
    infer1.attr["T"].type = types_pb2.DT_FLOAT


@pytest.mark.parametrize(
    ("inject", "message"),
    [
        (None, None),
        (signature_changed, "the signature of 'step' changed"),
        (control_result_added, "the signature of 'step' changed"),
        (result_not_cast, "'result_0/_Retval' takes DT_FLOAT, but 'allow2' makes DT_HALF"),
        (name_of_a_graph, "'allow1' reads 'a-0-CastToFp16-0-AutoMixedPrecision', not 'a'"),
        (wrong_dtype_in_a_function, "'infer1' takes DT_FLOAT"),
    ],
)
def test_fault_in_a_function_is_found(
    monkeypatch: pytest.MonkeyPatch, inject: FunctionFault | None, message: str | None
) -> None:
    apply_plan = pipeline.apply_plan

    def apply_and_break(*arguments: object) -> Applied:
        applied = apply_plan(*arguments)
        if inject is not None:
            inject(applied.proto)
        return applied

    monkeypatch.setattr(pipeline, "apply_plan", apply_and_break)
    (before,) = graph(FUNCTION).library.function
    result = rewrite_function_def(before, PrecisionConfig())
    assert result.changed == (inject is None)
    assert (result.failure is None) == (message is None)
    if message is not None:
        assert message in result.failure
        assert result.proto is before


def test_what_is_fetched_must_not_be_retyped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "find_ineligible", lambda *_: {})
    result = rewrite_graph_def(text_with_an_unknown_op(), PrecisionConfig(), preserve=("infer1:0",))
    assert "the preserved node 'infer1' was retyped" in result.failure


def test_what_has_no_kernel_must_not_be_retyped(monkeypatch: pytest.MonkeyPatch) -> None:
    apply_plan = pipeline.apply_plan

    def apply_and_change(plan: Plan, *arguments: object) -> Applied:
        applied = apply_plan(plan, *arguments)
        monkeypatch.setattr(type(plan.coloring.support), "supports", lambda *_: False)
        return applied

    monkeypatch.setattr(pipeline, "apply_plan", apply_and_change)
    result = rewrite_graph_def(text_with_an_unknown_op(), PrecisionConfig())
    assert "has no GPU kernel with" in result.failure


def test_any_internal_error_gives_the_original_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault of the pass")

    monkeypatch.setattr(pipeline, "make_plan", broken)
    before = text_with_an_unknown_op()
    result = rewrite_graph_def(before, PrecisionConfig())
    assert result.proto is before
    assert result.failure == "RuntimeError: a fault of the pass"
