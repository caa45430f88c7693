"""Each row of graph_passes/parity_differences.md, shown on a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from graph_checks import assert_calls_agree, check, has_kernel
from graph_diff import added, retyped
from graph_text import graph
from oracle import Oracle, OracleError, meta_graph
from parity import converted, parity_config
from tensorflow.core.framework import graph_pb2

import graph_passes
from graph_passes import ListEdit, PrecisionConfig, rewrite_graph_def

TABLE = Path(graph_passes.__file__).parent / "parity_differences.md"
PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"

SHOWN: set[str] = set()
"""Rows that a test of this module shows."""


def shows(row: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a test as the one that shows a row of the table."""
    SHOWN.add(row)
    return lambda test: test


@pytest.fixture
def edited_oracle(start_oracle: Callable[[str], Oracle]) -> Iterator[Callable[..., Oracle]]:
    """Starts an oracle with more variables in its environment."""
    started = []

    def start(dtype: str, **variables: str) -> Oracle:
        mode = start_oracle(dtype).mode
        env = tuple((PREFIX + name, value) for name, value in variables.items())
        started.append(Oracle(dataclasses.replace(mode, env=mode.env + env)))
        return started[-1]

    yield start
    for oracle in started:
        oracle.close()


def both(
    oracle: Oracle, text: str, *fetches: str, **config: object
) -> tuple[graph_pb2.GraphDef, graph_pb2.GraphDef, graph_pb2.GraphDef]:
    """A graph, what parity mode makes of it, and what the oracle does."""
    before = graph(text)
    chosen = dataclasses.replace(parity_config(oracle), **config)
    result = rewrite_graph_def(before, chosen, preserve=fetches)
    assert result.failure is None
    check(before, result.proto, device=oracle.mode.device, preserve=fetches)
    return before, result.proto, oracle.rewrite(meta_graph(before, fetches))


def test_table_and_tests_name_the_same_differences() -> None:
    rows = [line.split("|")[1].strip() for line in TABLE.read_text().splitlines() if "|" in line]
    assert sorted(rows[2:]) == sorted(SHOWN)


@shows("operands of loops")
def test_operands_of_loops(start_oracle: Callable[[str], Oracle]) -> None:
    oracle = start_oracle("bfloat16")
    text = """
    def go_on(i: int32, x: float32):
        go = Less(i, 3)
        return go

    def turn(i: int32, x: float32):
        more = AddV2(i, 1)
        y = Relu(x)
        return more, y

    x = Const(0.5, [8, 8])
    allow1 = MatMul(x, x)
    loop = While(0, allow1, cond=go_on, body=turn)
    allow2 = MatMul(loop[1], loop[1])
    out = Identity(allow2)
    """
    before = graph(text)
    with pytest.raises(OracleError):  # TensorFlow itself refuses what its pass made
        oracle.rewrite(meta_graph(before, ["out"]))
    result = rewrite_graph_def(before, parity_config(oracle), preserve=("out",))
    assert converted(before, result.proto) == {"allow1", "allow2"}
    assert_calls_agree(result.proto)


@shows("preserved Cast")
def test_preserved_cast(oracle: Oracle) -> None:
    text = """
    x = Const(True, [8, 8])
    cast1 = Cast(x, DstT=float32)
    allow1 = MatMul(cast1, cast1)
    out = Identity(allow1)
    """
    before, ours, theirs = both(oracle, text, "cast1", "out")
    assert converted(before, ours) == {"allow1"}
    assert converted(before, theirs) == {"cast1", "allow1"}


@shows("control output of a function")
def test_control_output_of_a_function(oracle: Oracle) -> None:
    text = """
    def call(a: float32):
        read = Identity(a)
        allow1 = MatMul(read, read)
        y = Identity(allow1)
        return y

    x = Const(0.5, [8, 8])
    called = call(x)
    out = Identity(called)
    """
    before = graph(text)
    (function,) = before.library.function
    function.control_ret["read"] = "read"
    function.signature.control_output.append("read")
    result = rewrite_graph_def(before, parity_config(oracle), preserve=("out",))
    theirs = oracle.rewrite(meta_graph(before, ("out",)))
    ours, other = ({s.node for s in retyped(before, g)} for g in (result.proto, theirs))
    assert ours - other == {"read"}


