"""Max poolings and their gradients, which have one dtype.

On a CPU TensorFlow makes a pooling and its gradient kernels of oneDNN if the one reads what the
other makes as it is. With a Cast between, the gradient runs by a kernel that takes up to 25 times
as long (two cores): 20 ms in place of 2.5 for 32 x 64 x 64 x 32 pixels, 36 in place of 1.4 for
4 x 32 x 32 x 32 x 16 voxels. MaxPool3DGrad has two dtypes, and on no device a kernel where they
differ.
"""

from __future__ import annotations

from graph_passes.coloring.state import Coloring
from graph_passes.ops.reasons import Reason

_POOLING_OF = {"MaxPoolGrad": "MaxPool", "MaxPool3DGrad": "MaxPool3D"}


def match_poolings(coloring: Coloring) -> None:
    """Gives each pooling and its gradients one colour, ALLOW only where all have it."""
    view, config = coloring.view, coloring.config
    has_cpu_kernels = config.device == "CPU" and not config.fused
    groups: dict[int, list[int]] = {}
    for number in view.of_op(*_POOLING_OF):
        gradient = coloring.float_vertices(number)
        if not gradient:
            continue
        pooled = view.producers(number)[1]
        is_pair = has_cpu_kernels and view.op_of(pooled) == _POOLING_OF[view.op_names[number]]
        first = pooled if is_pair else gradient[0]
        groups.setdefault(first, [first]).extend(gradient)
    for group in groups.values():
        if all(coloring.low[vertex] for vertex in group):
            coloring.clusters.append(group)
        else:
            coloring.erase(group, Reason.POOLING)
