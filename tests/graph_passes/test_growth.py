"""The work of the pass grows with the graph, not with its square, and depth is no limit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from graph_text import graph
from tensorflow.core.framework import graph_pb2

from graph_passes import PrecisionConfig, rewrite_graph_def
from graph_passes.policy.cost_table_files import shipped_table

CONFIGS = {
    "bytes": PrecisionConfig(),
    "times": PrecisionConfig(
        target_dtype="bfloat16",
        device="CPU",
        cost_table=shipped_table("cpu-avx512_bf16", "bfloat16"),
    ),
    "parity": PrecisionConfig(parity=True),
}


def chain(size: int, op: str, first: str = "x") -> list[str]:
    return [f"y{i} = {op.format(f'y{i - 1}' if i else first)}" for i in range(size)]


def infer_chain(size: int) -> list[str]:
    return [*chain(size, "Tanh({})", "allow"), f"allow2 = Exp(y{size - 1})"]


def clear_chain(size: int) -> list[str]:
    return [*chain(size, "Reshape({}, [8, 8])", "allow"), f"allow2 = Exp(y{size - 1})"]


def fan_out(size: int) -> list[str]:
    """Infer ops that join late, and are of no use."""
    readers = [f"y{i} = Tanh(copy)\nz{i} = Cumsum(y{i}, 0)" for i in range(size)]
    return ["copy = Identity(allow)", *readers]


def fan_in(size: int) -> list[str]:
    makers = [f"m{i} = MatMul(x, allow)\ny{i} = Identity(m{i})" for i in range(size)]
    return [*makers, f"total = AddN({', '.join(f'y{i}' for i in range(size))})", "e = Exp(total)"]


def fused_readers(size: int) -> list[str]:
    return ["b = Const(0.5, [8])", *(f"y{i} = BiasAdd(allow, b)" for i in range(size))]


def loops(size: int) -> list[str]:
    weight = ["v = VariableV2(shape=[8, 8], dtype=float32)", "read = Identity(v)"]
    return [*weight, *chain(size, "Enter({}, frame_name='f')", "read")]


def unrolled_list(size: int) -> list[str]:
    lines = ["items = EmptyTensorList([8, 8], 4, element_dtype=float32)", "l0 = Identity(items)"]
    for i in range(size):
        lines += [
            f"l{i + 1} = TensorListSetItem(l{i}, 0, allow)",
            f"get{i} = TensorListGetItem(l{i + 1}, 0, [8, 8], element_dtype=float32)",
            f"y{i} = Tanh(get{i})",
        ]
    return lines


def gradient_norm(size: int) -> list[str]:
    makers = [f"m{i} = MatMul(x, allow)\ns{i} = L2Loss(m{i})" for i in range(size)]
    norm = f"norm = AddN({', '.join(f's{i}' for i in range(size))})"
    return [*makers, norm, *(f"y{i} = Mul(m{i}, norm)" for i in range(size))]


SHAPES: dict[str, Callable[[int], list[str]]] = {
    shape.__name__: shape
    for shape in (
        infer_chain,
        clear_chain,
        fan_out,
        fan_in,
        fused_readers,
        loops,
        unrolled_list,
        gradient_norm,
    )
}


def build(shape: str, size: int, *, is_reversed: bool) -> graph_pb2.GraphDef:
    lines = ["x = Const(0.5, [8, 8])", "allow = MatMul(x, x)", *SHAPES[shape](size)]
    built = graph("\n".join(lines))
    nodes = sorted(built.node, key=lambda node: node.op != "Const")
    if is_reversed:
        nodes.reverse()
    return graph_pb2.GraphDef(node=nodes, versions=built.versions)


def lines_executed(graph_def: graph_pb2.GraphDef, config: PrecisionConfig) -> int:
    """How many lines of Python a rewrite executes."""
    executed = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal executed
        executed += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = rewrite_graph_def(graph_def, config)
    finally:
        sys.settrace(before)
    assert result.failure is None
    assert result.changed
    return executed


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_twice_the_graph_is_twice_the_work(shape: str, config: str, is_reversed: bool) -> None:
    small, large = (build(shape, size, is_reversed=is_reversed) for size in (100, 200))
    lines_executed(small, CONFIGS[config])  # what a process does once
    assert lines_executed(large, CONFIGS[config]) < 2.4 * lines_executed(small, CONFIGS[config])


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("shape", ["infer_chain", "clear_chain", "loops"])
def test_depth_is_no_limit(shape: str, config: str, is_reversed: bool) -> None:
    deep = build(shape, 2 * sys.getrecursionlimit(), is_reversed=is_reversed)
    result = rewrite_graph_def(deep, CONFIGS[config])
    assert result.failure is None
    assert result.changed