@shows("Cast on another device")
def test_cast_on_another_device(oracle: Oracle) -> None:
    text = """
    x = Const(True, [8, 8])
    cast1 = Cast(x, DstT=float32) @ "/device:TPU:0"
    allow1 = MatMul(cast1, cast1)
    out = Identity(allow1)
    """
    before, ours, theirs = both(oracle, text, "out")
    assert converted(before, ours) == {"allow1"}
    assert converted(before, theirs) == {"cast1", "allow1"}


@shows("allow op without a kernel")
def test_allow_op_without_a_kernel(edited_oracle: Callable[..., Oracle]) -> None:
    text = """
    x = Const(0.5, [8, 8])
    allow1 = Erfinv(x)
    out = Identity(allow1)
    """
    edit = ListEdit(list_name="allow", action="add", op="Erfinv")
    oracle = edited_oracle("float16", ALLOWLIST_ADD="Erfinv")
    before, ours, theirs = both(oracle, text, "out", list_edits=(edit,))
    assert converted(before, ours) == set()
    assert converted(before, theirs) == {"allow1"}
    (made,) = [node for node in theirs.node if node.name == "allow1"]
    assert not has_kernel(made, "GPU")


@shows("op on two lists")
def test_op_on_two_lists(edited_oracle: Callable[..., Oracle]) -> None:
    text = """
    x = Const(0.5, [8, 8])
    allow1 = MatMul(x, x)
    deny1 = Tanh(allow1)
    out = Identity(deny1)
    """
    edit = ListEdit(list_name="deny", action="add", op="Tanh", source="DENYLIST_ADD")
    oracle = edited_oracle("float16", DENYLIST_ADD="Tanh")
    before, ours, theirs = both(oracle, text, "out", list_edits=(edit,))
    assert converted(before, ours) == {"allow1"}
    assert not retyped(before, theirs)
    (note,) = graph_passes.list_notes(PrecisionConfig(parity=True, list_edits=(edit,)))
    assert "DENYLIST_ADD moved 'Tanh' from the infer list to the deny list" in note


@shows("TENSOR_CORES_ONLY in bfloat16")
def test_tensor_cores_only_in_bfloat16(edited_oracle: Callable[..., Oracle]) -> None:
    text = """
    x = Const(0.5, [8, 8])
    allow1 = MatMul(x, x)
    infer1 = Tanh(allow1)
    allow2 = MatMul(infer1, infer1)
    out = Identity(allow2)
    """
    oracle = edited_oracle("bfloat16", LEVEL="TENSOR_CORES_ONLY")
    before, ours, theirs = both(oracle, text, "out", level="TENSOR_CORES_ONLY")
    assert converted(before, ours) == {"allow1", "allow2"}
    assert converted(before, theirs) == {"allow1", "infer1", "allow2"}


@shows("FusedBatchNorm with nothing to convert")
def test_fused_batch_norm_with_nothing_to_convert(oracle: Oracle) -> None:
    text = """
    x = Const(0.5, [2, 4, 4, 2])
    scale = Const(0.5, [2])
    none = Const(0.0, [0])
    norm = FusedBatchNorm(x, scale, scale, none, none)
    out = Identity(norm[0])
    """
    before, ours, theirs = both(oracle, text, "out")
    assert ours == before
    assert "FusedBatchNormV2" in {node.op for node in theirs.node}
    assert not added(before, theirs)


@shows("unknown op")
def test_unknown_op(oracle: Oracle) -> None:
    before = graph("x = Const(0.5, [8, 8])\nallow1 = MatMul(x, x)\nout = Identity(allow1)")
    custom = before.node.add(name="custom", op="OpOfSomeLibrary", input=["allow1"])
    custom.attr["T"].type = before.node[0].attr["dtype"].type
    assert not retyped(before, oracle.rewrite(meta_graph(before, ["out"])))
    result = rewrite_graph_def(before, parity_config(oracle), preserve=("out",))
    assert result.failure is None
    nodes = {node.name: node for node in result.proto.node}
    assert nodes["custom"].input == nodes["out"].input  # the Cast back to float32
    assert nodes["custom"].input[0] in {node.name for node in added(before, result.proto)}
