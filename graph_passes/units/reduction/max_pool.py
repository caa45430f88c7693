"""Poolings whose gradient has no kernel in the target dtype.

MaxPool3DGrad has two dtypes, and no kernel where one alone is lower. On a CPU TensorFlow makes a
MaxPool3D and its gradient kernels of oneDNN if the one reads what the other makes as it is; with a
Cast between, the gradient runs by a kernel that takes 25 times as long: 36 ms in place of 1.4 for
4 x 32 x 32 x 32 x 16 in float32, casts included (two cores).
"""

from __future__ import annotations

from graph_passes.policy.op_lists import FLOAT32
from graph_passes.units.unit_pass import UnitSearch

RULE = "max-pool"
OPS = ("MaxPool3DGrad",)
_MADE = 1
"""The input of the gradient that is what the pooling has made."""


def keep_with_gradients(search: UnitSearch) -> None:
    """Keeps a MaxPool3D float32 whose gradient stays so."""
    if not search.has_cpu_kernels:
        return
    view, m = search.edits.view, search.edits.matcher
    kept: dict[int, None] = {}
    for number in view.of_op(*OPS):
        node_type = view.node_type(number)
        slots = range(len(node_type.layout.slots))
        if not all(search.support.supports(node_type, slot) for slot in slots):
            kept[m.source(number, _MADE)] = None
    for number in kept:
        search.list_nodes(RULE, number, [view.names[number]], FLOAT32)
