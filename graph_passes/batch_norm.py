"""FusedBatchNorm and its gradient, raised to the version that separates T from U."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tensorflow.core.framework import node_def_pb2, types_pb2

_SUCCESSOR = {
    "FusedBatchNorm": "FusedBatchNormV2",
    "FusedBatchNormGrad": "FusedBatchNormGradV2",
}


def find_old_batch_norms(nodes: Iterable[node_def_pb2.NodeDef]) -> list[int]:
    """Positions of the nodes whose statistics have no dtype of their own."""
    return [position for position, node in enumerate(nodes) if node.op in _SUCCESSOR]


def raise_batch_norms(nodes: Sequence[node_def_pb2.NodeDef], positions: Iterable[int]) -> None:
    """Renames nodes in place to the V2 ops, with statistics (U) in float32.

    V2 computes the same; only there can T be low precision while scale, offset and statistics
    stay float32.
    """
    for position in positions:
        node = nodes[position]
        node.op = _SUCCESSOR[node.op]
        node.attr["U"].type = types_pb2.DT_FLOAT
