"""Which nodes may be converted at all."""

from __future__ import annotations

from collections.abc import Collection

from graph_passes.config import PrecisionConfig
from graph_passes.reasons import Reason
from graph_passes.view import GraphView

_BOUNDARY_OPS = frozenset(("_Arg", "_Retval"))


def node_name(reference: str) -> str:
    """The node that `name`, `name:0` or `^name` refers to."""
    return reference.lstrip("^").partition(":")[0]


def find_ineligible(
    view: GraphView, preserve: Collection[str], config: PrecisionConfig
) -> dict[int, Reason]:
    """The nodes that must stay as they are, each with the reason.

    Args:
        view: the graph.
        preserve: names of nodes (or tensors) that are fed, fetched or kept for another cause.
        config: names the device whose nodes may be converted.

    Returns:
        Node number -> `Reason.PRESERVED` or `Reason.OTHER_DEVICE`.
    """
    ineligible: dict[int, Reason] = {}
    elsewhere: dict[str, bool] = {"": False}
    wanted = config.device.lower()
    for number, node in enumerate(view.nodes):
        device = node.device
        if device not in elsewhere:
            elsewhere[device] = wanted not in device.rpartition("/")[2].lower()
        if elsewhere[device]:
            ineligible[number] = Reason.OTHER_DEVICE
    for number, node in enumerate(view.nodes) if view.is_function else ():
        if node.op in _BOUNDARY_OPS:
            ineligible[number] = Reason.PRESERVED
    for reference in preserve:
        known = view.index.get(node_name(reference))
        if known is not None:
            ineligible[known] = Reason.PRESERVED
    return ineligible
