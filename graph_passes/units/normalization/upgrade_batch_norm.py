"""FusedBatchNorm and its gradient, raised to the version that separates T from U."""

from __future__ import annotations

from collections.abc import Iterable

from tensorflow.core.framework import node_def_pb2, types_pb2

SUCCESSOR = {"FusedBatchNorm": "FusedBatchNormV2", "FusedBatchNormGrad": "FusedBatchNormGradV2"}
"""Ops whose statistics have no dtype of their own, and the ops in which they have."""


def upgrade_batch_norms(nodes: Iterable[node_def_pb2.NodeDef]) -> None:
    """Renames the nodes of such ops in place, with statistics (U) in float32.

    V2 computes the same; only there can T be low precision while scale, offset and statistics
    stay float32.
    """
    for node in nodes:
        if node.op in SUCCESSOR:
            node.op = SUCCESSOR[node.op]
            node.attr["U"].type = types_pb2.DT_FLOAT
