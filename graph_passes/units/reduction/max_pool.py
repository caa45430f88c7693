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


def keep_with_gradients(search: UnitSearch) -> None:
    """Keeps a MaxPool3D float32 that has a gradient."""
    if not search.has_cpu_kernels:
        return
    view, m = search.edits.view, search.edits.matcher
    for number in dict.fromkeys(m.source(number, 1) for number in view.of_op(*OPS)):
        if m.op(number) == "MaxPool3D":  # whose result the gradient reads
            search.list_nodes(RULE, number, [view.names[number]], FLOAT32)
