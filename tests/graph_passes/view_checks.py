"""What two views of a graph must have in common."""

from __future__ import annotations

import numpy as np

from graph_passes.ir.graph_view import GraphView


def assert_same(found: GraphView, expected: GraphView) -> None:
    """Two views of the same nodes say the same of them, whatever their node_types' numbers are."""
    assert found.index == expected.index
    for attribute in ("base", "dtypes", "vertex_nodes", "edge_starts", "sources", "targets"):
        np.testing.assert_array_equal(
            getattr(found, attribute), getattr(expected, attribute), err_msg=attribute
        )
    assert found.waits == expected.waits
    assert {device: n for device, n in found.devices.items() if n} == expected.devices
    assert [found.node_type(n).dtypes for n in range(len(found.nodes))] == [
        expected.node_type(n).dtypes for n in range(len(expected.nodes))
    ]
