"""Constants that float16 cannot hold.

A mask of -1e9 becomes -inf in float16, and an epsilon of 1e-8 becomes 0. Ops that read such a
constant stay float32, and so does what they compute, as if they were on the deny list. bfloat16
has float32's range and needs no such rule.
"""

from __future__ import annotations

import numpy as np

from graph_passes.coloring.state import Coloring
from graph_passes.ir.view import FLOAT
from graph_passes.ops.float_range import is_out_of_range
from graph_passes.ops.node_types import NodeType
from graph_passes.ops.reasons import Reason


def _is_float_constant(node_type: NodeType) -> bool:
    return node_type.op == "Const" and node_type.dtypes == (FLOAT,)


def deny_out_of_range(coloring: Coloring) -> None:
    """Denies the readers of constants out of range, from which the colour then flows forward."""
    view = coloring.view
    could_go_low = (coloring.list_codes > 0) & coloring.eligible
    matters = np.zeros(len(view.dtypes), bool)
    matters[view.sources[could_go_low[view.targets]]] = True
    roots: list[int] = []
    for number in view.of_node_type(_is_float_constant):
        made = view.base[number]
        if not matters[made]:
            continue
        value = view.nodes[number].attr.get("value")  # [] would write to a map that lacks it
        if value is not None and is_out_of_range(value.tensor):
            roots.extend(reader for reader in view.readers(made) if could_go_low[reader])
    coloring.deny(roots, Reason.CONSTANT_RANGE)
    coloring.out_of_range = roots
