from __future__ import annotations

import numpy as np
from graph_text import graph

from graph_passes.ir.copying import copy_graph
from graph_passes.ir.view import view_body

TEXT = """
def double(a: float32):
    b = AddV2(a, a)
    return b

x = Const(0.5, [4])
y = Relu(x)
z = double(y)
"""


def test_copy_of_a_graph_as_it_is() -> None:
    graph_def = graph(TEXT)
    copy = copy_graph(graph_def, view_body(graph_def))
    assert copy == graph_def
    assert copy is not graph_def


def test_nodes_come_from_an_edited_view_and_the_rest_from_the_graph() -> None:
    graph_def = graph(TEXT)
    view = view_body(graph_def)
    new = graph("x = Const(0.5, [4])\ny = Tanh(x)").node[1]
    nodes = [graph_def.node[0], new, graph_def.node[2]]
    copy = copy_graph(graph_def, view.edited(nodes, np.arange(3, dtype=np.int32), [1], {}))
    assert [node.op for node in copy.node] == ["Const", "Tanh", "double"]
    assert graph_def.node[1].op == "Relu"
    assert (copy.library, copy.versions) == (graph_def.library, graph_def.versions)
    copy.library.function[0].signature.name = "other"
    assert graph_def.library.function[0].signature.name == "double"


def test_value_of_a_constant_is_left_out_where_it_will_be_another() -> None:
    graph_def = graph(TEXT)
    graph_def.node[0].device = "/device:GPU:0"
    copy = copy_graph(graph_def, view_body(graph_def), [0])
    assert "value" not in copy.node[0].attr
    del graph_def.node[0].attr["value"]
    assert copy == graph_def
