from __future__ import annotations

import random

import numpy as np
import pytest
from graph_text import graph
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import RandomGraph, random_graphs
from tensorflow.core.framework import graph_pb2, node_def_pb2
from view_checks import assert_same

from graph_passes.ir import indexing
from graph_passes.ir.indexing import InvalidGraphError, NodeIndex
from graph_passes.ir.view import view_body
from graph_passes.ops.node_types import NodeTypeTable


def index_of(graph_def: graph_pb2.GraphDef) -> NodeIndex:
    index = NodeIndex(NodeTypeTable({}.get))
    index.extend(graph_def.node)
    return index


def test_what_nodes_read() -> None:
    index = index_of(
        graph(
            "x = Const(0.5, [4])\nparts = Split(0, x, num_split=2)\ny = AddV2(parts[1], parts[0])"
        )
    )
    split, total = index.numbers["parts"], index.numbers["y"]
    first, end = index.starts[total], index.starts[total + 1]
    other, whole = index.makers[first:end]
    assert whole == split
    assert list(index.references)[~other] == "parts:1"
    assert index.split("parts:1") == ("parts", 1)
    assert index.name(total) == "y"
    assert index.node_type(total).op == "AddV2"


@pytest.mark.parametrize(("chunk", "references"), [(1, ["y", "x"]), (2, ["x"]), (3, [])])
def test_nodes_that_are_read_before_they_are_met(
    monkeypatch: pytest.MonkeyPatch, chunk: int, references: list[str]
) -> None:
    monkeypatch.setattr(indexing, "_CHUNK", chunk)
    graph_def = graph("x = Const(0.5, [4])\ny = Relu(x)\nz = Tanh(y)")
    backwards = graph_pb2.GraphDef(node=reversed(graph_def.node))
    view = view_body(backwards)
    assert [view.node_of(v).name for v in view.producers(view.index["z"])] == ["y"]
    assert list(index_of(backwards).references) == references


def test_first_outputs_within_functions_are_found_by_name() -> None:
    nodes = graph("x = Const(0.5, [4])\nparts = Split(0, x, num_split=2)").node
    for tensor in ("x:output:0", "parts:output:1"):
        nodes.add(name=f"reader{len(nodes)}", op="Identity", input=[tensor])
    index = NodeIndex(NodeTypeTable({}.get), named_outputs=True)
    index.extend(nodes)
    assert index.makers[-2] == index.numbers["x"]
    assert list(index.references) == ["parts:output:1"]


def test_devices_and_control_inputs_are_kept_apart() -> None:
    graph_def = graph(
        """
        x = Const(0.5, [4]) @ '/device:CPU:0'
        y = Relu(x)
        z = Tanh(y, after=[x]) @ '/device:CPU:0'
        """
    )
    view = view_body(graph_def)
    assert view.devices == {"/device:CPU:0": [0, 2]}
    assert view.awaited == {"x"}
    assert view.waits == {2: ["x"]}


@given(random_graphs(), st.integers(0, 1000))
def test_an_edited_view_is_that_of_the_edited_graph(made: RandomGraph, seed: int) -> None:
    """Some nodes that nothing reads go, some read another tensor of their dtype, some are new."""
    graph_def, chance = made.graph_def, random.Random(seed)
    view = view_body(graph_def)
    read = {view.split(name.lstrip("^"))[0] for node in graph_def.node for name in node.input}
    alive = [node.name in read or chance.random() < 0.5 for node in graph_def.node]
    changed = {}
    for number, node in enumerate(graph_def.node):
        if alive[number] and node.op == "Relu" and chance.random() < 0.5:
            changed[number] = node_def_pb2.NodeDef()
            changed[number].CopyFrom(node)
            changed[number].op = "Tanh"
    nodes = [changed.get(n, node) for n, node in enumerate(graph_def.node) if alive[n]]
    nodes.append(graph("new = Const(0.5, [2])").node[0])
    nodes.append(graph("new = Const(0.5, [2])\nlast = Relu(new, after=[new])").node[1])
    moved = np.where(alive, np.cumsum(alive) - 1, -1).astype(np.int32)
    anew = sorted({*(int(moved[n]) for n in changed), len(nodes) - 2, len(nodes) - 1})
    expected = graph_pb2.GraphDef(node=nodes)
    assert_same(view.edited(nodes, moved, anew, {}), view_body(expected))


def test_an_edit_must_not_leave_a_reader_without_its_tensor() -> None:
    graph_def = graph("x = Const(0.5, [4])\ny = Relu(x)\nz = Tanh(y)")
    view = view_body(graph_def)
    kept = [graph_def.node[0], graph_def.node[2]]
    with pytest.raises(InvalidGraphError, match="one that is gone"):
        view.edited(kept, np.array([0, -1, 1], np.int32), [], {})
    graph_def.node[1].name = "x"
    with pytest.raises(InvalidGraphError, match="the same name"):
        view.edited(list(graph_def.node), np.array([0, 1, 2], np.int32), [1], {})
